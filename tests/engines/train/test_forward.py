"""The check of layout and head: what it accepts, gives up and says; models whose numbers depend on their company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import attention, forward, lm_head, model_loading
from grpo_dist.engines.train.attention import SEGMENTS, attention_implementation
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.fsdp_model import load_sharded_model
from grpo_dist.engines.train.lm_head import response_values
from grpo_dist.engines.train.segment_attention import segment_attention_forward
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto
from tests.engines.train.plain import built, one_by_one
from tests.messages import says
from tests.models import objective, random_batch, random_model, trainable_engine
from tests.ranks import LIMIT_S, run_ranks
from tests.worker_settings import model_settings

own_attention = modeling_qwen3.eager_attention_forward


def columns(engine: FSDPEngine, data: DataProto) -> list[Any]:
    found = engine.compute_columns(data, ("log_probs", "entropies", "gradient_norms"), PassLimits("", 8))
    return [column.values.numpy().copy() for column in found.values()]


def one_rank(rank: int, paths: dict[str, str]) -> dict[str, Any]:
    data = random_batch(num_groups=3, n=4)
    out: dict[str, Any] = {}
    for name in ("Qwen3", "Gemma2", "Mistral"):
        engine = trainable_engine(paths[name])
        padded = trainable_engine(paths[name], layout="padded")
        out[name] = {"columns": columns(engine, data), "padded": columns(padded, data)}
        metrics = engine.train_mini_batch(data, objective(), PassLimits("", 8)).metrics
        out[name] |= {"report": engine.forward.report, "layout": engine.forward.layout, "metrics": sorted(metrics)}
    bf16 = trainable_engine(paths["Qwen3"], dtype="bf16")
    bf16.compute_log_probs(data, PassLimits("", 8))
    out["bf16"] = bf16.forward.report
    out["broken"] = broken(paths["Qwen3"], data)
    return out


def broken(path: str, data: DataProto) -> dict[str, Any]:
    out = {}
    for name, layout, module, part, other in (
        ("mask", "shared", forward, "attention_inputs", lambda *args: {}),
        ("refused", "packed", forward, "attention_inputs", refuse),
        ("head", "shared", lm_head, "response_values", off_by_one),
        ("everything", "shared", forward.PolicyForward, "_difference", lambda *args: (1.0, "")),
        ("backward", "shared", model_loading, "attention_implementation", on_a_gpu),
        ("attention", "packed", attention, "segment_attention_forward", other_scale),
        ("later", "shared", modeling_qwen3, "eager_attention_forward", sees_all),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, part, other)
            try:
                engine = trainable_engine(path, layout=layout)
                out[name] = (columns(engine, data), engine.forward.report)
            except ConfigError as error:
                out[name] = ([], str(error))
    return out


def off_by_one(*args: Any) -> Any:
    values = response_values(*args)
    return values._replace(log_probs=values.log_probs + 1)


def on_a_gpu(model: Any, layout: str, device: str) -> str:
    """FlexAttention, which goes backward on a GPU only."""
    return attention_implementation(model, layout, "cuda")


def other_scale(*args: Any, scaling: float, **kwargs: Any) -> Any:
    """An attention that is another one in all layouts."""
    return segment_attention_forward(*args, scaling=2 * scaling, **kwargs)


def sees_all(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """A model's own attention without a causal mask."""
    return own_attention(module, query, key, value, None, **kwargs)


def refuse(segments: Any, *args: Any) -> dict[str, Any]:
    if segments is None:
        return {}
    raise ValueError("this model takes no 4-D mask")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    changes: dict[str, dict[str, Any]] = {
        "Qwen3": {"head_dim": 8},
        "Gemma2": {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0},
        "Mistral": {"head_dim": 8, "sliding_window": 4},
    }
    paths = {name: random_model(name, tmp_path_factory.mktemp(name), **some) for name, some in changes.items()}
    (out,) = run_ranks(1, one_rank, paths)
    return out


def test_a_good_layout_is_kept_capping_stays_padded_and_windows_do_not(alone: dict[str, Any]) -> None:
    for report in (alone["Qwen3"]["report"], alone["bf16"]):
        assert report.startswith("shared prompts; ")
    for name, layout, reasons in (("Gemma2", "padded", ["softcap", "whole micro-batches"]), ("Mistral", "shared", [])):
        case = alone[name]
        assert case["layout"] == layout
        says(case["report"], "shared prompts", *reasons)
        for found, expected in zip(case["columns"], case["padded"], strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert "actor/entropy" in case["metrics"]


@pytest.mark.parametrize(
    ("broken", "left", "parts"),
    [
        ("mask", "padded sequences", ["shared prompts:", "log-probs differ"]),
        ("refused", "padded sequences", ["packed sequences: ValueError:"]),
        ("backward", "padded sequences", ["shared prompts:", "backward pass"]),  # its attention cannot go backward
        ("attention", "padded sequences", ["packed sequences", SEGMENTS]),  # wrong in all layouts
        ("head", "padded sequences", ["shared prompts", "whole micro-batches", "chunked output", "log-probs differ"]),
        ("everything", "one sequence", ["shared prompts", "whole micro-batches", "padded sequences: log-probs differ"]),
    ],
)
def test_what_differs_is_given_up(alone: dict[str, Any], broken: str, left: str, parts: list[str]) -> None:
    """And padded sequences, or sequences alone, give what they should."""
    found, report = alone["broken"][broken]
    assert report.startswith(left)
    says(report, *parts)
    for mine, theirs in zip(found, alone["Qwen3"]["padded"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_a_model_whose_tokens_see_later_ones_is_refused(alone: dict[str, Any]) -> None:
    _, told = alone["broken"]["later"]
    says(told, "actor_rollout_ref.model.path=", "1.8 nats", "Qwen3")


def two_ranks(rank: int, path: str) -> tuple[str, float]:
    """Only rank 1 has rows, and only its mask is broken: both give the layout up."""
    if rank == 1:
        forward.attention_inputs = lambda *args: {}  # type: ignore[assignment]
    data = random_batch(num_groups=2, n=4) if rank == 1 else DataProto()
    engine = built(path)
    engine.compute_log_probs(data, PassLimits("", 8))
    return engine.forward.report, len(data)


def test_all_ranks_decide_alike(tmp_path: Path) -> None:
    (first, rows), (second, _) = run_ranks(2, two_ranks, random_model("Qwen3", tmp_path, head_dim=8))
    assert rows == 0
    assert first.startswith("padded sequences")
    says(first, "shared prompts")
    assert first == second


# --- models whose numbers depend on positions or widths --------------------------------------------------------------
LAYOUTS = ("padded", "packed", "shared")
ORIGINAL = 24  # no sequence of `short_batch` is that long, every packed or shared row is longer
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 4.0, 9.0, 16.0]  # LongRoPE's factors, for heads of 8


def phi3(folder: Path, short: list[float] = SHORT) -> str:
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short, "long_factor": LONG}
    sizes = {"max_position_embeddings": 1024, "original_max_position_embeddings": ORIGINAL, "num_key_value_heads": 4}
    return random_model("Phi3", folder, rope_parameters=rope, sliding_window=None, **sizes)


def gpt2(folder: Path) -> str:
    return random_model("GPT2", folder, max_position_embeddings=ORIGINAL)


def short_batch() -> DataProto:
    """16 sequences of at most 8 + 11 tokens."""
    return random_batch(num_groups=2, n=8)


def mixed_batch() -> DataProto:
    """The same with every fourth response made longer than ORIGINAL."""
    data = short_batch()
    rows = [row.tolist() * (5 if i % 4 == 0 else 1) for i, row in enumerate(data["responses"].rows())]
    lengthened = {"responses": rows, "response_mask": [[1] * len(row) for row in rows]}
    kept = data.select(("prompts",))
    return kept.union(DataProto.from_dict({k: type(data[k]).from_rows(v, torch.int32) for k, v in lengthened.items()}))


def by_layout(rank: int, path: str, data: DataProto, max_model_len: int | None) -> dict[str, Any]:
    out = {}
    for layout in LAYOUTS:
        engine = built(path, layout=layout, max_model_len=max_model_len)
        found = engine.compute_log_probs(data, PassLimits("", 16)).values.numpy().copy()
        out[layout] = found, engine.forward.layout, engine.forward.report
    return out


@pytest.mark.parametrize(
    ("family", "batch", "max_model_len", "used"),
    [
        # padding has positions that it knows: rows are wider than its table, or than what it takes for a long text
        pytest.param(phi3, short_batch, None, "", marks=pytest.mark.deep),
        pytest.param(gpt2, short_batch, None, "", marks=pytest.mark.deep),
        # factors that follow the longest sequence of a micro-batch, as transformers has them
        pytest.param(phi3, mixed_batch, None, "alone", marks=pytest.mark.deep),
        # where sequences may be longer than the original length, short ones get the long factors too, as in vLLM
        (phi3, mixed_batch, 2 * ORIGINAL, ""),
    ],
)
def test_numbers_are_those_of_each_sequence_alone(
    family: Any, batch: Any, max_model_len: int | None, used: str, tmp_path: Path
) -> None:
    path, data = family(tmp_path / "model"), batch()
    expected = one_by_one(path, data)
    if max_model_len is not None:
        short, expected = expected, one_by_one(phi3(tmp_path / "long", short=LONG), data)
        assert np.abs(expected - short).max() > 0.1, "transformers gives short sequences the short ones"
    (found,) = run_ranks(1, by_layout, path, data, max_model_len)
    for layout, (log_probs, kept, report) in found.items():
        assert kept == (used or layout), report
        assert used != "alone" or report.startswith("one sequence")
        np.testing.assert_allclose(log_probs, expected, atol=2e-5, err_msg=layout)


def wide_rows(rank: int, path: str, data: DataProto) -> tuple[np.ndarray, str]:
    engine = built(path)
    embedding = engine.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: out * (2.0 if args[0].shape[1] > 4 * ORIGINAL else 1.0))
    return engine.compute_log_probs(data, PassLimits("", 20)).values.numpy().copy(), engine.forward.report


@pytest.mark.deep
def test_the_check_sees_rows_as_wide_as_they_will_be(tmp_path: Path) -> None:
    """A model that is another one in rows of more than 96 tokens; the few sequences that are compared have fewer."""
    path, data = random_model("Qwen3", tmp_path, head_dim=8), random_batch(num_groups=1, n=20)
    ((found, report),) = run_ranks(1, wide_rows, path, data)
    assert report.startswith("padded sequences")
    says(report, "shared prompts:", "log-probs differ")
    np.testing.assert_allclose(found, one_by_one(path, data), atol=2e-5)


def limits(rank: int, path: str) -> list[float]:
    mesh = next(load_sharded_model(model_settings(path, fsdp_size=2), "cpu").parameters()).device_mesh
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


@pytest.mark.deep
def test_the_ranks_of_a_copy_wait_for_each_other_as_long_as_all_do(random_models: dict[str, str]) -> None:
    """Hybrid sharding makes groups of its own; by torch's default they would wait for half an hour."""
    assert run_ranks(4, limits, random_models["tied"]) == [[LIMIT_S, LIMIT_S]] * 4
