"""Compiled layers against their own code."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import lm_head
from grpo_dist.engines.train.attention import compiled_whole
from grpo_dist.engines.train.fsdp_model import build_model
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import metric_values
from tests.messages import refuses, says
from tests.models import EXPERTS, model_settings, objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import lora


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

    def run(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such kernel")

    return run


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


def steps(rank: int, path: str, compiler: str, layout: str) -> dict[str, Any]:
    """Log-probs, the metrics of the last of two optimizer steps, and the weights."""
    used = COMPILERS[compiler]
    with mock.patch.object(torch, "compile", used or torch.compile):
        engine = trainable_engine(path, layout=layout, use_torch_compile=used is not None, gradient_checkpointing=True)
        data = random_batch(num_groups=4, n=2).slice(4 * rank, 4 * rank + 8 // dist.get_world_size())
        log_probs = engine.compute_log_probs(data, PassLimits("", 3))
        results = [engine.train_mini_batch(data, objective(), PassLimits("", size)) for size in (2, 3)]
    return {
        "log_probs": log_probs.values.numpy(),
        "weights": np.concatenate([tensor.numpy().ravel() for _, tensor in engine.full_parameters("float32")]),
        "report": engine.forward.report,
        "loss": metric_values(results[-1].metrics)["actor/loss"],
        "graphs": counters["stats"]["unique_graphs"],
    }


@pytest.mark.deep
@pytest.mark.parametrize(("ranks", "layout"), [(1, "padded"), pytest.param(2, "shared", marks=pytest.mark.long)])
def test_compiled_layers_train_the_same_model(random_models: dict[str, str], ranks: int, layout: str) -> None:
    """All layers share a graph for passes that train, and one for those that do not."""
    own, found = (run_ranks(ranks, steps, random_models["tied"], name, layout)[0] for name in ("own code", "compiled"))
    says(found["report"], "compiled")
    np.testing.assert_allclose(found["log_probs"], own["log_probs"], atol=1e-5)
    np.testing.assert_allclose(found["weights"], own["weights"], atol=2e-5)
    assert found["loss"] == pytest.approx(own["loss"], rel=1e-5)


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


@pytest.mark.parametrize(("compiler", "why"), [("fails", "RuntimeError"), ("differs", "differ")])
def test_a_compiler_that_does_not_fit_is_left_off(random_models: dict[str, str], compiler: str, why: str) -> None:
    own, found = (run_ranks(2, steps, random_models["tied"], name, "padded")[0] for name in ("own code", compiler))
    says(found["report"], "torch.compile", why)
    for name in ("log_probs", "weights"):
        np.testing.assert_array_equal(found[name], own[name])


def lora_variants(rank: int, path: str, most: int) -> str:
    """What is told after the passes of a run with LoRA, of one row and of several, on rows of many lengths."""
    with mock.patch.object(lm_head, "MOST_VARIANTS", most), mock.patch.object(torch, "compile", COMPILERS["compiled"]):
        engine = trainable_engine(path, layout="padded", use_torch_compile=True, lora=lora())
        for rows in (8, 1, 5):
            data, limits = random_batch(num_groups=4, n=2, seed=rows).slice(0, rows), PassLimits("", 3)
            engine.compute_log_probs(data, limits)
            engine.compute_reference_columns(data, ("log_probs",), limits)
            engine.train_mini_batch(data, objective(), limits)
        return str(engine.forward.compiler.variants)


@pytest.mark.deep
@pytest.mark.parametrize(("most", "refused"), [(lm_head.MOST_VARIANTS, False), (3, True)])
def test_layers_with_factors_stay_compiled(random_models: dict[str, str], most: int, refused: bool) -> None:
    """Their graphs are of passes that train, do not, and leave the factors out, each for one size, all, and one row:
    fewer than torch takes by itself, 8, since the first layer's input has a gradient like all others'.
    """
    (told,) = run_ranks(1, lora_variants, random_models["tied"], most)
    assert (int(told.split()[2]) < 8, "no more" in told) == (True, refused), told


def test_experts_in_float32_are_not_compiled(tmp_path: Path) -> None:
    """Their backward pass asks the GPU for a number in every layer, which breaks the layers' graphs."""
    (found,) = run_ranks(1, steps, random_model("Qwen3Moe", tmp_path, **EXPERTS), "compiled", "padded")
    says(found["report"], "torch.compile", "fsdp_config.dtype=bf16")
