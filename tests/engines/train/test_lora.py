"""LoRA's factors: B = 0 changes nothing, training moves them alone, merged weights are what the model computes."""

import functools
import json
import shutil
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
from tests.engines.train.plain import assert_same, causal_lm, one_by_one, own_rows, step, told, weights
from tests.messages import refuses, says
from tests.models import VOCAB, add_tokenizer, random_batch, random_model, trainable_engine, without_memory
from tests.ranks import run_ranks
from tests.worker_settings import lora, model_settings

LORA = lora()


def numbers(engine: FSDPEngine, reference: bool = False) -> np.ndarray:
    compute = engine.compute_reference_columns if reference else engine.compute_columns
    data = random_batch(num_groups=3, n=3)
    return compute(data, ("log_probs",), PassLimits("", 9))["log_probs"].values.numpy().copy()


def trained(
    rank: int, path: str, lora: LoraSection, folder: Path | None = None, *, steps: int, **sharding: Any
) -> dict[str, Any]:
    """Log-probs before and after steps, by how much weights with their factors have moved, and the factors."""
    torch.manual_seed(1)
    engine = trainable_engine(path, lora=lora, **sharding)
    found: dict[str, Any] = {"before": numbers(engine)}
    start, data = weights(engine), own_rows(random_batch(num_groups=4, n=2), rank)
    for _ in range(steps):
        step(engine, data, 2)
    if folder is not None:
        engine.export_hf_model(folder / "huggingface", "fp32")
    found["moved"] = {name: np.abs(weight - start[name]).max() for name, weight in weights(engine).items()}
    parameters = [(name, weight.dtype, isinstance(weight, DTensor)) for name, weight in engine.model.named_parameters()]
    found["base"] = {(str(dtype), sharded) for name, dtype, sharded in parameters if ".lora_" not in name}
    found["types"] = {str(dtype) for name, dtype, _ in parameters if ".lora_" in name}
    found["factors"] = {name: factor.numpy().copy() for name, factor in engine.lora_factors("float32")}
    return found | {"reference": numbers(engine, reference=True), "after": numbers(engine)}


three_steps = functools.partial(trained, steps=3)


def by_transformers(path: object) -> np.ndarray:
    return one_by_one(path, random_batch(num_groups=3, n=3), 0.7)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "all_ranks", "targets"),
    [
        ("tied", (1, 2), ("_proj.weight",)),
        # of the attention: experts are no layers, and have no such names
        pytest.param("experts", (2,), ("_proj.weight",), marks=pytest.mark.deep),
        ("GPT2", (2,), ("c_attn.weight", "c_proj.weight", "c_fc.weight")),  # Conv1D: transposed weights
    ],
)
def test_training_moves_the_factors_and_merging_them_gives_the_same_model(
    model: str, all_ranks: tuple[int, ...], targets: tuple[str, ...], random_models: dict[str, str], tmp_path: Path
) -> None:
    path = random_models.get(model) or add_tokenizer(random_model(model, tmp_path / "model"))
    plain, folders = by_transformers(path), [tmp_path / f"{ranks}" for ranks in all_ranks]
    results = [run_ranks(int(folder.name), three_steps, path, LORA, folder) for folder in folders]
    for folder, found in ((folder, found) for folder, each in zip(folders, results, strict=True) for found in each):
        assert_close(found["before"], plain)  # B starts at 0
        assert found["moved"].keys() == dict(causal_lm(path).named_parameters()).keys()
        moved = {name for name, change in found["moved"].items() if change > 0}
        expected = {name for name in found["moved"] if name.endswith(targets)}
        assert moved == expected, "embeddings, norms and biases are frozen"
        # without its factors the model is what it was, and they come back
        np.testing.assert_allclose(found["reference"], found["before"], rtol=0, atol=1e-6)
        assert_close(found["after"], by_transformers(folder / "huggingface"))
        assert_close(found["after"], results[0][0]["after"])


HEAD = lora(4, 8.0, ("q_proj", "lm_head"))


def test_an_output_layer_of_its_own_is_trained_and_exported(random_models: dict[str, str], tmp_path: Path) -> None:
    (found,) = run_ranks(1, three_steps, random_models["untied"], HEAD, tmp_path)
    moved = {name.rpartition("layers.")[2] for name, change in found["moved"].items() if change > 0}
    assert moved == {"lm_head.weight", "0.self_attn.q_proj.weight", "1.self_attn.q_proj.weight"}
    assert_close(found["after"], by_transformers(tmp_path / "huggingface"))


def built(path: str, **changes: Any) -> Any:
    return build_model(model_settings(path, **changes), "cpu", shards=1).model


TIED = [("Qwen3", "model.embed_tokens"), ("GPT2", "transformer.wte"), ("GPTNeoX", "gpt_neox.embed_in")]


@pytest.mark.parametrize(("family", "embedding"), TIED)
def test_an_output_layer_that_is_tied_to_the_embedding_takes_no_factors(
    family: str, embedding: str, tmp_path: Path
) -> None:
    """Its change would have to be the embedding's too. `all-linear` leaves the output layer out, as peft's does."""
    path = random_model(family, tmp_path / "model")
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
    says(told(built, tied, lora=HEAD), "ConfigError", "lm_head", "model.embed_tokens")
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
    copies = functools.partial(three_steps, fsdp_size=1)
    (one,), (first, second) = (run_ranks(ranks, copies, random_models["tied"], LORA) for ranks in (1, 2))
    assert_same(second["factors"], first["factors"])
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
        assert_same(narrow["factors"], cast["factors"])
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
    says(told(add_lora, without_memory(config), lora(2, 4.0, targets)), "ConfigError", *parts)


def test_targets_by_name(random_models: dict[str, str]) -> None:
    config = transformers.AutoConfig.from_pretrained(random_models["tied"])
    add_lora(model := without_memory(config), lora(2, 4.0, ("q_proj", "v_proj"), exclude_modules=("v_proj",)))
    assert {name.rpartition(".")[2] for name in lora_layers(model)} == {"q_proj"}
    with refuses(ConfigError, "exclude_modules=('q_proj',):", "all of ('q_proj',)"):
        add_lora(without_memory(config), lora(2, 4.0, ("q_proj",), exclude_modules=("q_proj",)))


@pytest.mark.parametrize("family", ["phimoe", "llama4_text", "jamba", "granitemoe", "gpt_oss"])
def test_routers_take_no_factors_of_all_linear(family: str) -> None:
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
    engine, data = trainable_engine(path, lora=LORA, reshard=False), random_batch(num_groups=2, n=2)
    own = own_rows(data, rank)
    engine.compute_reference_columns(own, ("log_probs",), PassLimits("", 2))
    list(engine.full_parameters("float32"))
    return step(engine, own, 2)["actor/grad_norm"]


def test_factors_train_after_the_reference_whatever_is_gathered(tmp_path: Path) -> None:
    first, second = run_ranks(2, train_after_reference, random_model("Qwen3", tmp_path / "model"))
    assert first == second > 0


# --- adapters --------------------------------------------------------------------------------------------------------
ADAPTER = "lora_adapter"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 23).reshape(2, 10)).logits


@pytest.fixture
def model(request: pytest.FixtureRequest, random_models: dict[str, str], tmp_path: Path) -> str:
    if request.param == "GPT2":  # Conv1D: transposed weights
        return add_tokenizer(random_model("GPT2", tmp_path / "source"))
    return random_models[request.param]


PEFT = [
    ("tied", LORA),
    ("experts", LORA.replaced(path="owner/name@v1")),
    ("GPT2", LORA.replaced(target_modules=("c_attn", "h.0.mlp.c_fc"))),  # c_fc of one layer only
]


@pytest.mark.deep
@pytest.mark.parametrize(("model", "lora"), PEFT, indirect=["model"])
def test_peft_computes_what_the_merged_model_does(model: str, lora: LoraSection, tmp_path: Path) -> None:
    import peft

    run_ranks(2, functools.partial(trained, steps=2), model, lora, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    untrained = logits(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / ADAPTER)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-4, atol=1e-4)
    assert (logits(adapted) - untrained).abs().max() > 1e-2, "the factors have been trained"

    config = json.loads((tmp_path / ADAPTER / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 8, "none", "CAUSAL_LM")
    of_hub = lora.path == "owner/name@v1"
    base_model = config["base_model_name_or_path"], config["revision"]
    assert base_model == (("owner/name", "v1") if of_hub else (model, None))
    targets = set(config["target_modules"])
    if lora.targets == "all-linear":
        assert "q_proj" in targets
        assert not any("." in name for name in targets)
    else:
        assert targets == {f"transformer.h.{name}" for name in ("0.attn.c_attn", "1.attn.c_attn", "0.mlp.c_fc")}
        assert config["fan_in_fan_out"]
    adapted.save_pretrained(str(tmp_path / "by peft"))
    assert_same(*(load_file(tmp_path / name / "adapter_model.safetensors") for name in (ADAPTER, "by peft")))


@pytest.mark.deep
@pytest.mark.parametrize("model", ["tied", "GPT2"], indirect=True)
def test_training_goes_on_from_an_adapter(model: str, tmp_path: Path) -> None:
    train = functools.partial(trained, steps=2)
    (fresh,) = run_ranks(1, train, model, LORA, tmp_path / "first")
    again = LORA.replaced(lora_adapter_path=str(tmp_path / "first" / ADAPTER))
    (one,) = run_ranks(1, train, model, again)
    two, _ = run_ranks(2, train, model, again)
    for found in (one, two):
        np.testing.assert_allclose(found["before"], fresh["after"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["reference"], fresh["before"], rtol=1e-5, atol=1e-5)
        assert np.abs(found["after"] - found["before"]).max() > 1e-3
    np.testing.assert_allclose(one["after"], two["after"], rtol=1e-4, atol=1e-4)


def load(rank: int, path: str, adapter: str) -> str:
    return told(trainable_engine, path, lora=LORA.replaced(lora_adapter_path=adapter))


@pytest.mark.deep
def test_an_adapter_that_does_not_fit_is_refused_on_every_rank(random_models: dict[str, str], tmp_path: Path) -> None:
    run_ranks(1, functools.partial(trained, steps=0), random_models["tied"], LORA, tmp_path)
    prefix, layer = "base_model.model.model.layers", "0.self_attn.q_proj.lora_A.weight"
    tensors = load_file(tmp_path / ADAPTER / "adapter_model.safetensors")
    beside = {f"{prefix}.9.mlp.up_proj.lora_{k}.weight": torch.zeros(4, 4) for k in "AB"}
    for number, (changes, parts) in enumerate(
        [
            ({f"{prefix}.{layer}": tensors[f"{prefix}.{layer}"] * torch.nan}, [f"{prefix}.{layer}", "nan"]),
            ({f"{prefix}.{layer}": torch.zeros(4, 5)}, [f"{prefix}.{layer}", "(4, 5)", "base model"]),
            (beside, ["model.layers.9.mlp.up_proj"]),
        ]
    ):
        folder = Path(shutil.copytree(tmp_path / ADAPTER, tmp_path / f"{number}"))
        save_file(tensors | changes, folder / "adapter_model.safetensors")
        for message in run_ranks(2, load, random_models["tied"], str(folder)):
            says(message, f"actor_rollout_ref.model.lora_adapter_path={folder}", *parts)
