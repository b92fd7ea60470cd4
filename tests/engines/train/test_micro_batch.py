from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.attention import dense_mask, varlen_inputs
from grpo_dist.engines.train.micro_batch import MicroBatch, Run, cut_into_pieces, make_micro_batch
from grpo_dist.errors import BatchError
from grpo_dist.protocol import DataProto, Ragged, metric_values
from tests.engines.train.plain import weights
from tests.messages import refuses
from tests.models import branching_batch, objective, trainable_engine
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


def test_runs_on_paper() -> None:
    [piece] = cut_into_pieces(tree(), "shared")
    assert piece == [
        Run(0, True, 0, 1, -1),
        Run(0, True, 1, 3, 0),
        Run(0, False, 0, 1, 1),
        Run(0, False, 1, 2, 2),
        Run(0, False, 2, 3, 2),
        Run(1, False, 0, 1, 1),
        Run(0, False, 3, 4, 0),
        Run(0, False, 4, 6, -1),
    ]
    paths = [
        [token for run in path for token in (run.in_prompt, run.start, run.end)]
        for path in cut_into_pieces(tree(), "padded")
    ]
    prompt = [True, 0, 1, True, 1, 3]
    assert paths == [
        [*prompt, False, 0, 1, False, 1, 2],
        [*prompt, False, 0, 1, False, 2, 3],
        [True, 0, 1, False, 3, 4],
        [False, 4, 6],
        [True, 0, 3, False, 0, 1],
    ]


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


def as_lines(data: DataProto) -> tuple[DataProto, list[tuple[int, list[int]]]]:
    """Each token of a response at the end of a row of its own, without branches; and which tokens a row has."""
    prompts, responses, follows = (data[name].rows() for name in ("prompts", "responses", "predecessors"))
    texts, places = [], []
    for i, (prompt, response, before) in enumerate(zip(prompts, responses, follows, strict=True)):
        for place in range(len(response)):
            path = [place]
            while (at := int(before[path[0]])) >= 0:
                path.insert(0, at)
            start = prompt[: len(prompt) + at + 1].tolist()
            texts.append((start, response[path].tolist()))
            places.append((i, place))
    kept = [(text, place) for text, place in zip(texts, places, strict=True) if text[0]]
    columns = {
        "prompts": Ragged.from_rows([prompt for (prompt, _), _ in kept], torch.int32),
        "responses": Ragged.from_rows([response for (_, response), _ in kept], torch.int32),
        "response_mask": Ragged.from_rows([[1] * len(response) for (_, response), _ in kept], torch.int8),
    }
    return DataProto.from_dict(columns), [place for _, place in kept]


def log_probs(rank: int, path: str, layout: str) -> dict[str, Any]:
    engine = trainable_engine(path, layout=layout)
    data = branching_batch(num_groups=2, n=N)
    lines, places = as_lines(data)
    computed = engine.compute_log_probs(data, PassLimits("", 4)).rows()
    alone = engine.compute_log_probs(lines, PassLimits("", 20)).rows()
    return {
        "report": engine.forward.report,
        "computed": np.array([float(computed[row][place]) for row, place in places]),
        "alone": np.array([float(row[-1]) for row in alone]),
    }


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_log_probs_are_those_of_each_text_alone(random_models: dict[str, str], layout: str) -> None:
    [found] = run_ranks(1, log_probs, random_models["tied"], layout)
    assert layout in found["report"]
    np.testing.assert_allclose(found["computed"], found["alone"], atol=1e-5)
    assert len(found["alone"]) > 50


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


def test_the_cost_of_an_update_is_the_number_of_different_tokens() -> None:
    data = branching_batch(num_groups=1, n=N)
    tokens = int(data["prompts"].lengths[0]) + 18 * N
    assert make_micro_batch(data, (), 0, layout="shared", row_width=200).input_ids.shape == (1, tokens)
    padded = make_micro_batch(data, (), 0, layout="padded")
    assert padded.input_ids.numel() > 2 * tokens
