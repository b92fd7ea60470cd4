"""The check of layout and head; models whose numbers depend on their company; passes that compile, or are watched."""

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
from transformers.models.qwen3 import modeling_qwen3

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import attention, forward, lm_head, model_loading
from grpo_dist.engines.train.attention import SEGMENTS, attention_implementation, compiled_whole
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.fsdp_model import build_model, load_sharded_model, recompute_layers
from grpo_dist.engines.train.lm_head import response_values
from grpo_dist.engines.train.segment_attention import segment_attention_forward
from grpo_dist.engines.train.sharded_tensors import whole
from grpo_dist.engines.train.watching import log_probs_in, watched
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Ragged
from tests.engines.train.plain import (
    built,
    causal_lm,
    flat,
    log_probs,
    log_probs_alone,
    one_by_one,
    own_rows,
    step,
    told,
)
from tests.messages import refuses, says
from tests.models import EXPERTS, objective, random_batch, random_model, random_qwen3, trainable_engine
from tests.ranks import LIMIT_S, run_ranks
from tests.tiers import first
from tests.worker_settings import lora, model_settings

own_attention = modeling_qwen3.eager_attention_forward


def columns(engine: FSDPEngine, data: DataProto) -> list[Any]:
    found = engine.compute_columns(data, ("log_probs", "entropies", "gradient_norms"), PassLimits("", 8))
    return [column.values.numpy().copy() for column in found.values()]


def off_by_one(*args: Any) -> Any:
    values = response_values(*args)
    return values._replace(log_probs=values.log_probs + 1)


def refuse(segments: Any, *args: Any) -> dict[str, Any]:
    if segments is None:
        return {}
    raise ValueError("this model takes no 4-D mask")


def on_a_gpu(model: Any, layout: str, device: str) -> str:
    """FlexAttention, which goes backward on a GPU only."""
    return attention_implementation(model, layout, "cuda")


def other_scale(*args: Any, scaling: float, **kwargs: Any) -> Any:
    """An attention that is another one in all layouts."""
    return segment_attention_forward(*args, scaling=2 * scaling, **kwargs)


def sees_all(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """A model's own attention without a causal mask."""
    return own_attention(module, query, key, value, None, **kwargs)


# Of each fault: the layout, and what is put in the place of what.
FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "mask": ("shared", forward, "attention_inputs", lambda *args: {}),
    "refused": ("packed", forward, "attention_inputs", refuse),
    "head": ("shared", lm_head, "response_values", off_by_one),
    "everything": ("shared", forward.PolicyForward, "_difference", lambda *args: (1.0, "")),
    "backward": ("shared", model_loading, "attention_implementation", on_a_gpu),
    "attention": ("packed", attention, "segment_attention_forward", other_scale),
    "later": ("shared", modeling_qwen3, "eager_attention_forward", sees_all),
}


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
    for name, (layout, module, part, other) in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, part, other)
            try:
                engine = trainable_engine(paths["Qwen3"], layout=layout)
                out[name] = (columns(engine, data), engine.forward.report)
            except ConfigError as error:
                out[name] = ([], str(error))
    return out


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
    ("fault", "left", "parts"),
    [
        ("mask", "padded sequences", ["shared prompts:", "log-probs differ"]),
        ("refused", "padded sequences", ["packed sequences: ValueError:"]),
        ("backward", "padded sequences", ["shared prompts:", "backward pass"]),
        ("attention", "padded sequences", ["packed sequences", SEGMENTS]),
        ("head", "padded sequences", ["shared prompts", "whole micro-batches", "chunked output", "log-probs differ"]),
        ("everything", "one sequence", ["shared prompts", "whole micro-batches", "padded sequences: log-probs differ"]),
    ],
)
def test_what_differs_is_given_up(alone: dict[str, Any], fault: str, left: str, parts: list[str]) -> None:
    found, report = alone[fault]
    assert report.startswith(left)
    says(report, *parts)
    for mine, theirs in zip(found, alone["Qwen3"]["padded"], strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_a_model_whose_tokens_see_later_ones_is_refused(alone: dict[str, Any]) -> None:
    says(alone["later"][1], "actor_rollout_ref.model.path=", "1.8 nats", "Qwen3")


def two_ranks(rank: int, path: str) -> tuple[str, int]:
    """Only rank 1 has rows, and only its mask is broken: both give the layout up."""
    if rank == 1:
        forward.attention_inputs = lambda *args: {}  # type: ignore[assignment]
    engine, data = built(path), random_batch(num_groups=2, n=4) if rank == 1 else DataProto()
    log_probs(engine, data)
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
    return random_batch(num_groups=2, n=8)


def mixed_batch() -> DataProto:
    """The same with every fourth response made longer than ORIGINAL."""
    data = short_batch()
    rows = [row.tolist() * (5 if i % 4 == 0 else 1) for i, row in enumerate(data["responses"].rows())]
    lengthened = {"responses": rows, "response_mask": [[1] * len(row) for row in rows]}
    columns = {name: Ragged.from_rows(values, torch.int32) for name, values in lengthened.items()}
    return data.select(("prompts",)).union(DataProto.from_dict(columns))


def by_layout(rank: int, path: str, data: DataProto, max_model_len: int | None) -> dict[str, Any]:
    out = {}
    for layout in LAYOUTS:
        engine = built(path, layout=layout, max_model_len=max_model_len)
        out[layout] = log_probs(engine, data, 16), engine.forward.layout, engine.forward.report
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
    for layout, (numbers, kept, report) in found.items():
        assert kept == (used or layout), report
        assert used != "alone" or report.startswith("one sequence")
        np.testing.assert_allclose(numbers, expected, atol=2e-5, err_msg=layout)


def wide_rows(rank: int, path: str) -> None:
    """A model that is another one in rows of more than 96 tokens; the few sequences that are compared have fewer."""
    engine, data = built(path), random_batch(num_groups=1, n=20)
    embedding = engine.model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: out * (2.0 if args[0].shape[1] > 4 * ORIGINAL else 1.0))
    np.testing.assert_allclose(log_probs(engine, data, 20), one_by_one(path, data), atol=2e-5)
    assert engine.forward.report.startswith("padded sequences")
    says(engine.forward.report, "shared prompts:", "log-probs differ")


@pytest.mark.deep
def test_the_check_sees_rows_as_wide_as_they_will_be(tmp_path: Path) -> None:
    run_ranks(1, wide_rows, random_model("Qwen3", tmp_path, head_dim=8))


def limits(rank: int, path: str) -> list[float]:
    mesh = next(load_sharded_model(model_settings(path, fsdp_size=2), "cpu").parameters()).device_mesh
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


@pytest.mark.deep
def test_the_ranks_of_a_copy_wait_for_each_other_as_long_as_all_do(random_models: dict[str, str]) -> None:
    """Hybrid sharding makes groups of its own; by torch's default they would wait for half an hour."""
    assert run_ranks(4, limits, random_models["tied"]) == [[LIMIT_S, LIMIT_S]] * 4


DROPOUT = {
    "GPT2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "Llama": {"attention_dropout": 0.1},  # a number that the attention reads, no module
}


def same_policy(rank: int, path: str) -> None:
    """The update's own pass gives the old log-probs, and where it compares the two, it finds no difference."""
    data = random_batch(num_groups=4, n=2)
    engine, again = (trainable_engine(path, gradient_checkpointing=True) for _ in range(2))
    old = engine.compute_log_probs(data, PassLimits("", 8))
    rest = data.select([name for name in data.columns() if name != "old_log_probs"])
    own = again.train_mini_batch(rest, objective(on_policy=True), PassLimits("", 8)).log_probs
    np.testing.assert_allclose(own.values.numpy(), old.values.numpy(), atol=1e-5)
    metrics = step(engine, rest.union(DataProto({"old_log_probs": old})), 8)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("family", first(DROPOUT, "Llama"))
def test_a_model_with_dropout_trains_on_the_policy_that_sampled(family: str, tmp_path: Path) -> None:
    run_ranks(1, same_policy, random_model(family, tmp_path, **DROPOUT[family]))


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_model("Qwen3", tmp_path, head_dim=8))
    model.model.layers = torch.nn.ModuleList()
    model._no_split_modules = None
    says(told(recompute_layers, model, "model"), "ConfigError", "enable_gradient_checkpointing=true", "false")


# --- compiled layers -------------------------------------------------------------------------------------------------
def test_a_kernel_that_is_compiled_too_often_is_an_error_with_advice() -> None:
    limit = torch._dynamo.config.recompile_limit
    kernel = compiled_whole(lambda x, name: x + len(name), backend="eager")
    names = ["a" * length for length in range(1, limit + 2)]
    for name in names[:-1]:
        assert kernel(torch.zeros(1), name).item() == len(name)
    with refuses(ConfigError, "model.use_remove_padding=true", f"{limit} times", "false"):
        kernel(torch.zeros(1), names[-1])


def differs(function: Any, **options: Any) -> Any:
    """In the place of torch.compile: what it makes computes something else."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result * 1.5 if isinstance(result, torch.Tensor) else result

    return run


COMPILERS: dict[str, Any] = {
    "own code": None,
    "compiled": functools.partial(torch.compile, backend="aot_eager"),  # its graphs, without kernels
    "fails": lambda function, **options: mock.Mock(side_effect=RuntimeError("no such kernel")),
    "differs": differs,
}


def compiled_steps(rank: int, path: str, compiler: str, layout: str) -> dict[str, Any]:
    used = COMPILERS[compiler]
    with mock.patch.object(torch, "compile", used or torch.compile):
        engine = trainable_engine(path, layout=layout, use_torch_compile=used is not None, gradient_checkpointing=True)
        data = random_batch(num_groups=4, n=2).slice(4 * rank, 4 * rank + 8 // dist.get_world_size())
        found = {"log_probs": log_probs(engine, data, 3)}
        losses = [step(engine, data, size)["actor/loss"] for size in (2, 3)]
    return found | {"weights": flat(engine), "report": engine.forward.report, "loss": losses[-1]}


@pytest.mark.parametrize(("device", "key"), [("cuda", None), ("cuda", False), ("cpu", None), ("cpu", True)])
def test_layers_are_compiled_on_gpus_unless_the_key_says_otherwise(random_models: Any, device: str, key: Any) -> None:
    settings = model_settings(random_models["tied"], layout="padded", use_torch_compile=key)
    compiles = (device == "cuda") if key is None else key
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
    with mock.patch.object(torch, "compile", COMPILERS["compiled"]):
        engine = trainable_engine(path, layout="padded", use_torch_compile=True, lora=lora())
        for rows in (8, 1, 5):
            data = random_batch(num_groups=4, n=2, seed=rows).slice(0, rows)
            log_probs(engine, data, 3)
            engine.compute_reference_columns(data, ("log_probs",), PassLimits("", 3))
            step(engine, data, 3)
        return f"{engine.forward.compiler.variants}; {engine.forward.report}"


@pytest.mark.deep
def test_layers_with_factors_stay_compiled(random_models: dict[str, str]) -> None:
    """In fewer graphs than the 8 that torch takes: the first layer's input has a gradient like all others'."""
    (told,) = run_ranks(1, lora_variants, random_models["tied"])
    assert int(told.split()[2]) < 8, told
    assert "no more" not in told
    says(told, "compiled")


def test_a_compiler_that_has_made_all_its_variants_says_so() -> None:
    with mock.patch.object(lm_head, "MOST_VARIANTS", 2), mock.patch.object(torch, "compile", COMPILERS["compiled"]):
        compiler = lm_head.Compiler()
        doubled, told = compiler(lambda numbers: numbers + numbers), []
        for dtype in (torch.float32, torch.float64, torch.int64):
            assert doubled(torch.ones(2, dtype=dtype)).tolist() == [2, 2]
            told.append(compiler.variants)
    assert [int(text.split()[2]) for text in told] == [1, 2, 2]
    assert ["no more" in text for text in told] == [False, True, True]


@pytest.mark.deep
def test_experts_in_float32_are_not_compiled(tmp_path: Path) -> None:
    """Their backward pass asks the GPU for a number in every layer, which breaks the layers' graphs."""
    (found,) = run_ranks(1, compiled_steps, random_model("Qwen3Moe", tmp_path, **EXPERTS), "compiled", "padded")
    says(found["report"], "torch.compile", "fsdp_config.dtype=bf16")


# --- what is noted of the operations is what they compute, and watching changes nothing ------------------------------
TEMPERATURE = 0.7
EPS = torch.finfo(torch.float32).eps


def watched_rank(rank: int, path: str) -> None:
    row, engine = random_batch(num_groups=1, n=1), trainable_engine(path, temperature=TEMPERATURE)
    before, seen, after = log_probs(engine, row), watched(engine, row), log_probs(engine, row)
    first, response = int(row["prompts"].lengths[0]) - 1, row["responses"].values
    head = whole(engine.model.get_output_embeddings().weight.detach())
    logits = seen["model.norm"][first : first + len(response)] @ head.T
    torch.testing.assert_close(seen["lm_head"], logits)
    expected = torch.log_softmax(logits / TEMPERATURE, -1).gather(1, response.long().unsqueeze(1))
    torch.testing.assert_close(seen["log_probs"], expected)
    rotated = seen["model.layers.0.self_attn.rope.k"].view(-1, 2, 8).norm(dim=2)
    plain = seen["model.layers.0.self_attn.k_norm"].view(-1, 2, 8).norm(dim=2)
    torch.testing.assert_close(rotated, plain)  # a rotation keeps lengths
    stream = seen["model.layers.0"] - seen["model.layers.0.mlp"] - seen["model.layers.0.self_attn.o_proj"]
    torch.testing.assert_close(stream, seen["model.embed_tokens"])
    np.testing.assert_array_equal(before, seen["log_probs"][:, 0])
    np.testing.assert_array_equal(before, after)

    wobbled, again, name = watched(engine, row, EPS), watched(engine, row, EPS), "model.embed_tokens"
    moved = (wobbled[name] - seen[name]).abs() / seen[name].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, EPS), rtol=0.6, atol=0)
    assert all(0 < (wobbled[name] - seen[name]).abs().max() < 1e-3 for name in ("model.norm", "lm_head", "log_probs"))
    assert all(torch.equal(wobbled[name], again[name]) for name in wobbled), "the same each time"
    np.testing.assert_array_equal(log_probs(engine, row), before)


def test_what_is_noted_is_what_is_computed_and_neither_watching_nor_wobbling_changes_anything(tmp_path: Path) -> None:
    run_ranks(1, watched_rank, random_qwen3(tmp_path))


def in_both_types(rank: int, path: str, layout: str) -> dict[str, Any]:
    data, found = own_rows(random_batch(num_groups=4, n=2), rank), {}
    for dtype, other in (("fp32", torch.bfloat16), ("bf16", torch.float32)):
        engine = trainable_engine(path, dtype=dtype, temperature=TEMPERATURE, layout=layout)
        before, changed = log_probs(engine, data), log_probs_in(engine, data, other).values.numpy().copy()
        with pytest.raises(RuntimeError):  # no product of whole numbers and a weight
            log_probs_in(engine, data, torch.int64)
        assert np.array_equal(log_probs(engine, data), before), "the weights are what they were"
        found[dtype] = before, changed
    return found


def by_the_model(path: str, *, rounded: bool) -> list[Tensor]:
    model = causal_lm(path)
    model = model.bfloat16().float() if rounded else model
    with torch.no_grad():
        return log_probs_alone(model, random_batch(4, 2), TEMPERATURE)


@pytest.mark.parametrize(
    ("family", "changes", "world_size", "layout"),
    [
        ("Qwen3", {"head_dim": 8}, 2, "shared"),
        pytest.param("Qwen3Moe", {"head_dim": 8} | EXPERTS, 1, "packed", marks=pytest.mark.deep),
        pytest.param("GPT2", {}, 1, "padded", marks=pytest.mark.deep),
    ],
)
def test_a_pass_in_another_type_is_that_of_a_trainer_of_that_type(
    tmp_path: Path, family: str, changes: dict[str, Any], world_size: int, layout: str
) -> None:
    """In float32 what rounding did is mostly gone; what is left are the attention's kernels, which stay in bf16."""
    path = random_model(family, tmp_path, **changes)
    exact, rounded = (by_the_model(path, rounded=each) for each in (False, True))
    for rank, found in enumerate(run_ranks(world_size, in_both_types, path, layout)):
        (own32, in16), (own16, in32) = (map(torch.from_numpy, found[dtype]) for dtype in ("fp32", "bf16"))
        torch.testing.assert_close(own32, torch.cat(exact[rank::world_size]), atol=1e-5, rtol=1e-5)
        off16, off32 = ((each - torch.cat(rounded[rank::world_size])).abs().mean() for each in (own16, in32))
        assert off32 < 0.7 * off16
        assert 0.5 * off16 < (own16 - in32).abs().mean() < 1.5 * off16
        assert (in16 - own16).abs().mean() < 1.5 * off16 < 3 * (in16 - own32).abs().mean()
