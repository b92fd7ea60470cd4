"""The pass that trains computes what those before it did: no dropout; compiling and watching change nothing."""

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
from torch import Tensor

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import lm_head
from grpo_dist.engines.train.attention import compiled_whole
from grpo_dist.engines.train.fsdp_model import build_model, recompute_layers
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.engines.train.watching import log_probs_in, watched
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, metric_values
from tests.engines.train.plain import causal_lm, log_probs_alone, weights
from tests.messages import refuses, says
from tests.models import EXPERTS, objective, random_batch, random_model, random_qwen3, trainable_engine
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
        pytest.param("fails", 2, "padded", ["torch.compile", "RuntimeError"], marks=pytest.mark.deep),
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
    """In fewer graphs than the 8 that torch takes: the first layer's input has a gradient like all others'."""
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


# --- what is noted of the operations is what they compute, and watching changes nothing ------------------------------
TEMPERATURE = 0.7
EPS = torch.finfo(torch.float32).eps


def one_rank(rank: int, path: str) -> dict[str, Any]:
    row = random_batch(num_groups=1, n=1).slice(0, 1)
    engine = trainable_engine(path, temperature=TEMPERATURE)
    plain = engine.compute_log_probs(row, PassLimits("", 1)).values
    seen, wobbled, again = watched(engine, row), watched(engine, row, EPS), watched(engine, row, EPS)
    found = {"seen": seen, "wobbled": wobbled, "again": again}
    found |= {name: {"ids": row[f"{name}s"].values} for name in ("prompt", "response")}
    found["log_probs"] = {"before": plain, "after": engine.compute_log_probs(row, PassLimits("", 1)).values}
    found["head"] = {"weight": whole(engine.model.get_output_embeddings().weight.detach())}
    return {name: {key: each.numpy().copy() for key, each in part.items()} for name, part in found.items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    [found] = run_ranks(1, one_rank, random_qwen3(tmp_path_factory.mktemp("model")))
    return {name: {key: torch.from_numpy(each) for key, each in part.items()} for name, part in found.items()}


def test_what_is_noted_is_what_is_computed_and_watching_changes_nothing(done: dict[str, dict[str, Tensor]]) -> None:
    prompt, response = done["prompt"]["ids"], done["response"]["ids"]
    seen, before = done["seen"], len(prompt) - 1
    logits = seen["model.norm"][before : before + len(response)] @ done["head"]["weight"].T
    torch.testing.assert_close(seen["lm_head"], logits)
    expected = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, response.long().unsqueeze(1))
    torch.testing.assert_close(seen["log_probs"], expected)
    rotated = seen["model.layers.0.self_attn.rope.k"].view(-1, 2, 8).norm(dim=2)
    plain = seen["model.layers.0.self_attn.k_norm"].view(-1, 2, 8).norm(dim=2)
    torch.testing.assert_close(rotated, plain)  # a rotation keeps lengths
    stream = seen["model.layers.0"] - seen["model.layers.0.mlp"] - seen["model.layers.0.self_attn.o_proj"]
    torch.testing.assert_close(stream, seen["model.embed_tokens"])
    assert torch.equal(done["log_probs"]["before"], seen["log_probs"][:, 0])
    assert torch.equal(done["log_probs"]["before"], done["log_probs"]["after"])


def test_wobbling_moves_every_number_by_its_last_place_and_goes_on(done: dict[str, dict[str, Tensor]]) -> None:
    """The same each time."""
    seen, wobbled, first = done["seen"], done["wobbled"], "model.embed_tokens"
    moved = (wobbled[first] - seen[first]).abs() / seen[first].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, EPS), rtol=0.6, atol=0)
    assert all(0 < (wobbled[name] - seen[name]).abs().max() < 1e-3 for name in ("model.norm", "lm_head", "log_probs"))
    assert all(torch.equal(wobbled[name], done["again"][name]) for name in wobbled)


def in_both_types(rank: int, path: str, world_size: int, layout: str) -> dict[str, Any]:
    data, found = random_batch(num_groups=4, n=2).index(np.arange(rank, 8, world_size)), {}
    for dtype, other in (("fp32", torch.bfloat16), ("bf16", torch.float32)):
        engine = trainable_engine(path, dtype=dtype, temperature=TEMPERATURE, layout=layout)
        before, changed = engine.compute_log_probs(data, PassLimits("", 4)), log_probs_in(engine, data, other)
        with pytest.raises(RuntimeError):  # no product of whole numbers and a weight
            log_probs_in(engine, data, torch.int64)
        after = engine.compute_log_probs(data, PassLimits("", 4))
        assert torch.equal(before.values, after.values), "the weights are what they were"
        found[dtype] = [each.values.numpy().copy() for each in (before, changed)]
    return found


def alone(path: str, *, rounded: bool) -> list[Tensor]:
    """Log-probs by the model itself, in float32, with weights that are rounded to bf16 or not."""
    model = causal_lm(path)
    for weight in model.parameters() if rounded else ():
        weight.data = weight.data.bfloat16().float()
    with torch.no_grad():
        return log_probs_alone(model, random_batch(4, 2), TEMPERATURE)


@pytest.mark.parametrize(
    ("family", "changes", "world_size", "layout"),
    [
        ("Qwen3", {"head_dim": 8}, 2, "shared"),
        ("Qwen3Moe", {"head_dim": 8} | EXPERTS, 1, "packed"),
        ("GPT2", {}, 1, "padded"),
    ],
)
def test_a_pass_in_another_type_is_that_of_a_trainer_of_that_type(
    tmp_path: Path, family: str, changes: dict[str, Any], world_size: int, layout: str
) -> None:
    """In float32 what rounding did is mostly gone; what is left are the attention's kernels, which stay in bf16."""
    path = random_model(family, tmp_path, **changes)
    exact, rounded = (alone(path, rounded=each) for each in (False, True))
    for rank, found in enumerate(run_ranks(world_size, in_both_types, path, world_size, layout)):
        (own32, in16), (own16, in32) = (map(torch.from_numpy, found[dtype]) for dtype in ("fp32", "bf16"))
        torch.testing.assert_close(own32, torch.cat(exact[rank::world_size]), atol=1e-5, rtol=1e-5)
        off16, off32 = ((each - torch.cat(rounded[rank::world_size])).abs().mean() for each in (own16, in32))
        assert off32 < 0.7 * off16
        assert 0.5 * off16 < (own16 - in32).abs().mean() < 1.5 * off16
        assert (in16 - own16).abs().mean() < 1.5 * off16 < 3 * (in16 - own32).abs().mean()
