"""Micro-batches of each layout, on paper; the rows of each micro-batch and of each rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.attention import dense_mask, varlen_inputs
from grpo_dist.engines.train.micro_batch import MicroBatch, make_micro_batch
from grpo_dist.engines.train.micro_batch_plan import (
    ATTENTION_PAIRS,
    Lengths,
    balance,
    first_fit,
    group_rows,
    plan_micro_batches,
)
from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Ragged, metric_values
from grpo_dist.protocol.media import MEDIA, Media, Picture
from tests.engines.train.plain import weights
from tests.messages import refuses
from tests.models import GATED_DELTA_NET, branching_batch, objective, random_model, trainable_engine
from tests.ranks import run_ranks


def three_rows() -> DataProto:
    """Rows 0 and 2 answer prompt 11 12 13, row 1 answers 14 15; the second token of row 1 is masked."""
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[11, 12, 13], [14, 15], [11, 12, 13]], torch.int32),
            "responses": Ragged.from_rows([[21, 22], [23, 24, 25, 26], [27]], torch.int32),
            "response_mask": Ragged.from_rows([[1, 1], [1, 0, 1, 1], [1]], torch.int8),
            "advantages": Ragged.from_rows([[0.5, 0.5], [-1, -1, -1, -1], [2]], torch.float32),
        }
    )


def pairs(batch: MicroBatch) -> list[tuple[int, int]]:
    """(token that predicts, token predicted), by id."""
    return list(zip(batch.input_ids.flatten()[batch.predictors].tolist(), batch.targets.tolist(), strict=True))


PAIRS = {(13, 21), (21, 22), (15, 23), (23, 24), (24, 25), (25, 26), (13, 27)}


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_each_response_token_is_predicted_by_the_token_before_it(layout: str) -> None:
    batch = make_micro_batch(three_rows(), ("advantages",), padding_id=0, layout=layout)
    assert set(pairs(batch)) == PAIRS
    assert len(pairs(batch)) == len(PAIRS)
    assert batch.response_mask.tolist() == [[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]]
    assert batch.columns["advantages"].tolist() == [[0.5, 0.5, 0, 0], [-1, -1, -1, -1], [2, 0, 0, 0]]
    assert batch.to_rows(batch.targets).tolist() == [[21, 22, 0, 0], [23, 24, 25, 26], [27, 0, 0, 0]]
    assert batch.input_ids.dtype == torch.int64


def test_padded_on_paper() -> None:
    batch = make_micro_batch(three_rows(), (), padding_id=9, layout="padded")
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 9], [14, 15, 23, 24, 25, 26], [11, 12, 13, 27, 9, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert batch.segments is None, "padding follows the real tokens: causal attention needs no mask"


def test_packed_on_paper() -> None:
    """Longest first; 6 tokens, then 5 and 4 side by side in a row of 9."""
    batch = make_micro_batch(three_rows(), (), padding_id=0, layout="packed", row_width=9)
    assert batch.input_ids.tolist() == [[14, 15, 23, 24, 25, 26, 0, 0, 0], [11, 12, 13, 21, 22, 11, 12, 13, 27]]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0], "of padding: 0"
    one = make_micro_batch(three_rows(), (), padding_id=0, layout="packed", row_width=15)
    assert one.input_ids.shape == (1, 15), "no padding"


def test_shared_on_paper() -> None:
    """Rows 0 and 2 are [11 12 13 | 21 22 | 27]: 27 sees the prompt and itself."""
    batch = make_micro_batch(three_rows(), (), padding_id=0, layout="shared")
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 27], [14, 15, 23, 24, 25, 26]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 2, 3, 4, 5]]
    assert batch.segments is not None
    assert dense_mask(batch.segments)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]
    beside = make_micro_batch(three_rows(), (), padding_id=0, layout="shared", row_width=20)
    assert beside.input_ids.shape == (1, 12)
    mask = dense_mask(beside.segments)[0, 0]  # type: ignore[arg-type]
    assert not mask[6:, :6].any(), "groups side by side do not see each other"
    assert mask.diagonal().all(), "every token sees itself, so that no softmax is empty"


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_wider_than_its_sequences(layout: str) -> None:
    """All in one row, as on GPU, and padding behind them at position 0; padded rows are as long as the longest."""
    batch = make_micro_batch(three_rows(), (), padding_id=0, layout=layout, row_width=40, min_width=40)
    if layout == "padded":
        assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
        return
    assert batch.position_ids.shape == (1, 40)
    assert not batch.position_ids[0, 15:].any()
    assert batch.position_ids.max() == 5
    assert set(pairs(batch)) == PAIRS
    if layout == "packed":
        starts = varlen_inputs(batch.position_ids)["cu_seq_lens_q"].tolist()
        assert starts == [0, 6, 11, *range(15, 41)], "each padding token is a sequence of its own"


def test_rows_that_ranks_split_are_a_multiple_of_them() -> None:
    """15 tokens become 16 for 4 ranks; padded rows stay as long as the longest sequence, since they are not split."""
    packed, padded = (make_micro_batch(three_rows(), (), 0, layout=each, row_width=15, multiple=4)
                      for each in ("packed", "padded"))  # fmt: skip
    assert packed.input_ids.shape == (1, 16)
    assert set(pairs(packed)) == PAIRS
    assert padded.input_ids.shape == (3, 6)
    empty = make_micro_batch(DataProto(), (), 0, layout="packed", multiple=4)
    assert empty.input_ids.shape == (1, 8)
    assert empty.segments is not None
    assert make_micro_batch(DataProto(), (), 0, layout="padded", multiple=4).segments is None


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_no_rows_give_one_masked_sequence(layout: str) -> None:
    batch = make_micro_batch(three_rows().slice(0, 0), ("advantages",), padding_id=7, layout=layout)
    assert batch.input_ids.tolist() == [[7, 7]]
    assert batch.response_mask.tolist() == [[0]]
    assert batch.columns["advantages"].tolist() == [[0]]
    assert batch.to_rows(torch.ones(1)).shape == (1, 1)
    assert make_micro_batch(DataProto(), ("advantages",), padding_id=7).response_mask.tolist() == [[0]]


def test_a_missing_column_is_named() -> None:
    with refuses(BatchError, "'old_log_probs'"):
        make_micro_batch(three_rows(), ("old_log_probs",), padding_id=0)


N = 3


def tree() -> DataProto:
    """A prompt 11 12 13 of two rows. The first: 21 22, 23 behind 21, 24 behind 11, and 25 26, which begin anew."""
    return DataProto.from_dict(
        {
            "prompts": Ragged.from_rows([[11, 12, 13]] * 2, torch.int32),
            "responses": Ragged.from_rows([[21, 22, 23, 24, 25, 26], [31]], torch.int32),
            "predecessors": Ragged.from_rows([[-1, 0, 0, -3, -4, 4], [-1]], torch.int32),
            "response_mask": Ragged.from_rows([[1, 1, 1, 1, 0, 1], [1]], torch.int8),
        }
    )


def test_a_tree_on_paper() -> None:
    """Each token is there once, sees what it follows, and is predicted by it; the new beginning by nothing."""
    batch = make_micro_batch(tree(), (), 0, layout="shared")
    tokens = [11, 12, 13, 21, 22, 23, 31, 24, 25, 26]
    assert batch.input_ids.tolist() == [tokens]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 3, 1, 0, 1]]
    assert batch.segments is not None
    sees = {
        token: [other for other, seen in zip(tokens, row, strict=True) if seen]
        for token, row in zip(tokens, dense_mask(batch.segments)[0, 0].tolist(), strict=True)
    }
    assert sees[22] == [11, 12, 13, 21, 22]
    assert sees[23] == [11, 12, 13, 21, 23]
    assert sees[31] == [11, 12, 13, 31]
    assert sees[24] == [11, 24]
    assert sees[26] == [25, 26]
    predicted = dict(zip(batch.targets.tolist(), batch.input_ids[0, batch.predictors].tolist(), strict=True))
    del predicted[25]
    assert predicted == {21: 13, 22: 21, 23: 21, 24: 11, 26: 25, 31: 13}


def as_lines(data: DataProto) -> tuple[DataProto, list[tuple[int, int]]]:
    """Each token of a response at the end of a row of its own, without branches; and which tokens a row has."""
    prompts, responses, follows = (data[name].rows() for name in ("prompts", "responses", "predecessors"))
    starts, ends, places = [], [], []
    for i, (prompt, response, before) in enumerate(zip(prompts, responses, follows, strict=True)):
        for place in range(len(response)):
            path = [place]
            while (at := int(before[path[0]])) >= 0:
                path.insert(0, at)
            if start := prompt[: len(prompt) + at + 1].tolist():
                starts.append(start)
                ends.append(response[path].tolist())
                places.append((i, place))
    columns = {"prompts": Ragged.from_rows(starts, torch.int32), "responses": Ragged.from_rows(ends, torch.int32)}
    columns["response_mask"] = Ragged.from_rows([[1] * len(end) for end in ends], torch.int8)
    return DataProto.from_dict(columns), places


def log_probs(rank: int, path: str, lines: DataProto, places: list[tuple[int, int]]) -> dict[str, Any]:
    """By layout, of branches and of lines, and what was reported."""
    found = {}
    for layout in ("shared", "packed", "padded"):
        engine = trainable_engine(path, layout=layout)
        computed = engine.compute_log_probs(branching_batch(num_groups=2, n=N), PassLimits("", 4)).rows()
        alone = engine.compute_log_probs(lines, PassLimits("", 20)).rows()
        pair = [float(computed[row][place]) for row, place in places], [float(row[-1]) for row in alone]
        found[layout] = *pair, engine.forward.report
    return found


@pytest.mark.parametrize(
    ("family", "sizes"), [("Qwen3", {}), ("Qwen3_5Text", {"initializer_range": 0.08, **GATED_DELTA_NET})]
)
def test_log_probs_are_those_of_each_text_alone(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    lines, places = as_lines(branching_batch(num_groups=2, n=N))
    assert len(places) > 50
    [found] = run_ranks(1, log_probs, random_model(family, tmp_path, head_dim=8, **sizes), lines, places)
    for layout, (computed, alone, report) in found.items():
        assert layout in report
        np.testing.assert_allclose(computed, alone, atol=1e-5)


def steps(rank: int, path: str, layout: str, size: int, loss_agg_mode: str, loss_mode: str) -> dict[str, Any]:
    """The weights and the loss after two optimizer steps."""
    engine = trainable_engine(path, layout=layout, gradient_checkpointing=True)
    data = branching_batch(num_groups=4, n=N)
    rows = np.array_split(np.random.default_rng(3).permutation(len(data)), dist.get_world_size())[rank]
    masks = {"kl_loss_type": "unbiased_k3", "off_policy_threshold": 1.0} if loss_mode == "gspo" else {}
    settings = objective(loss_agg_mode=loss_agg_mode, loss_mode=loss_mode, **masks)
    results = [engine.train_mini_batch(data.index(np.sort(rows)), settings, PassLimits("", size)) for _ in range(2)]
    held = np.concatenate([weight.ravel() for weight in weights(engine).values()])
    return {"weights": held, "metrics": [metric_values(result.metrics) for result in results]}


@pytest.mark.deep
@pytest.mark.parametrize(("loss_agg_mode", "loss_mode"), [("token-mean", "vanilla"), ("seq-mean-token-mean", "gspo")])
def test_an_update_is_the_same_however_the_rows_lie(
    random_models: dict[str, str], loss_agg_mode: str, loss_mode: str
) -> None:
    """Test number one: an episode of several branches is one sequence, in any layout, micro-batch and rank."""
    modes = (loss_agg_mode, loss_mode)
    [expected] = run_ranks(1, steps, random_models["tied"], "padded", 1, *modes)
    for ranks, layout, size in ((1, "shared", 12), (1, "packed", 5), (2, "shared", 3)):
        found = run_ranks(ranks, steps, random_models["tied"], layout, size, *modes)
        for number, metrics in enumerate(expected["metrics"]):
            norms = [each["metrics"][number]["actor/grad_norm"] for each in found]
            assert norms == pytest.approx([metrics["actor/grad_norm"]] * ranks, rel=1e-4)
        loss = sum(each["metrics"][0]["actor/loss"] for each in found)
        assert loss == pytest.approx(expected["metrics"][0]["actor/loss"], rel=1e-5)
        # AdamW makes a step of whatever gradient: where it is all but 0, rounding decides
        off = np.abs(found[0]["weights"] - expected["weights"])
        assert np.quantile(off, 0.999) < 3e-5


# --- which rows are in which -----------------------------------------------------------------------------------------
def lengths(groups: list[int], prompts: list[int], responses: list[int]) -> Lengths:
    return Lengths(np.array(groups), np.array(prompts), np.array(responses))


def random_lengths(num_groups: int, n: int, seed: int = 0) -> Lengths:
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(num_groups), n)
    return Lengths(groups, rng.integers(5, 60, num_groups)[groups], rng.integers(1, 100, num_groups * n))


def plan(
    rows: Lengths, *, size: int = 1, budget: int | None = None, shared: bool = True, ranks_make: int = 0, **more: bool
) -> list:
    limits: dict[str, Any] = {"micro_batch_size": size, "max_token_len": budget, "shared": shared} | more
    return plan_micro_batches(rows, agree=lambda count: max(count, ranks_make), **{"split": True} | limits)


def test_equal_prompts_are_a_group_unless_they_have_other_pictures() -> None:
    prompts = Ragged.from_rows([[1, 2], [3], [1, 2], [1, 2, 0], [3]], torch.int32)
    assert group_rows(DataProto({"prompts": prompts})).tolist() == [0, 1, 0, 2, 1]
    none = np.zeros(0, np.int32)
    cat, dog = (Media((Picture(name, (1, 1), "", {"token_ids": none}),), (0,)) for name in ("cat", "dog"))
    pictures = DataProto.from_dict({"prompts": prompts}, {MEDIA: [cat, None, dog, None, None]})
    assert group_rows(pictures).tolist() == [0, 1, 2, 3, 1]


def test_cost_by_hand() -> None:
    """Prompt 10, responses 4 and 2: 16 tokens; pairs 50 + 4 * 12 + 2 * 11 = 120."""
    rows = lengths([0, 0], [10, 10], [4, 2])
    assert rows.tokens(np.array([0, 1])) == 16
    assert rows.tokens(np.array([0, 1]), shared=False) == 26
    assert rows.cost(np.array([0, 1])) == pytest.approx(16 + 120 / ATTENTION_PAIRS)


def test_first_fit_by_hand() -> None:
    assert first_fit([3, 7, 5, 2, 12], 10) == [[4], [1, 0], [2, 3]]
    assert first_fit([], 10) == []


def test_groups_stay_together_where_they_fit() -> None:
    """Groups of 4 into micro-batches of 8; a group of 12 is cut in two parts of 6. What is over the budget is alone."""
    rows = lengths([0] * 4 + [1] * 4 + [2] * 12, [5] * 20, [3] * 20)
    found = [sorted(part.tolist()) for part in plan(rows, size=8)]
    assert sorted(found) == [list(range(8)), list(range(8, 14)), list(range(14, 20))]
    found = plan(lengths([0, 0], [10, 10], [500, 3]), budget=100)
    assert sorted(part.tolist() for part in found) == [[0], [1]]


def test_groups_that_stay_whole() -> None:
    """Three pairs, 13 tokens each, where one sequence or 20 tokens are allowed: a micro-batch each, side by side."""
    rows = lengths([0, 1, 0, 2, 2, 1], [5] * 6, [4] * 6)
    for limit in ({"size": 1}, {"budget": 20}, {"budget": 3}):
        found = plan(rows, split=False, **limit)
        assert sorted(part.tolist() for part in found) == [[0, 2], [1, 5], [3, 4]]
    (one,) = plan(rows, size=6, split=False)
    assert sorted(one.reshape(3, 2).tolist()) == [[0, 2], [1, 5], [3, 4]]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("num_groups", "n", "budget"), [(6, 8, 900), (6, 8, 200), (1, 16, 300), (3, 1, 160)])
def test_no_micro_batch_exceeds_the_budget(num_groups: int, n: int, budget: int, shared: bool) -> None:
    rows = random_lengths(num_groups, n)
    found = plan(rows, budget=budget, shared=shared)
    assert sorted(np.concatenate(found).tolist()) == list(range(num_groups * n))
    whole = np.unique(rows.groups, return_counts=True)[1]
    for part in found:
        groups = [part[rows.groups[part] == g] for g in np.unique(rows.groups[part])]
        assert sum(rows.tokens(group, shared=shared) for group in groups) <= budget
        assert budget < 900 or [len(group) for group in groups] == [whole[g] for g in np.unique(rows.groups[part])], (
            "a group that fits is never cut"
        )


def test_all_ranks_make_equally_many() -> None:
    rows = random_lengths(4, 4)
    alone = plan(rows, budget=5000)
    found = plan(rows, budget=5000, ranks_make=3)
    assert len(alone) == 1
    assert [len(part) for part in found].count(0) == 0, "spread, rather than two idle micro-batches"
    empty = lengths([], [], [])
    assert [part.tolist() for part in plan(empty, budget=100, ranks_make=2)] == [[], []]
    assert [part.dtype for part in plan(empty, budget=100)] == [np.int64]
    few = plan(random_lengths(1, 1), budget=5000, ranks_make=3)
    assert [len(part) for part in few] == [1, 0, 0]


def uneven_lengths(num_groups: int, n: int) -> Lengths:
    rng = np.random.default_rng(0)
    uids = np.repeat(np.array([f"p{i}" for i in range(num_groups)], dtype=object), n)
    responses = np.sort(rng.exponential(300, num_groups * n).astype(int) + 1)
    return Lengths(uids, np.repeat(rng.integers(5, 300, num_groups), n), responses)


def costs(lengths: Lengths, parts: list[np.ndarray]) -> list[float]:
    """What each part takes; a group's prompt counts in every part that has some of it."""
    return [
        sum(lengths.cost(part[lengths.groups[part] == uid]) for uid in np.unique(lengths.groups[part]))
        for part in parts
    ]


def test_costs_of_micro_batches_are_nearly_equal() -> None:
    found = costs(rows := random_lengths(32, 8), plan(rows, budget=3000))
    assert max(found) / min(found) < 1.1
    assert found == sorted(found, reverse=True)


def test_balance_by_hand() -> None:
    """Groups of 5, 4, 3, 2 and 1 tokens, costliest first to the idlest: 5 2 | 4 3 1."""
    responses = np.array([4, 0, 3, 1, 2])
    parts = balance(Lengths(np.arange(5), np.ones(5, dtype=int), responses), 2)
    assert [part.tolist() for part in parts] == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize(
    ("num_groups", "n", "ranks"), [(32, 8, 2), (32, 8, 4), (1, 8, 4), (3, 4, 2), (0, 4, 2), (2, 1, 3)]
)
def test_every_row_is_on_one_rank(num_groups: int, n: int, ranks: int) -> None:
    parts = balance(uneven_lengths(num_groups, n), ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(num_groups * n))
    assert all((np.diff(part) > 0).all() for part in parts), "ascending"


def test_groups_stay_whole_where_that_is_even() -> None:
    lengths = uneven_lengths(32, 8)
    parts = balance(lengths, 2)
    groups = [set(lengths.groups[part]) for part in parts]
    assert groups[0].isdisjoint(groups[1])
    found = costs(lengths, parts)
    assert max(found) / min(found) < 1.06
    in_order = costs(lengths, np.split(np.arange(256), 2))
    assert max(in_order) / min(in_order) > 2, "rows cut in their order are not balanced: the check shows nothing"


def test_groups_that_are_too_few_are_cut() -> None:
    """Of three groups two ranks have a whole one and a half each, rather than two against one; of a lone one all."""
    lengths = Lengths(np.repeat(np.arange(3), 4), np.full(12, 10), np.full(12, 50))
    parts = balance(lengths, 2)
    assert sorted(map(len, parts)) == [6, 6]
    found = costs(lengths, parts)
    assert max(found) / min(found) < 1.05
    parts = balance(Lengths(np.zeros(8), np.full(8, 50), np.full(8, 20)), 4)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
