"""LoRA's factors: B = 0 changes nothing, training moves them alone, merged weights are what the model computes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.settings import ModelSettings, PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.fsdp_model import build_model
from grpo_dist.engines.train.lora import add_lora, lora_layers
from grpo_dist.errors import ConfigError, DataError
from scripts.architectures import SIZES, SMALL
from tests.adapters import write_adapter
from tests.engines.train.plain import causal_lm, one_by_one, weights
from tests.messages import refuses
from tests.models import VOCAB, add_tokenizer, objective, random_batch, random_model, trainable_engine, without_memory
from tests.ranks import run_ranks
from tests.worker_settings import lora, model_settings

LORA = lora()


def log_probs(engine: FSDPEngine, reference: bool = False) -> np.ndarray:
    data = random_batch(num_groups=3, n=3)
    compute = engine.compute_reference_columns if reference else engine.compute_columns
    return compute(data, ("log_probs",), PassLimits("", 9))["log_probs"].values.numpy().copy()


def trained(
    rank: int, path: str, lora: LoraSection, folder: Path | None = None, *, steps: int, **sharding: Any
) -> dict[str, Any]:
    """Log-probs before and after steps, by how much weights with their factors have moved, and the factors."""
    torch.manual_seed(1)
    engine = trainable_engine(path, lora=lora, **sharding)
    found: dict[str, Any] = {"before": log_probs(engine)}
    start, data = weights(engine), random_batch(num_groups=4, n=2)
    for _ in range(steps):
        own = data.index(list(range(8))[rank :: torch.distributed.get_world_size()])
        engine.train_mini_batch(own, objective(), PassLimits("", 2))
    if folder is not None:
        engine.export_hf_model(folder / "huggingface", "fp32")
    found["moved"] = {name: np.abs(weight - start[name]).max() for name, weight in weights(engine).items()}
    parameters = [(name, weight.dtype, isinstance(weight, DTensor)) for name, weight in engine.model.named_parameters()]
    found["base"] = {(str(dtype), sharded) for name, dtype, sharded in parameters if ".lora_" not in name}
    found["types"] = {str(dtype) for name, dtype, _ in parameters if ".lora_" in name}
    found["factors"] = {name: factor.numpy().copy() for name, factor in engine.lora_factors("float32")}
    return found | {"reference": log_probs(engine, reference=True), "after": log_probs(engine)}


def by_transformers(path: object) -> np.ndarray:
    return one_by_one(path, random_batch(num_groups=3, n=3), 0.7)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "all_ranks", "targets"),
    [
        ("tied", (1, 2), ("_proj.weight",)),
        ("experts", (2,), ("_proj.weight",)),  # of the attention: experts are no layers, and have no such names
        ("GPT2", (2,), ("c_attn.weight", "c_proj.weight", "c_fc.weight")),  # Conv1D: transposed weights
    ],
)
def test_training_moves_the_factors_and_merging_them_gives_the_same_model(
    model: str, all_ranks: tuple[int, ...], targets: tuple[str, ...], random_models: dict[str, str], tmp_path: Path
) -> None:
    path = random_models.get(model) or add_tokenizer(random_model(model, tmp_path / "model"))
    plain, train = by_transformers(path), functools.partial(trained, steps=3)
    folders = {ranks: tmp_path / f"{ranks}" for ranks in all_ranks}
    results = {ranks: run_ranks(ranks, train, path, LORA, folder) for ranks, folder in folders.items()}
    for ranks, found in ((ranks, found) for ranks, each in results.items() for found in each):
        assert_close(found["before"], plain)  # B starts at 0
        assert found["moved"].keys() == dict(causal_lm(path).named_parameters()).keys()
        moved = {name for name, change in found["moved"].items() if change > 0}
        expected = {name for name in found["moved"] if name.endswith(targets)}
        assert moved == expected, "embeddings, norms and biases are frozen"
        # without its factors the model is what it was, and they come back
        np.testing.assert_allclose(found["reference"], found["before"], rtol=0, atol=1e-6)
        assert_close(found["after"], by_transformers(folders[ranks] / "huggingface"))
        assert_close(found["after"], results[all_ranks[0]][0]["after"])


HEAD = lora(4, 8.0, ("q_proj", "lm_head"))


def test_an_output_layer_of_its_own_is_trained_and_exported(random_models: dict[str, str], tmp_path: Path) -> None:
    (found,) = run_ranks(1, functools.partial(trained, steps=3), random_models["untied"], HEAD, tmp_path)
    moved = {name.rpartition("layers.")[2] for name, change in found["moved"].items() if change > 0}
    assert moved == {"lm_head.weight", "0.self_attn.q_proj.weight", "1.self_attn.q_proj.weight"}
    assert_close(found["after"], by_transformers(tmp_path / "huggingface"))


def built(path: str, **changes: Any) -> Any:
    return build_model(model_settings(path, **changes), "cpu", shards=1).model


@pytest.mark.parametrize(
    ("family", "embedding", "sizes"),
    [
        ("Qwen3", "model.embed_tokens", {"head_dim": 8}),
        ("GPT2", "transformer.wte", {}),
        ("GPTNeoX", "gpt_neox.embed_in", {}),
    ],
)
def test_an_output_layer_that_is_tied_to_the_embedding_takes_no_factors(
    family: str, embedding: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Its change would have to be the embedding's too. `all-linear` leaves the output layer out, as peft's does."""
    path = random_model(family, tmp_path / "model", **sizes)
    with refuses(ConfigError, "model.target_modules=('lm_head',)", "lm_head", embedding, "tie_word_embeddings"):
        built(path, lora=lora(4, 8.0, ("lm_head",)), key="model.path")
    assert "lm_head" not in lora_layers(built(path, lora=LORA))
    assert lora_layers(built(path, lora=LORA.replaced(exclude_modules=("lm_head",))))


def test_what_counts_is_whether_the_model_is_tied_and_not_what_its_file_says(tmp_path: Path) -> None:
    untied = random_model("Qwen3", tmp_path / "untied", head_dim=8, tie_word_embeddings=False)
    with refuses(ConfigError, "lm_head", "model.embed_tokens"):
        built(untied, lora=HEAD, override_config={"tie_word_embeddings": True})
    assert "lm_head" in lora_layers(built(untied, lora=HEAD))
    tied = random_model("Qwen3", tmp_path / "tied", head_dim=8)
    with refuses(DataError, "lm_head.weight"):  # a file of a tied model has no weights for it
        built(tied, lora=HEAD, override_config={"tie_word_embeddings": False})
    tensors = load_file(Path(tied) / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, Path(tied) / "model.safetensors", {"format": "pt"})
    with refuses(ConfigError, "lm_head", "model.embed_tokens"):
        built(tied, lora=HEAD)
    assert "lm_head" in lora_layers(built(tied, lora=HEAD, override_config={"tie_word_embeddings": False}))


def test_an_adapter_of_a_tied_output_layer_is_refused(random_models: dict[str, str], tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "adapter", {"lm_head": (32, VOCAB)}))
    adapter = lora(4, 8.0, (), lora_adapter_path=folder)
    assert lora_layers(built(random_models["untied"], lora=adapter)).keys() == {"lm_head"}
    with refuses(ConfigError, f"lora_adapter_path={folder}", "lm_head", "tie_word_embeddings"):
        built(random_models["tied"], lora=adapter)


@pytest.mark.deep
def test_copies_of_a_model_train_the_same_factors(random_models: dict[str, str]) -> None:
    """Each of two ranks has the whole model (hybrid sharding)."""
    copies = functools.partial(trained, steps=3, fsdp_size=1)
    (one,), (first, second) = (run_ranks(ranks, copies, random_models["tied"], LORA) for ranks in (1, 2))
    assert all(np.array_equal(second["factors"][name], factor) for name, factor in first["factors"].items())
    assert_close(one["after"], first["after"])


def half_base(rank: int, path: str, wide: bool) -> dict[str, Any]:
    """Train factors under passes in bfloat16; `wide`: the base is held in float32, and cast for each pass."""
    with mock.patch.object(ModelSettings, "base_dtype", property(lambda self: "fp32" if wide else "bf16")):
        return trained(rank, path, LORA, steps=2, dtype="bf16")


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_frozen_base_is_held_in_the_type_of_passes_and_trains_the_same_factors(ranks: int, tmp_path: Path) -> None:
    """A weight that is cast for each pass and one that was cast when it was loaded are the same number."""
    path = random_model("Qwen3", tmp_path / "model")
    half, wide = (run_ranks(ranks, half_base, path, value) for value in (False, True))
    for narrow, cast in zip(half, wide, strict=True):
        assert narrow["base"] == {("torch.bfloat16", ranks > 1)}, "alone, FSDP2 would hold a second copy"
        assert cast["base"] == {("torch.float32", True)}
        assert narrow["types"] == cast["types"] == {"torch.float32"}
        assert all(np.array_equal(narrow["factors"][name], factor) for name, factor in cast["factors"].items())
        assert np.array_equal(narrow["after"], cast["after"])


# Targets, of a model whose first layers are ordinary ones without experts, and what the message says of them. peft
# knows the names in the files of a model with experts: those of an ordinary layer it would take for the experts', and
# leave the layer out.
REFUSED: list[tuple[str, Any, list[int], list[str]]] = [
    ("tied", ("q_proj", "c_attn"), [], ["target_modules=('q_proj', 'c_attn'):", "c_attn;"]),
    ("tied", ("q_proj", "j_proj"), [], ["target_modules=('q_proj', 'j_proj'):", "j_proj;"]),
    ("experts", ("q_proj", "gate_proj"), [], ["target_modules=('q_proj', 'gate_proj'):", "gate_proj;"]),
    ("experts", ("q_proj", "gate_up_proj"), [], ["target_modules=('q_proj', 'gate_up_proj'):", "gate_up_proj;"]),
    ("tied", ("embed_tokens",), [], ["target_modules=('embed_tokens',)", "model.embed_tokens", "Embedding"]),
    ("experts", ("gate",), [], ["target_modules=", "router"]),
    ("experts", ("experts",), [], ["target_modules=", "Qwen3MoeExperts"]),
    ("experts", ("gate_proj", "up_proj"), [0], ["target_modules=", "peft"]),
    ("experts", "all-linear", [0, 1], ["target_modules=", "peft"]),
    ("phimoe", ("router",), [], ["target_modules=('router',)", "PhimoeTopKRouter"]),
]


@pytest.mark.parametrize(("model", "targets", "ordinary", "parts"), REFUSED)
def test_targets_that_take_no_factors(
    random_models: dict[str, str], model: str, targets: Any, ordinary: list[int], parts: list[str]
) -> None:
    config = transformers.AutoConfig.for_model(model, **SIZES) if model == "phimoe" else None
    more = {"mlp_only_layers": ordinary} if ordinary else {}
    config = config or transformers.AutoConfig.from_pretrained(random_models[model], **more)
    with refuses(ConfigError, *parts):
        add_lora(without_memory(config), lora(2, 4.0, targets))


def test_targets_by_name(random_models: dict[str, str]) -> None:
    config = transformers.AutoConfig.from_pretrained(random_models["tied"])
    add_lora(model := without_memory(config), lora(2, 4.0, ("q_proj", "v_proj"), exclude_modules=("v_proj",)))
    assert {name.rpartition(".")[2] for name in lora_layers(model)} == {"q_proj"}
    with refuses(ConfigError, "exclude_modules=('q_proj',):", "all of ('q_proj',)"):
        add_lora(without_memory(config), lora(2, 4.0, ("q_proj",), exclude_modules=("q_proj",)))


@pytest.mark.parametrize("family", ["phimoe", "llama4_text", "jamba", "granitemoe", "gpt_oss"])
def test_routers_take_no_factors_of_all_linear(family: str) -> None:
    """Those of a class of their own (Phi-MoE), and those that are linear layers (Jamba)."""
    sizes = SIZES | {"num_local_experts": 4} | SMALL.get(family, {})
    model = without_memory(transformers.AutoConfig.for_model(family, **sizes))
    routers = [name for name, _ in model.named_modules() if name.endswith((".router", ".mlp.gate", ".router.gate"))]
    add_lora(model, lora(2, 4.0, ("all-linear",)))
    layers = lora_layers(model)
    assert routers
    assert not layers.keys() & set(routers)
    assert any("q_proj" in name or "qkv" in name for name in layers)


def train_after_reference(rank: int, path: str) -> float:
    """Gathered weights outlive a pass (`reshard_after_forward=false`), and the sync with engines lets go of them."""
    engine = trainable_engine(path, lora=LORA, reshard=False)
    data = random_batch(num_groups=2, n=2).index([2 * rank, 2 * rank + 1])
    engine.compute_reference_columns(data, ("log_probs",), PassLimits("", 2))
    list(engine.full_parameters("float32"))
    return engine.train_mini_batch(data, objective(), PassLimits("", 2)).metrics["actor/grad_norm"].value


def test_factors_train_after_the_reference_whatever_is_gathered(tmp_path: Path) -> None:
    first, second = run_ranks(2, train_after_reference, random_model("Qwen3", tmp_path / "model"))
    assert first == second > 0
