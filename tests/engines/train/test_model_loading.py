"""Each rank reads its shards of a model's files, which are what transformers loads; new heads, and what they say."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from grpo_dist.engines.settings import ModelSettings, PassLimits
from grpo_dist.engines.train import model_loading
from grpo_dist.engines.train.forward import ValueForward
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.micro_batch import MicroBatch
from grpo_dist.engines.train.model_loading import as_in_files, lost_names
from grpo_dist.engines.train.sharded_tensors import local_shard, whole
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.sequences import with_score_token
from tests.engines.train.plain import assert_same, built, causal_lm, log_probs, one_by_one, told, weights
from tests.messages import says
from tests.models import random_batch, random_classifier, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import lora, model_settings

WEIGHTS = "model.safetensors"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
EXPERTS = {"num_experts": 5, "num_local_experts": 5, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEEPSEEK = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
DEEPSEEK |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
# What differs in how it is loaded: ties, rotary factors, other computed buffers, transposed weights, stacked experts,
# renamed tensors, buffers that are in the files, buffers that a module without tensors fills, code for new weights that
# knows no shards, and conversions that need whole tensors (the last two).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {"head_dim": 8}),
    "tied twice": ("Qwen3", {"head_dim": 8}),  # whose file has the weight under both names
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "gemma3": ("Gemma3Text", {"head_dim": 8}),
    "gpt2": ("GPT2", {}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, **EXPERTS}),
    "mixtral": ("Mixtral", EXPERTS),
    "deepseek_v3": ("DeepseekV3", EXPERTS | DEEPSEEK),
    "falcon_h1": ("FalconH1", {"head_dim": 8, "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3], **MAMBA}),
    "hy_v4": ("HYV4", EXPERTS | DEEPSEEK),
    "too_few_experts": ("Qwen3Moe", {"head_dim": 8, **EXPERTS, "num_experts": 2, "num_local_experts": 2}),
    "joined_rows": ("OlmoHybrid", {"layer_types": ["linear_attention", "full_attention"]}),
}
WHOLE = {"too_few_experts": "too few for each of 3 ranks", "joined_rows": "converts its weights by Concatenate"}
EMBEDDING, QUERY = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    new = tmp_path_factory.mktemp
    found = {name: random_model(family, new(name), **changes) for name, (family, changes) in FAMILIES.items()}
    change_weights(lambda w: w.update({"lm_head.weight": w[EMBEDDING].clone()}))(Path(found["tied twice"]))
    return found


def compare(rank: int, paths: dict[str, str], dtype: str) -> dict[str, Any]:
    """What differs from the model as transformers loads it, and how much of it this rank holds."""
    told: list[str] = []
    logging.getLogger("grpo_dist.engines.train.model_loading").addFilter(lambda r: bool(told.append(r.getMessage())))
    found = {}
    for name, path in paths.items():
        model = built(path, model_dtype=dtype).model
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=kind)
        own = {n: whole(p.detach()) for n, p in model.named_parameters()}
        assert list(own) == [n for n, _ in expected.named_parameters()], name
        own |= dict(model.named_buffers())
        tensors = [*expected.named_parameters(), *expected.named_buffers()]
        found[name] = {
            "others": [n for n, t in tensors if own[n].dtype != t.dtype or not torch.equal(own[n], t)],
            "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
            "numbers": sum(local_shard(p).numel() for p in model.parameters()),
            "told": [line for line in told if path in line],
        }
    return found


@pytest.mark.parametrize(("ranks", "dtype"), [pytest.param(3, "fp32", marks=pytest.mark.deep), (1, "bf16")])
def test_the_shards_are_what_transformers_loads(families: dict[str, str], ranks: int, dtype: str) -> None:
    results = run_ranks(ranks, compare, families, dtype)
    for rank, result in enumerate(results):
        for name, found in result.items():
            assert not found["others"], name
            assert found["tied"] == (FAMILIES[name][1].get("tie_word_embeddings", True)), name
            if ranks == 3:  # rank 0 alone may load a model whole, and says so
                assert [WHOLE[name] in line for line in found["told"]] == [True] * (rank == 0 and name in WHOLE), name
    for name in families:  # no rank holds what another one holds
        total = sum(result[name]["numbers"] for result in results)
        assert total == sum(weight.numel() for weight in causal_lm(families[name]).parameters()), name


def in_several_files(rank: int, path: str, joined: str) -> list[float]:
    """On ranks of which two hold the same, from several files, and from rank 0; the random state is not touched."""
    torch.manual_seed(5)
    engine, model = built(path, fsdp_size=2), causal_lm(path)
    drawn = torch.rand(2).tolist()
    torch.manual_seed(5)
    assert drawn == torch.rand(2).tolist(), "loading draws no random number"
    held = sum(local_shard(weight).numel() for weight in engine.model.parameters())
    assert held == sum(weight.numel() for weight in model.parameters()) // 2
    assert_same(weights(engine), held_by(model))
    assert_same(weights(built(joined, fsdp_size=2)), held_by(causal_lm(joined)))
    return log_probs(engine, random_batch(num_groups=1, n=2), 2).tolist()


@pytest.mark.deep
def test_several_files_and_copies_of_the_shards(families: dict[str, str], tmp_path: Path) -> None:
    causal_lm(families["untied"]).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found = run_ranks(4, in_several_files, str(tmp_path), families["joined_rows"])
    assert found == [found[0]] * 4


def held_by(model: Any) -> dict[str, np.ndarray]:
    return {name: weight.detach().numpy() for name, weight in model.named_parameters()}


# --- what goes out -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["tied", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_what_goes_out_has_the_names_and_numbers_of_the_files(families: dict[str, str], name: str) -> None:
    files, model = load_file(Path(families[name], WEIGHTS)), causal_lm(families[name])
    held = {key: parameter.detach() for key, parameter in model.named_parameters()}
    assert (held.keys() <= files.keys()) == (name == "tied"), "there is something to convert"
    given: list[str] = []
    sent = as_in_files(model, ((key, given.append(key) or tensor) for key, tensor in held.items()))
    found = [next(sent)]
    assert len(given) == 1, "the first tensor goes out before the second one comes"
    found += sent
    assert sorted(key for key, _ in found) == sorted(files)
    assert all(torch.equal(tensor, files[key]) for key, tensor in found)


def test_names_that_would_be_lost(families: dict[str, str]) -> None:
    """Without a way back the stacks of two layers go out as they are, and no file has them."""
    model = causal_lm(families["qwen3_moe"]).to("meta")
    model.tie_weights()
    files = {name: tensor.to("meta") for name, tensor in load_file(Path(families["qwen3_moe"], WEIGHTS)).items()}
    assert lost_names(model, files) == []
    assert lost_names(model, files | {EXPERT: torch.empty(49, 32, device="meta")}) == [EXPERT]
    assert lost_names(model, {name: tensor for name, tensor in files.items() if name != EXPERT}) == [EXPERT]
    model._weight_conversions = []
    stacks = [f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("down_proj", "gate_up_proj")]
    assert lost_names(model, files) == stacks


# --- LoRA ------------------------------------------------------------------------------------------------------------
def draw(rank: int, path: str, expected: dict[str, np.ndarray], then: float) -> None:
    torch.manual_seed(7)
    model = trainable_engine(path, lora=lora()).model
    assert torch.rand(1).item() == then, "the random state goes on as after peft"
    own = dict(model.named_parameters())
    assert_same({name: whole(w.detach()).numpy() for name, w in own.items() if ".lora_" in name}, expected)
    assert [name for name, weight in own.items() if weight.requires_grad] == list(expected)


@pytest.mark.deep
@pytest.mark.parametrize("family", ["tied", "gpt2"])
def test_lora_starts_as_peft_starts_it_on_any_number_of_ranks(families: dict[str, str], family: str) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = causal_lm(families[family])
    torch.manual_seed(7)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), model)
    then = torch.rand(1).item()
    expected = {name: weight for name, weight in held_by(model).items() if ".lora_" in name}
    assert expected
    for ranks in (1, 2, 3):
        run_ranks(ranks, draw, families[family], expected, then)


# --- what is refused -------------------------------------------------------------------------------------------------
def refused(rank: int, *models: ModelSettings) -> list[str]:
    return [told(FSDPEngine, model, device="cpu", temperature=1.0) for model in models]


WRONG: list[tuple[str, Callable[[Path], None], list[str]]] = [
    ("tied", change_weights(lambda w: w.pop(QUERY)), ["incomplete", QUERY]),
    ("tied", change_weights(lambda w: w.update({"model.extra": torch.ones(3)})), ["model.extra", "config"]),
    # larger than the model: every rank would find as many rows as it asks for
    ("tied", change_weights(lambda w: w.update({QUERY: torch.ones(64, 32)})), [QUERY, "(64, 32)", "(32, 32)"]),
    ("tied", change_weights(lambda w: w.update({QUERY: torch.ones(5, 32)})), [QUERY, "(5, 32)", "(32, 32)"]),
    ("tied", change_weights(lambda w: w[QUERY][31].fill_(torch.nan)), ["nan or infinity", QUERY]),  # of the last rank
    ("tied", change_weights(lambda w: w[QUERY][31].fill_(-torch.inf)), ["nan or infinity", QUERY]),
    ("tied", change_weights(lambda w: w.update({"lm_head.weight": w[EMBEDDING] + 1})), ["lm_head.weight", EMBEDDING]),
    ("untied", change_weights(lambda w: w.pop("lm_head.weight")), ["incomplete", "lm_head.weight"]),
    ("qwen3_moe", change_weights(lambda w: w.pop(EXPERT)), ["model.layers.1.mlp.experts"]),
    ("qwen3_moe", change_weights(lambda w: w.update({EXPERT: torch.ones(25, 32)})), ["model.layers.1.mlp.experts"]),
    ("tied", change_config(quantization_config={"quant_method": "fp8"}), ["quantized", "fp8", "bfloat16"]),
    ("untied", change_config(num_hidden_layers=1), ["model.layers.1."]),
    ("tied", lambda folder: (folder / WEIGHTS).unlink(), ["no weights"]),
]


def test_what_does_not_fit_is_refused_on_every_rank(families: dict[str, str], tmp_path: Path) -> None:
    paths = []
    for i, (family, change, _) in enumerate(WRONG):
        change(Path(shutil.copytree(families[family], tmp_path / str(i))))
        paths.append(str(tmp_path / str(i)))
    for messages in run_ranks(2, refused, *map(model_settings, paths)):
        for path, message, (_, _, parts) in zip(paths, messages, WRONG, strict=True):
            says(message, "DataError", f"actor_rollout_ref.model.path={path}", *parts)


CODE = """
import torch
from transformers import LlamaForCausalLM

class OwnCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(7))
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
"""


def with_code(rank: int, path: str, expected: np.ndarray) -> None:
    model = (engine := built(path, trust_remote_code=True)).model
    assert whole(model.get_parameter("scale").detach()).tolist() == list(range(7))
    assert model.get_buffer("counts").tolist() == list(range(3))
    np.testing.assert_allclose(log_probs(engine, random_batch(num_groups=1, n=2)), expected, atol=1e-5)


def test_code_that_comes_with_the_model(families: dict[str, str], tmp_path: Path) -> None:
    """It computes what Llama's does."""
    folder = Path(shutil.copytree(families["untied"], tmp_path / "own"))
    (folder / "modeling_own.py").write_text(CODE)
    change_config(auto_map={"AutoModelForCausalLM": "modeling_own.OwnCausalLM"}, architectures=["OwnCausalLM"])(folder)
    change_weights(lambda w: w.update({"scale": torch.arange(7.0), "counts": torch.arange(3.0)}))(folder)
    run_ranks(2, with_code, str(folder), one_by_one(families["untied"], random_batch(num_groups=1, n=2)))


# --- linear heads ----------------------------------------------------------------------------------------------------
SEED, HIDDEN = 7, 32
KEY = "reward_model.model.path"


def settings(path: str, **changes: Any) -> ModelSettings:
    return model_settings(path, **({"num_labels": 1, "key": KEY, "new_head_seed": SEED} | changes))


def load(rank: int, model: ModelSettings, handed_out: bool = False) -> dict[str, Any]:
    """Scores and head of a model; with `handed_out` it is loaded by rank 0 and handed out."""
    if handed_out:
        model_loading._why_whole = lambda *_: "so that it is"
    torch.manual_seed(100 + rank)  # has no say
    engine = FSDPEngine(model, device="cpu", temperature=1.0)
    values = engine.compute_columns(with_score_token(random_batch(2, 2)), ("values",), PassLimits("", 2))["values"]
    head = dict(engine.full_parameters("float32"))["score.weight"]
    return {"scores": [row[-1].item() for row in values.rows()], "head": head.tolist()}


@pytest.mark.deep
@pytest.mark.parametrize(("family", "tied"), [("Qwen3", True), ("Llama", False), ("Gemma3Text", True)])
def test_a_new_head_on_a_causal_model(tmp_path: Path, family: str, tied: bool) -> None:
    """Normal with standard deviation 1 / sqrt(hidden + 1), from the seed alone. Untied files have an output layer."""
    path = random_model(family, tmp_path, tie_word_embeddings=tied)
    assert any("lm_head" in name for name in load_file(tmp_path / "model.safetensors")) != tied
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(SEED)) / math.sqrt(HIDDEN + 1)
    expected = [score.item() for score in plain(path, "Sequence", random_batch(2, 2), head)]
    assert max(expected) - min(expected) > 0.1, "they differ"
    for ranks, handed_out in ((1, False), (2, False), (2, True)):
        for found in run_ranks(ranks, load, settings(path), handed_out):
            assert found["head"] == head.tolist()
            assert found["scores"] == pytest.approx(expected, abs=2e-5)
    (other,) = run_ranks(1, load, settings(path, new_head_seed=SEED + 1))
    assert other["head"] != head.tolist()


def test_a_head_in_the_files_is_kept_and_a_critics_new_one_is_small(tmp_path: Path) -> None:
    """Its standard deviation is 1 / (hidden + 1)."""
    (kept,) = run_ranks(1, load, settings(random_classifier(tmp_path / "has one")))
    assert kept["head"] == load_file(tmp_path / "has one/model.safetensors")["score.weight"].tolist()
    (new,) = run_ranks(1, load, settings(random_model("Llama", tmp_path / "has none"), small_new_head=True))
    head = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(SEED)) / (HIDDEN + 1)
    assert new["head"] == head.tolist()


def test_what_a_new_head_does_not_mend(tmp_path: Path) -> None:
    path = random_model("Llama", tmp_path / "policy", tie_word_embeddings=False)
    short, more = (str(shutil.copytree(path, tmp_path / name)) for name in ("short", "more"))
    change_weights(lambda w: w.pop("model.norm.weight"))(Path(short))
    change_weights(lambda w: w.update({"extra.weight": torch.ones(32)}))(Path(more))
    two = random_classifier(tmp_path / "two", "Qwen3", num_labels=2)
    cases: list[tuple[str, dict[str, Any], str]] = [
        (path, {"new_head_seed": None}, "score.weight"),
        (path, {"lora": lora()}, "lora_rank=4"),
        (short, {}, "model.norm.weight"),
        (more, {}, "extra.weight"),
        (two, {"new_head_seed": None}, "score.weight has 2 outputs"),
    ]
    (messages,) = run_ranks(1, refused, *(settings(folder, **changes) for folder, changes, _ in cases))
    for message, (folder, changes, part) in zip(messages, cases, strict=True):
        says(message, KEY if "lora" in changes else f"{KEY}={folder}", part)


def plain(path: str, kind: str, data: DataProto, head: torch.Tensor | None = None) -> list[torch.Tensor]:
    """What transformers' own class says of each sequence alone."""
    changes = {} if head is None else {"num_labels": 1}
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    model = auto.from_pretrained(path, dtype=torch.float32, **changes).eval()
    if head is not None:
        model.score.weight.data.copy_(head)
    rows = zip(data["prompts"].rows(), data["responses"].rows(), strict=True)
    with torch.no_grad():
        return [model(input_ids=torch.cat(row).long()[None]).logits[0] for row in rows]


def values(rank: int, path: str, data: DataProto) -> list[list[float]]:
    found = built(path, num_labels=2).compute_columns(data, ("values",), PassLimits("", 3))["values"]
    return [row.tolist() for row in found.rows()]


def test_values_are_those_of_the_token_before(tmp_path: Path) -> None:
    """Two outputs, bad and good, and a bias, as a token classifier is saved: the log odds of good."""
    path, data = random_classifier(tmp_path, "Qwen3", "Token", num_labels=2), random_batch(num_groups=3, n=2)
    (found,) = run_ranks(1, values, path, data)
    for row, start, logits in zip(found, data["prompts"].lengths, plain(path, "Token", data), strict=True):
        assert row == pytest.approx(logits[start - 1 : -1].diff(dim=1)[:, 0].tolist(), abs=2e-5)


def shuffled(rank: int, path: str) -> str:
    """What the check says of a head of zeros and a packed layout in which every token is another one."""
    run = ValueForward._run

    def run_on_others(self: ValueForward, micro_batch: MicroBatch, **options: Any) -> Any:
        moved = replace(micro_batch, input_ids=micro_batch.input_ids.roll(1))
        return run(self, micro_batch if micro_batch.segments is None else moved, **options)

    ValueForward._run = run_on_others  # type: ignore[method-assign]
    engine = built(path, layout="packed", num_labels=1)
    torch.nn.init.zeros_(engine.model.score.weight)
    values = engine.compute_columns(random_batch(2, 2), ("values",), PassLimits("", 4))["values"]
    assert not values.values.any()
    return engine.forward.report


@pytest.mark.deep
def test_a_head_of_zeros_does_not_hide_a_wrong_layout(tmp_path: Path) -> None:
    (report,) = run_ranks(1, shuffled, random_classifier(tmp_path))
    assert report.startswith("padded")
    says(report, "instead", "packed", "values")
