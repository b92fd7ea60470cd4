"""The pass that trains computes what the passes before it did: no dropout; recomputing and compiling change nothing."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import lm_head
from grpo_dist.engines.train.attention import compiled_whole
from grpo_dist.engines.train.fsdp_model import build_model, recompute_layers
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, metric_values
from tests.engines.train.plain import weights
from tests.messages import refuses, says
from tests.models import EXPERTS, objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import lora, model_settings

DROPOUT = {
    "GPT2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "Llama": {"attention_dropout": 0.1},  # a number that the attention reads, no module
}


def ratios(rank: int, path: str) -> dict[str, Any]:
    """The old log-probs, those of the update's own pass, and the update's metrics where it compares the two."""
    data = random_batch(num_groups=4, n=2)
    engine = trainable_engine(path, gradient_checkpointing=True)
    old = engine.compute_log_probs(data, PassLimits("", 8))
    rest = data.select([name for name in data.columns() if name != "old_log_probs"])
    compared = rest.union(DataProto({"old_log_probs": old}))
    metrics = engine.train_mini_batch(compared, objective(), PassLimits("", 8)).metrics
    again = trainable_engine(path, gradient_checkpointing=True)
    own = again.train_mini_batch(rest, objective(on_policy=True), PassLimits("", 8)).log_probs
    assert own is not None
    return {"old": old.values.numpy(), "own": own.values.numpy(), "metrics": metric_values(metrics)}


@pytest.mark.parametrize("family", DROPOUT)
def test_a_model_with_dropout_trains_on_the_policy_that_sampled(family: str, tmp_path: Path) -> None:
    (found,) = run_ranks(1, ratios, random_model(family, tmp_path, **DROPOUT[family]))
    np.testing.assert_allclose(found["own"], found["old"], atol=1e-5)
    assert found["metrics"]["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert found["metrics"]["actor/pg_clipfrac"] == 0


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_model("Qwen3", tmp_path, head_dim=8))
    model.model.layers = torch.nn.ModuleList()
    model._no_split_modules = None
    with refuses(ConfigError, "enable_gradient_checkpointing=true", "false"):
        recompute_layers(model, "model")


# --- compiled layers -------------------------------------------------------------------------------------------------
def test_a_kernel_that_is_compiled_too_often_is_an_error_with_advice() -> None:
    """And not, as torch would have it, slow from then on."""
    limit = torch._dynamo.config.recompile_limit
    kernel = compiled_whole(lambda x, name: x + len(name), backend="eager")
    names = ["a" * length for length in range(1, limit + 2)]
    for name in names[:-1]:
        assert kernel(torch.zeros(1), name).item() == len(name)
    with refuses(ConfigError, "model.use_remove_padding=true", f"{limit} times", "false"):
        kernel(torch.zeros(1), names[-1])


def fails(function: Any, **options: Any) -> Any:
    """In the place of torch.compile: what it makes cannot be built."""
    return mock.Mock(side_effect=RuntimeError("no such kernel"))


def differs(function: Any, **options: Any) -> Any:
    """In the place of torch.compile: what it makes computes something else."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result * 1.5 if isinstance(result, torch.Tensor) else result

    return run


COMPILERS: dict[str, Any] = {
    "own code": None,
    "compiled": functools.partial(torch.compile, backend="aot_eager"),  # its graphs, without kernels
    "fails": fails,
    "differs": differs,
}


def compiled_steps(rank: int, path: str, compiler: str, layout: str) -> dict[str, Any]:
    """Log-probs, the metrics of the last of two optimizer steps, and the weights."""
    used = COMPILERS[compiler]
    with mock.patch.object(torch, "compile", used or torch.compile):
        engine = trainable_engine(path, layout=layout, use_torch_compile=used is not None, gradient_checkpointing=True)
        data = random_batch(num_groups=4, n=2).slice(4 * rank, 4 * rank + 8 // dist.get_world_size())
        log_probs = engine.compute_log_probs(data, PassLimits("", 3))
        results = [engine.train_mini_batch(data, objective(), PassLimits("", size)) for size in (2, 3)]
    return {
        "log_probs": log_probs.values.numpy(),
        "weights": np.concatenate([weight.ravel() for weight in weights(engine).values()]),
        "report": engine.forward.report,
        "loss": metric_values(results[-1].metrics)["actor/loss"],
    }


@pytest.mark.parametrize(
    ("device", "key", "compiles"),
    [("cuda", None, True), ("cuda", False, False), ("cpu", None, False), ("cpu", True, True)],
)
def test_layers_are_compiled_on_gpus(
    random_models: dict[str, str], device: str, key: bool | None, compiles: bool
) -> None:
    """Unless the key says otherwise."""
    settings = model_settings(random_models["tied"], layout="padded", use_torch_compile=key)
    assert (build_model(settings, device, shards=1).model.compiler is not None) == compiles


@pytest.mark.parametrize(
    ("compiler", "ranks", "layout", "told"),
    [
        pytest.param("compiled", 1, "padded", ["compiled"], marks=pytest.mark.deep),
        pytest.param("compiled", 2, "shared", ["compiled"], marks=pytest.mark.long),
        ("fails", 2, "padded", ["torch.compile", "RuntimeError"]),
        ("differs", 2, "padded", ["torch.compile", "differ"]),
    ],
)
def test_compiled_layers_train_the_same_model_and_a_compiler_that_does_not_fit_is_left_off(
    random_models: dict[str, str], compiler: str, ranks: int, layout: str, told: list[str]
) -> None:
    own, found = (
        run_ranks(ranks, compiled_steps, random_models["tied"], name, layout)[0] for name in ("own code", compiler)
    )
    says(found["report"], *told)
    atol = 2e-5 if compiler == "compiled" else 0
    for name in ("log_probs", "weights"):
        np.testing.assert_allclose(found[name], own[name], rtol=0, atol=atol)
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-5)


def lora_variants(rank: int, path: str) -> str:
    """What is told after the passes of a run with LoRA, of one row and of several, on rows of many lengths."""
    with mock.patch.object(torch, "compile", COMPILERS["compiled"]):
        engine = trainable_engine(path, layout="padded", use_torch_compile=True, lora=lora())
        for rows in (8, 1, 5):
            data, limits = random_batch(num_groups=4, n=2, seed=rows).slice(0, rows), PassLimits("", 3)
            engine.compute_log_probs(data, limits)
            engine.compute_reference_columns(data, ("log_probs",), limits)
            engine.train_mini_batch(data, objective(), limits)
        return f"{engine.forward.compiler.variants}; {engine.forward.report}"


@pytest.mark.deep
def test_layers_with_factors_stay_compiled(random_models: dict[str, str]) -> None:
    """Their graphs are of passes that train, do not, and leave the factors out, each for one size, all, and one row:
    fewer than torch takes by itself, 8, since the first layer's input has a gradient like all others'.
    """
    (told,) = run_ranks(1, lora_variants, random_models["tied"])
    assert int(told.split()[2]) < 8, told
    assert "no more" not in told
    says(told, "compiled")


def test_a_compiler_that_has_made_all_its_variants_says_so() -> None:
    """The third type of numbers runs uncompiled."""
    with mock.patch.object(lm_head, "MOST_VARIANTS", 2), mock.patch.object(torch, "compile", COMPILERS["compiled"]):
        compiler = lm_head.Compiler()
        doubled, told = compiler(lambda numbers: numbers + numbers), []
        for dtype in (torch.float32, torch.float64, torch.int64):
            assert doubled(torch.ones(2, dtype=dtype)).tolist() == [2, 2]
            told.append(compiler.variants)
    assert [int(text.split()[2]) for text in told] == [1, 2, 2]
    assert ["no more" in text for text in told] == [False, True, True]


def test_experts_in_float32_are_not_compiled(tmp_path: Path) -> None:
    """Their backward pass asks the GPU for a number in every layer, which breaks the layers' graphs."""
    (found,) = run_ranks(1, compiled_steps, random_model("Qwen3Moe", tmp_path, **EXPERTS), "compiled", "padded")
    says(found["report"], "torch.compile", "fsdp_config.dtype=bf16")
