"""The check of layout and head: what it accepts, what it gives up, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen3 import modeling_qwen3

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import attention, forward, lm_head, model_loading
from grpo_dist.engines.train.attention import SEGMENTS, attention_implementation
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.lm_head import response_values
from grpo_dist.engines.train.segment_attention import segment_attention_forward
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto
from tests.messages import says
from tests.models import objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
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
    for name, layout, module, patch in (
        ("mask", "shared", forward, {"attention_inputs": lambda *args: {}}),
        ("refused", "packed", forward, {"attention_inputs": refuse}),
        ("head", "shared", lm_head, {"response_values": off_by_one}),
        ("everything", "shared", forward.PolicyForward, {"_difference": lambda *args: (1.0, "")}),
        ("backward", "shared", model_loading, {"attention_implementation": on_a_gpu}),
        ("attention", "packed", attention, {"segment_attention_forward": other_scale}),
        ("later", "shared", modeling_qwen3, {"eager_attention_forward": sees_all}),
    ):
        kept = {key: getattr(module, key) for key in patch}
        _put(module, patch)
        try:
            engine = trainable_engine(path, layout=layout)
            out[name] = (columns(engine, data), engine.forward.report)
        except ConfigError as error:
            out[name] = ([], str(error))
        finally:
            _put(module, kept)
    return out


def _put(holder: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(holder, name, value)


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


def test_a_good_layout_is_kept(alone: dict[str, Any]) -> None:
    assert alone["Qwen3"]["layout"] == "shared"
    assert alone["Qwen3"]["report"].startswith("shared prompts; ")
    assert alone["bf16"].startswith("shared prompts; ")


def test_capping_stays_padded_and_windows_do_not(alone: dict[str, Any]) -> None:
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
        (
            "attention",
            "padded sequences",
            ["packed sequences", SEGMENTS],
        ),  # wrong in all layouts
        ("head", "padded sequences", ["shared prompts", "whole micro-batches", "chunked output", "log-probs differ"]),
        (
            "everything",
            "one sequence",
            ["shared prompts", "whole micro-batches", "; padded sequences: log-probs differ"],
        ),
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
    model = model_settings(path)
    engine = FSDPEngine(model, device="cpu", temperature=1.0)
    engine.compute_log_probs(data, PassLimits("", 8))
    return engine.forward.report, len(data)


def test_all_ranks_decide_alike(tmp_path: Path) -> None:
    (first, rows), (second, _) = run_ranks(2, two_ranks, random_model("Qwen3", tmp_path, head_dim=8))
    assert rows == 0
    assert first.startswith("padded sequences")
    says(first, "shared prompts")
    assert first == second
