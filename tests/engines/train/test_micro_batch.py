"""Micro-batches of each layout, on paper; the rows of each micro-batch and of each rank."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_dist.engines.train.attention import dense_mask, varlen_inputs
from grpo_dist.engines.train.micro_batch import MicroBatch, make_micro_batch, response_tokens
from grpo_dist.engines.train.micro_batch_plan import (
    ATTENTION_PAIRS,
    Lengths,
    balance,
    first_fit,
    group_rows,
    plan_micro_batches,
)
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.media import MEDIA, Media, Picture
from tests.engines.train.plain import causal_lm, flat, log_probs, step, told
from tests.messages import says
from tests.models import GATED_DELTA_NET, branching_batch, objective, random_model, trainable_engine
from tests.ranks import run_ranks

LAYOUTS = ("padded", "packed", "shared")


def made(layout: str, *columns: str, padding_id: int = 0, **widths: int) -> MicroBatch:
    """Of three rows: 0 and 2 answer prompt 11 12 13, row 1 answers 14 15; the second token of row 1 is masked."""
    rows = {
        "prompts": Ragged.from_rows([[11, 12, 13], [14, 15], [11, 12, 13]], torch.int32),
        "responses": Ragged.from_rows([[21, 22], [23, 24, 25, 26], [27]], torch.int32),
        "response_mask": Ragged.from_rows([[1, 1], [1, 0, 1, 1], [1]], torch.int8),
        "advantages": Ragged.from_rows([[0.5, 0.5], [-1, -1, -1, -1], [2]], torch.float32),
    }
    return make_micro_batch(DataProto.from_dict(rows), columns, padding_id, layout=layout, **widths)


def pairs(batch: MicroBatch) -> list[tuple[int, int]]:
    """(token that predicts, token predicted), by id."""
    return list(zip(batch.input_ids.flatten()[batch.predictors].tolist(), batch.targets.tolist(), strict=True))


PAIRS = {(13, 21), (21, 22), (15, 23), (23, 24), (24, 25), (25, 26), (13, 27)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_response_token_is_predicted_by_the_token_before_it(layout: str) -> None:
    batch = made(layout, "advantages")
    assert sorted(pairs(batch)) == sorted(PAIRS)
    assert batch.response_mask.tolist() == [[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]]
    assert batch.columns["advantages"].tolist() == [[0.5, 0.5, 0, 0], [-1, -1, -1, -1], [2, 0, 0, 0]]
    assert batch.to_rows(batch.targets).tolist() == [[21, 22, 0, 0], [23, 24, 25, 26], [27, 0, 0, 0]]
    assert batch.input_ids.dtype == torch.int64
    says(told(made, layout, "old_log_probs"), "BatchError", "'old_log_probs'")


def test_padded_on_paper() -> None:
    batch = made("padded", padding_id=9)
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 9], [14, 15, 23, 24, 25, 26], [11, 12, 13, 27, 9, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert batch.segments is None, "padding follows the real tokens: causal attention needs no mask"


def test_packed_on_paper() -> None:
    """Longest first; 6 tokens, then 5 and 4 side by side in a row of 9."""
    batch = made("packed", row_width=9)
    assert batch.input_ids.tolist() == [[14, 15, 23, 24, 25, 26, 0, 0, 0], [11, 12, 13, 21, 22, 11, 12, 13, 27]]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0], "of padding: 0"
    assert made("packed", row_width=15).input_ids.shape == (1, 15), "no padding"


def test_shared_on_paper() -> None:
    """Rows 0 and 2 are [11 12 13 | 21 22 | 27]: 27 sees the prompt and itself."""
    batch = made("shared")
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 27], [14, 15, 23, 24, 25, 26]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3], [0, 1, 2, 3, 4, 5]]
    sees = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    sees += [[1, 1, 1, 0, 0, 1]]
    assert dense_mask(batch.segments)[0, 0].int().tolist() == sees  # type: ignore[arg-type]
    beside = made("shared", row_width=20)
    assert beside.input_ids.shape == (1, 12)
    mask = dense_mask(beside.segments)[0, 0]  # type: ignore[arg-type]
    assert not mask[6:, :6].any(), "groups side by side do not see each other"
    assert mask.diagonal().all(), "every token sees itself, so that no softmax is empty"


def test_wider_than_its_sequences() -> None:
    """All in one row, as on GPU, and padding behind them at position 0; padded rows are as long as the longest."""
    padded, packed, shared = (made(layout, row_width=40, min_width=40) for layout in LAYOUTS)
    assert padded.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    for batch in (packed, shared):
        assert batch.position_ids.shape == (1, 40)
        assert not batch.position_ids[0, 15:].any()
        assert batch.position_ids.max() == 5
        assert set(pairs(batch)) == PAIRS
    starts = varlen_inputs(packed.position_ids)["cu_seq_lens_q"].tolist()
    assert starts == [0, 6, 11, *range(15, 41)], "each padding token is a sequence of its own"


def test_rows_that_ranks_split_are_a_multiple_of_them() -> None:
    """15 tokens become 16 for 4 ranks; padded rows stay as long as the longest sequence, since they are not split."""
    packed, padded = (made(layout, row_width=15, multiple=4) for layout in ("packed", "padded"))
    assert packed.input_ids.shape == (1, 16)
    assert set(pairs(packed)) == PAIRS
    assert padded.input_ids.shape == (3, 6)
    empty = make_micro_batch(DataProto(), (), 0, layout="packed", multiple=4)
    assert empty.input_ids.shape == (1, 8)
    assert empty.segments is not None
    assert make_micro_batch(DataProto(), (), 0, layout="padded", multiple=4).segments is None


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_no_rows_give_one_masked_sequence(layout: str) -> None:
    for none in (DataProto(), branching_batch(num_groups=1, n=1).slice(0, 0)):
        batch = make_micro_batch(none, ("advantages",), padding_id=7, layout=layout)
        assert batch.input_ids.tolist() == [[7, 7]]
        assert batch.response_mask.tolist() == batch.columns["advantages"].tolist() == [[0]]
        assert batch.to_rows(torch.ones(1)).shape == (1, 1)


N, TEMPERATURE = 3, 0.7
HYBRID = {"initializer_range": 0.08, **GATED_DELTA_NET}


def test_a_tree_on_paper() -> None:
    """Each token is there once, sees what it follows, and is predicted by it; the new beginning by nothing.

    A prompt 11 12 13 of two rows. The first: 21 22, 23 behind 21, 24 behind 11, and 25 26, which begin anew.
    """
    rows = {
        "prompts": Ragged.from_rows([[11, 12, 13]] * 2, torch.int32),
        "responses": Ragged.from_rows([[21, 22, 23, 24, 25, 26], [31]], torch.int32),
        "predecessors": Ragged.from_rows([[-1, 0, 0, -3, -4, 4], [-1]], torch.int32),
        "response_mask": Ragged.from_rows([[1, 1, 1, 1, 0, 1], [1]], torch.int8),
    }
    data = DataProto.from_dict(rows)
    batch = make_micro_batch(data, (), 0, layout="shared")
    tokens = np.array([11, 12, 13, 21, 22, 23, 31, 24, 25, 26])
    assert batch.input_ids.tolist() == [tokens.tolist()]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 3, 1, 0, 1]]
    mask = dense_mask(batch.segments)[0, 0].numpy()  # type: ignore[arg-type]
    sees = {token: tokens[row].tolist() for token, row in zip(tokens, mask, strict=True) if token > 21}
    behind = {22: [11, 12, 13, 21, 22], 23: [11, 12, 13, 21, 23], 31: [11, 12, 13, 31], 24: [11, 24], 26: [25, 26]}
    assert sees == behind | {25: [25]}
    predicted = {after: before for before, after in pairs(batch) if after != 25}
    assert predicted == {21: 13, 22: 21, 23: 21, 24: 11, 26: 25, 31: 13}
    assert response_tokens(data, "shared").tolist() == [6, 1]
    assert response_tokens(data, "packed").tolist() == [5 + 5 + 2 + 2 - 3, 1], "of each path, but one prompt"


def by_layout(rank: int, path: str, expected: np.ndarray) -> None:
    known = ~np.isnan(expected)
    assert known.sum() > 50
    for layout in LAYOUTS:
        engine = trainable_engine(path, layout=layout)
        found = log_probs(engine, branching_batch(num_groups=2, n=N), 4)
        assert layout in engine.forward.report
        np.testing.assert_allclose(found[known], expected[known], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def each_alone(path: str, data: DataProto) -> Iterator[float]:
    """By transformers, each token of a response at the end of the text that it follows; nan where it begins one."""
    model, names = causal_lm(path), ("prompts", "responses", "predecessors")
    for prompt, response, before in zip(*(data[name].rows() for name in names), strict=True):
        for place in range(len(response)):
            path_back = [place]
            while (at := int(before[path_back[0]])) >= 0:
                path_back.insert(0, at)
            ids = torch.cat([prompt[: len(prompt) + at + 1], response[path_back]]).long()
            logits = model(input_ids=ids[None]).logits[0] / TEMPERATURE
            yield float(logits[-2].log_softmax(-1)[ids[-1]]) if len(ids) > 1 else math.nan


@pytest.mark.parametrize("family", [("Qwen3", {}), pytest.param(("Qwen3_5Text", HYBRID), marks=pytest.mark.deep)])
def test_log_probs_are_those_of_each_text_alone(family: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    path = random_model(family[0], tmp_path, head_dim=8, **family[1])
    run_ranks(1, by_layout, path, np.array(list(each_alone(path, branching_batch(num_groups=2, n=N)))))


def steps(rank: int, path: str, layout: str, size: int, loss_agg_mode: str, loss_mode: str) -> dict[str, Any]:
    engine = trainable_engine(path, layout=layout, gradient_checkpointing=True)
    data = branching_batch(num_groups=4, n=N)
    rows = np.array_split(np.random.default_rng(3).permutation(len(data)), dist.get_world_size())[rank]
    masks = {"kl_loss_type": "unbiased_k3", "off_policy_threshold": 1.0} if loss_mode == "gspo" else {}
    settings = objective(loss_agg_mode=loss_agg_mode, loss_mode=loss_mode, **masks)
    metrics = [step(engine, data.index(np.sort(rows)), size, settings) for _ in range(2)]
    return {"weights": flat(engine), "metrics": metrics}


@pytest.mark.deep
@pytest.mark.parametrize("modes", [("token-mean", "vanilla"), ("seq-mean-token-mean", "gspo")])
def test_an_update_is_the_same_however_the_rows_lie(random_models: dict[str, str], modes: tuple[str, str]) -> None:
    """Test number one: an episode of several branches is one sequence, in any layout, micro-batch and rank."""
    [expected] = run_ranks(1, steps, random_models["tied"], "padded", 1, *modes)
    for ranks, layout, size in ((1, "shared", 12), (1, "packed", 5), (2, "shared", 3)):
        found = run_ranks(ranks, steps, random_models["tied"], layout, size, *modes)
        for number, metrics in enumerate(expected["metrics"]):
            norms = [each["metrics"][number]["actor/grad_norm"] for each in found]
            assert norms == pytest.approx([metrics["actor/grad_norm"]] * ranks, rel=1e-4)
        loss = sum(each["metrics"][0]["actor/loss"] for each in found)
        assert loss == pytest.approx(expected["metrics"][0]["actor/loss"], rel=1e-5)
        # AdamW makes a step of whatever gradient: where it is all but 0, rounding decides
        assert np.quantile(np.abs(found[0]["weights"] - expected["weights"]), 0.999) < 3e-5


# --- which rows are in which -----------------------------------------------------------------------------------------
def lengths(groups: list[int], prompts: list[int], responses: list[int]) -> Lengths:
    return Lengths(np.array(groups), np.array(prompts), np.array(responses))


def random_lengths(num_groups: int, n: int, scale: float | None = None) -> Lengths:
    """Groups with a prompt each; with `scale` the longest responses, of which there are few, are in the last groups."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(num_groups), n)
    prompts, count = rng.integers(5, 60, num_groups)[groups], num_groups * n
    drawn = rng.integers(1, 100, count) if scale is None else np.sort(rng.exponential(scale, count).astype(int) + 1)
    return Lengths(groups, prompts, drawn)


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


def test_cost_and_first_fit_by_hand() -> None:
    """Prompt 10, responses 4 and 2: 16 tokens; pairs 50 + 4 * 12 + 2 * 11 = 120."""
    rows = lengths([0, 0], [10, 10], [4, 2])
    assert rows.tokens(np.array([0, 1])) == 16
    assert rows.tokens(np.array([0, 1]), shared=False) == 26
    assert rows.cost(np.array([0, 1])) == pytest.approx(16 + 120 / ATTENTION_PAIRS)
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
    for part in found:
        groups = [part[rows.groups[part] == group] for group in np.unique(rows.groups[part])]
        assert sum(rows.tokens(group, shared=shared) for group in groups) <= budget
        assert budget < 900 or {len(group) for group in groups} == {n}, "a group that fits is never cut"


def test_all_ranks_make_equally_many() -> None:
    rows, empty = random_lengths(4, 4), lengths([], [], [])
    assert len(plan(rows, budget=5000)) == 1
    spread = plan(rows, budget=5000, ranks_make=3)
    assert [len(part) for part in spread].count(0) == 0, "spread, rather than two idle micro-batches"
    assert [part.tolist() for part in plan(empty, budget=100, ranks_make=2)] == [[], []]
    assert [part.dtype for part in plan(empty, budget=100)] == [np.int64]
    few = plan(random_lengths(1, 1), budget=5000, ranks_make=3)
    assert [len(part) for part in few] == [1, 0, 0]


def costs(lengths: Lengths, parts: list[np.ndarray]) -> list[float]:
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
    parts = balance(lengths(list(range(5)), [1] * 5, [4, 0, 3, 1, 2]), 2)
    assert [part.tolist() for part in parts] == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize("sizes", [(32, 8, 2), (32, 8, 4), (1, 8, 4), (3, 4, 2), (0, 4, 2), (2, 1, 3)])
def test_every_row_is_on_one_rank(sizes: tuple[int, int, int]) -> None:
    *groups, ranks = sizes
    parts = balance(random_lengths(*groups, scale=300), ranks)
    assert len(parts) == ranks
    assert sorted(np.concatenate(parts).tolist()) == list(range(groups[0] * groups[1]))
    assert all((np.diff(part) > 0).all() for part in parts), "ascending"


def test_groups_stay_whole_where_that_is_even() -> None:
    lengths = random_lengths(32, 8, scale=300)
    parts = balance(lengths, 2)
    assert set(lengths.groups[parts[0]]).isdisjoint(lengths.groups[parts[1]])
    found, in_order = costs(lengths, parts), costs(lengths, np.split(np.arange(256), 2))
    assert max(found) / min(found) < 1.06
    assert max(in_order) / min(in_order) > 2, "rows cut in their order are not balanced: the check shows nothing"


def test_groups_that_are_too_few_are_cut() -> None:
    """Of three groups two ranks have a whole one and a half each, rather than two against one; of a lone one all."""
    three = Lengths(np.repeat(np.arange(3), 4), np.full(12, 10), np.full(12, 50))
    parts = balance(three, 2)
    assert sorted(map(len, parts)) == [6, 6]
    found = costs(three, parts)
    assert max(found) / min(found) < 1.05
    alone = balance(Lengths(np.zeros(8), np.full(8, 50), np.full(8, 20)), 4)
    assert [len(part) for part in alone] == [2, 2, 2, 2]
