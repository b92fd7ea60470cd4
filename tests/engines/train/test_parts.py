"""Models with parts of their own: vision, which is carried or trains, and routers, which replay recorded experts."""

import functools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from grpo_dist.assets.model_folder import ADAPTER_FOLDER, ADAPTER_WEIGHTS
from grpo_dist.checks.models import checked_models
from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.data.images import ImageProcessor
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.model_loading import open_model
from grpo_dist.engines.train.router_replay import RouterReplay
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged, metric_values
from grpo_dist.protocol.media import MEDIA
from tests.engines.train.plain import (
    assert_same,
    causal_lm,
    log_probs,
    log_probs_alone,
    own_rows,
    step,
    told,
    weights,
    with_sgd,
)
from tests.messages import refuses, says
from tests.models import (
    EXPERTS,
    VOCAB,
    add_tokenizer,
    branching_batch,
    objective,
    random_batch,
    random_model,
    trainable_engine,
)
from tests.pictures import IMAGE_TOKEN, MROPE, MropeProcessor, image, mrope_model, picture_model
from tests.ranks import run_ranks
from tests.tiers import first
from tests.worker_settings import lora

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_hidden_layers": 4}
QWEN = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
QWEN |= {"patch_size": 14, "spatial_merge_size": 2, "num_position_embeddings": 16}
# Class of the whole model -> its text and its vision config, and more.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        {"sliding_window": 32},
        VISION | {"image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7},
    ),
    "Qwen3_5": (LINEAR, QWEN, {"tie_word_embeddings": False}),
    "Gemma4": (
        {"num_hidden_layers": 4, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
        VISION | {"num_key_value_heads": 2, "head_dim": 16},
        {"audio_config": None},
    ),
    "Idefics3": ({"model_type": "llama"}, VISION | {"image_size": 28, "patch_size": 14}, {}),
    "Mistral3": (
        {"model_type": "mistral"},
        VISION | {"model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14},
        {"tie_word_embeddings": False},
    ),
}


def whole_model(family: str, folder: Path, **sizes: int) -> str:
    """A small random model with a vision part, the built-in tokenizer, and a processor's file."""
    text, vision, more = FAMILIES[family]
    ties = {"tie_word_embeddings": more.get("tie_word_embeddings", True)}
    parts = {"text_config": TEXT | text | sizes | ties, "vision_config": vision}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**parts | ties | more)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    model.save_pretrained(folder)
    add_tokenizer(str(folder))
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Mine"}')
    return str(folder)


def is_vision(name: str) -> bool:
    return "vision" in name or "visual" in name


def export(rank: int, model: str, folder: Path, lora: LoraSection | None) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = trainable_engine(model, lora=lora)
    step(engine, own_rows(random_batch(num_groups=2, n=2), rank), 1)
    engine.export_hf_model(folder / "export", "fp32")
    return weights(engine)


@pytest.mark.parametrize("family", first(FAMILIES, "Gemma3"))
def test_what_does_not_train_is_in_the_export_as_it_was(family: str, tmp_path: Path) -> None:
    source = Path(whole_model(family, tmp_path / "source"))
    taught, _ = run_ranks(2, export, str(source), tmp_path, None)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(map(is_vision, before))
    assert not any(map(is_vision, changed))
    assert len(changed) > len(taught) // 2, "the language part has learnt"
    config, written = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "export"))
    for name in ("architectures", "model_type", "vision_config"):
        assert written[name] == config[name]
    assert (tmp_path / "export" / "preprocessor_config.json").read_text() == '{"image_processor_type": "Mine"}'
    again = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "export")
    ids = torch.arange(3, 20)[None]
    part = transformers.AutoModelForCausalLM.from_config(again.config.get_text_config()).eval()
    part.load_state_dict({name: torch.from_numpy(weight) for name, weight in taught.items()}, strict=False)
    torch.testing.assert_close(again.eval()(ids).logits, part(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", first(FAMILIES, "Gemma3"))
def test_adapters_name_the_modules_of_the_whole_model(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    source = whole_model(family, tmp_path / "source")
    run_ranks(1, export, source, tmp_path, lora(targets=("q_proj", "v_proj")))
    whole = getattr(transformers, f"{family}ForConditionalGeneration")
    merged = whole.from_pretrained(tmp_path / "export").eval()
    adapted = PeftModel.from_pretrained(whole.from_pretrained(source), tmp_path / ADAPTER_FOLDER).eval()
    factors = [name for name, _ in adapted.named_parameters() if "lora_" in name]
    with safe_open(tmp_path / ADAPTER_FOLDER / ADAPTER_WEIGHTS, "pt") as file:
        assert len(factors) == len(file.keys()) > 0
    assert not any(map(is_vision, factors))
    ids = torch.arange(3, 20)[None]
    expected = merged.double()(ids).logits  # what differs is the rounding of the merged weights alone
    torch.testing.assert_close(adapted.double()(ids).logits, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_a_class_without_a_causal_lm_is_refused(tmp_path: Path) -> None:
    text = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    config = transformers.Glm4vConfig(text_config=text, vision_config=QWEN)
    transformers.Glm4vForConditionalGeneration(config).save_pretrained(tmp_path)
    named = f"actor_rollout_ref.model.path={tmp_path}"
    row = checked_models(load_config([named, "data=arithmetic"])[0])[0]
    says(told(open_model, row.settings, "cpu", 1), "ConfigError", named, "glm4v_text", "Glm4vForConditionalGeneration")


# --- with pictures: what the language part gets of them, in every layout and on any number of ranks ------------------
TEMPERATURE = 0.7
LAYOUTS = ("padded", "packed", "shared")
SEEING = first(["Idefics3", "SmolVLM", *MROPE], "Idefics3", "Qwen3VL")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


def made(family: str, folder: Path) -> str:
    path = folder / family
    return str(path) if path.exists() else mrope_model(family, path) if family in MROPE else picture_model(path, family)


def groups(path: str) -> DataProto:
    """Three prompts with two responses each: two pictures, the first of these again in the same words, and none."""
    with pytest.MonkeyPatch.context() as patch:
        if Path(path).name in MROPE:
            patch.setattr("transformers.AutoProcessor.from_pretrained", lambda *_, **__: MropeProcessor())
        processor = ImageProcessor(path, setting="", trust_remote_code=False)
    token = int(processor._token_id)
    random, rows = np.random.default_rng(0), []
    for text, images in (([70, token, 71, token], (1, 2)), ([70, token, 71, token], (1, 3)), ([72, 73], ())):
        files = [image(seed, width=28 * seed) for seed in images]
        ids = processor.put_in(text, files, "") if files else text
        rows += [(ids, processor.media(files, np.array(ids), ""))] * 2
    lengths = [5, 3, 4, 6, 2, 4]
    flat = [random.normal(size=length).astype(np.float32) for length in lengths]
    floats = {"old_log_probs": [-4.5 + 0.1 * x for x in flat], "ref_log_probs": [-4.5 + 0.2 * x for x in flat]}
    floats["advantages"] = [np.full(len(x), x[0]) for x in flat]
    columns = {
        "prompts": Ragged.from_rows([ids for ids, _ in rows], torch.int32),
        "responses": Ragged.from_rows([random.integers(40, 90, length) for length in lengths], torch.int32),
        "response_mask": Ragged.from_rows([np.ones(length) for length in lengths], torch.int8),
    } | {name: Ragged.from_rows(values, torch.float32) for name, values in floats.items()}
    objects = {"uid": [f"p{i // 2}" for i in range(6)], MEDIA: [media for _, media in rows]}
    return DataProto.from_dict(columns, objects)


@torch.no_grad()
def own_log_probs(path: str, data: DataProto) -> list[torch.Tensor]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    rows, lead = [], ... if Path(path).name in MROPE else None
    for prompt, response, media in zip(data["prompts"].rows(), data["responses"].rows(), data[MEDIA], strict=True):
        pictures = () if media is None else media.pictures
        names = pictures[0].tensors if pictures else ()
        tensors = {name: torch.cat([torch.tensor(p.tensors[name]) for p in pictures])[lead] for name in names}
        ids = torch.cat([prompt, response]).long()[None]
        tensors |= {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if "image_grid_thw" in names else {}
        logits = model(input_ids=ids, use_cache=False, **tensors).logits[0] / TEMPERATURE
        predicted = logits[len(prompt) - 1 : -1].log_softmax(-1)
        rows.append(predicted.gather(1, response.long()[:, None])[:, 0])
    return rows


def forward(rank: int, path: str, expected: list[torch.Tensor]) -> None:
    own, limits = own_rows(groups(path), rank), PassLimits("", 6)
    for layout in LAYOUTS:
        engine = trainable_engine(path, layout=layout, sees_images=True)
        found = engine.compute_log_probs(own, limits).rows()
        for row, alone in zip(found, expected[rank :: torch.distributed.get_world_size()], strict=True):
            np.testing.assert_allclose(row, alone, atol=1e-5)
        assert "instead of" not in engine.forward.report, engine.forward.report
        tower: Any = engine.model.tower
        tower._compute = counted = mock.Mock(side_effect=tower._compute)
        engine.compute_log_probs(own, limits)
        assert sum(len(call.args[0]) for call in counted.call_args_list) == 3, "each different picture once"


@pytest.mark.parametrize("ranks", first([1, 2], 2))
@pytest.mark.parametrize("family", SEEING)
def test_log_probs_are_those_of_the_models_own_class(folder: Path, family: str, ranks: int) -> None:
    path = made(family, folder)
    run_ranks(ranks, forward, path, own_log_probs(path, groups(path)))


def trained(rank: int, path: str, layout: str, split: int, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    ranks, factors = torch.distributed.get_world_size() // split, lora() if kind == "lora" else None
    options: dict[str, Any] = {"layout": layout, "lora": factors, "sequence_parallel_size": split}
    engine = trainable_engine(path, sees_images=True, trains_vision=kind == "vision", **options)
    step(engine, groups(path).index(np.arange(6)[rank // split :: ranks]))
    return {name: weight.numpy() for name, weight in engine.full_parameters("float32", as_in_files=True)}


STEPS = [("Idefics3", "language"), ("Idefics3", "lora"), ("Idefics3", "vision"), ("Qwen3VL", "vision")]


@pytest.mark.deep
@pytest.mark.parametrize("row", STEPS)
def test_a_step_is_the_same_in_every_layout_on_any_number_of_ranks(folder: Path, row: tuple[str, str]) -> None:
    """On two ranks one has, in its second pass, no picture."""
    family, kind = row
    path = made(family, folder)
    ways = [("padded", 1, 1), ("packed", 1, 1), ("shared", 1, 1), ("shared", 2, 1), ("packed", 2, 2)]
    results = [run_ranks(ranks, trained, path, layout, split, kind)[0] for layout, ranks, split in ways]
    before = load_file(Path(path, "model.safetensors"))
    compared = [name for name in results[0] if not name.endswith("k_proj.bias")]  # its gradient is 0
    for found in results[1:]:
        for name in compared:  # in the mean: AdamW divides a number near 0 by itself
            assert np.abs(found[name] - results[0][name]).mean() < 5e-5, f"{name}, by steps of 1e-2"
    changed = {name for name, weight in results[0].items() if not np.allclose(weight, before[name], atol=1e-4)}
    language = {name for name in before if "text_model" in name or "language_model" in name or "lm_head" in name}
    assert changed & language
    assert (results[0].keys() == language) == (kind != "vision"), "what is frozen is not sent"
    assert bool(changed - language) == (kind == "vision")
    assert (results[0].keys() == before.keys()) == (kind == "vision")


SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0}
LAYERS, NUM_EXPERTS, CHOSEN = 2, 8, 2
KEY = "actor_rollout_ref.actor.router_replay.mode=R3"


def model(family: str = "Qwen3Moe", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | EXPERTS | changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def routes_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Different experts for each token and layer, of which a fifth of the tokens have none."""
    drawn = rng.random((*shape, LAYERS, NUM_EXPERTS)).argsort(-1)[..., :CHOSEN].astype(np.uint8)
    drawn[rng.random(shape) < 0.2] = 255
    return drawn


def with_recorded(data: DataProto) -> DataProto:
    """The batch with made-up experts; rows of a group have the same for their prompt."""
    rng = np.random.default_rng(5)
    by_uid = {uid: routes_of(rng, len(row)) for uid, row in zip(data["uid"], data["prompts"].rows(), strict=True)}
    columns = {
        "prompt_routes": Ragged.from_rows([by_uid[uid] for uid in data["uid"]], torch.uint8),
        "routes": Ragged.from_rows([routes_of(rng, len(row)) for row in data["responses"].rows()], torch.uint8),
    }
    return data.union(DataProto.from_dict(columns))


# --- one router ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("normalises", [True, False])
def test_weights_are_the_papers(normalises: bool) -> None:
    policy = model(norm_topk_prob=normalises)
    router, hidden = policy.model.layers[1].mlp.gate, torch.randn(3, 32)
    torch.nn.init.normal_(router.weight)
    logits, _, own = router(hidden)
    routes = [[[0, 0], [7, 3]], [[1, 1], [4, 5]], [[255, 255], [255, 255]]]
    RouterReplay(policy, "model").set(torch.tensor([routes]).byte())
    _, weights, chosen = router(hidden)
    assert chosen.tolist() == [[7, 3], [4, 5], own[2].tolist()]
    for token, experts in enumerate(chosen.tolist()):
        exps = [math.exp(logit) for logit in logits[token].tolist()]
        total = sum(exps[i] for i in experts) if normalises else sum(exps)
        assert weights[token].tolist() == pytest.approx([exps[i] / total for i in experts], rel=1e-5)
    if normalises:  # the derivative of a softmax over two: w_i (1 - w_i) and -w_i w_j
        weights[0, 0].backward()
        slope, expected = (weights[0, 0] * weights[0, 1]).item(), torch.zeros(NUM_EXPERTS, 32)
        expected[7], expected[3] = slope * hidden[0], -slope * hidden[0]
        torch.testing.assert_close(router.weight.grad, expected)


@pytest.mark.deep
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "Olmoe", "Qwen2Moe"])
def test_the_routers_own_choice_changes_no_bit(family: str) -> None:
    policy = model(family)
    ids = torch.arange(3, 40).reshape(1, -1)
    before = policy(input_ids=ids, output_router_logits=True)
    own = torch.stack([layer.topk(CHOSEN).indices for layer in before.router_logits], 1)
    RouterReplay(policy, "model").set(own[None].byte())
    assert torch.equal(policy(input_ids=ids).logits, before.logits)


def test_layers_without_experts_are_passed_over() -> None:
    """Of three layers the second is an ordinary one; the engine's columns have a place for it."""
    policy = model(num_hidden_layers=3, mlp_only_layers=[1])
    replay = RouterReplay(policy, "model")
    replay.set(torch.tensor([[[[1, 2], [0, 0], [3, 4]]]]).short())
    hidden = torch.randn(1, 32)
    assert [policy.model.layers[i].mlp.gate(hidden)[2].tolist() for i in (0, 2)] == [[[1, 2]], [[3, 4]]]
    replay.set(None)
    assert policy.model.layers[0].mlp.gate(hidden)[2].tolist() != [[1, 2]]


def test_what_cannot_replay_is_refused() -> None:
    says(told(RouterReplay, model("Qwen3"), "model=dense"), "ConfigError", KEY, "model=dense", "disabled")
    sizes = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "num_key_value_heads": 4}
    with refuses(ConfigError, KEY, "model=sigmoids", "DeepseekV3TopkRouter", "disabled"):
        RouterReplay(model("DeepseekV3", **sizes), "model=sigmoids")


# --- whole passes --------------------------------------------------------------------------------------------------
LIMITS: dict[str, tuple[str, PassLimits]] = {
    "padded": ("padded", PassLimits("", 100)),
    "padded, 3 rows at a time": ("padded", PassLimits("", 3)),
    "packed, 60 tokens at a time": ("packed", PassLimits("", 1, 60)),
    "shared": ("shared", PassLimits("", 100)),
    "shared, 40 tokens at a time": ("shared", PassLimits("", 1, 40)),
    "shared, layers computed again": ("shared", PassLimits("", 5)),
}
LR = 0.1


def passes(
    rank: int, path: str, shards: list[list[int]], ways: Iterable[str], *, branches: bool = False, **more: Any
) -> dict[str, Any]:
    out = {}
    for way in ways:
        layout, limits = LIMITS[way]
        more |= {"layout": layout, "enable_gradient_checkpointing": "again" in way, "replays_routes": True}
        engine = with_sgd(path, LR, temperature=0.7, **more)  # whose step is the gradient
        data = with_recorded((branching_batch if branches else random_batch)(4, 5)).index(shards[rank])
        before = weights(engine)
        numbers = engine.compute_log_probs(data, limits).values.numpy().copy()
        metrics = metric_values(engine.train_mini_batch(data, objective(), limits).metrics)
        gradients = {name: (before[name] - weight) / LR for name, weight in weights(engine).items()}
        out[way] = {"log_probs": numbers, "metrics": metrics, "gradients": gradients, "report": engine.forward.report}
    return out


def compiled_passes(rank: int, path: str, shards: list[list[int]], ways: Iterable[str]) -> list[dict[str, Any]]:
    """In bfloat16, since experts in float32 are not compiled; then without a compiler."""
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")):
        compiled = passes(rank, path, shards, ways, use_torch_compile=True, compute_dtype="bf16")
    return [compiled, passes(rank, path, shards, ways, compute_dtype="bf16")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_model("Qwen3Moe", tmp_path_factory.mktemp("experts"), head_dim=8, **EXPERTS)


ALL = list(range(20))


@pytest.fixture(scope="module")
def whole(path: str) -> dict[str, Any]:
    (out,) = run_ranks(1, passes, path, [ALL], list(LIMITS))
    return out


def assert_same_update(found: dict[str, Any], expected: dict[str, Any], way: str) -> None:
    assert LIMITS[way][0] in found["report"], "it did not fall back"
    np.testing.assert_allclose(found["log_probs"], expected["log_probs"], atol=1e-5)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5)
    assert_same(found["gradients"], expected["gradients"], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("way", list(LIMITS)[1:])
def test_how_rows_are_laid_out_changes_nothing(whole: dict[str, Any], way: str) -> None:
    assert_same_update(whole[way], whole["padded"], way)


def test_experts_are_those_that_were_recorded(path: str, whole: dict[str, Any]) -> None:
    """By transformers' own layers, each token's experts put in by hand."""
    data, policy, expected = with_recorded(random_batch(4, 5)), causal_lm(path), []
    columns = (data[name].rows() for name in ("prompt_routes", "routes"))
    for row, routes in enumerate(zip(*columns, strict=True)):
        for i, layer in enumerate(policy.model.layers):
            layer.mlp.gate.forward = by_hand(layer.mlp.gate, torch.cat(routes).long()[:, i])
        with torch.no_grad():
            expected += log_probs_alone(policy, data.slice(row, row + 1), 0.7)
    np.testing.assert_allclose(whole["padded"]["log_probs"], torch.cat(expected).numpy(), atol=1e-5)


def by_hand(router: Any, chosen: torch.Tensor) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden @ router.weight.T
        rows = [own.topk(CHOSEN).indices if 255 in one else one for own, one in zip(logits, chosen, strict=True)]
        experts = torch.stack(rows)
        return logits, logits.gather(-1, experts).softmax(-1), experts

    return forward


@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.deep), True])
def test_ranks_change_nothing(path: str, whole: dict[str, Any], split: bool) -> None:
    """Two ranks with rows of their own, or with halves of each sequence."""
    way = "shared, 40 tokens at a time"
    run = functools.partial(passes, sequence_parallel_size=2) if split else passes
    found = [each[way] for each in run_ranks(2, run, path, [ALL, ALL] if split else [ALL[:7], ALL[7:]], [way])]
    numbers = np.concatenate([part["log_probs"] for part in found[: 1 if split else 2]])
    np.testing.assert_allclose(numbers, whole["padded"]["log_probs"], atol=1e-5)
    assert_same(found[0]["gradients"], whole["padded"]["gradients"], rtol=1e-3, atol=2e-5)


@pytest.mark.long
def test_compiled_layers_change_nothing(path: str) -> None:
    way = "shared, layers computed again"
    ((out, plain),) = run_ranks(1, compiled_passes, path, [ALL], [way])
    says(out[way]["report"], "shared prompts", "compiled")
    assert_same_update(out[way], plain[way], way)


@pytest.mark.deep
def test_branches_of_an_episode_have_their_own(path: str) -> None:
    ways = ["padded, 3 rows at a time", "packed, 60 tokens at a time", "shared, 40 tokens at a time"]
    (out,) = run_ranks(1, functools.partial(passes, branches=True), path, [ALL], ways)
    for way in ways[1:]:
        assert_same_update(out[way], out[ways[0]], way)


def with_factors(rank: int, path: str) -> tuple[dict[str, Any], Any, Any]:
    data, engine = with_recorded(random_batch(4, 5)), trainable_engine(path, lora=lora(), replays_routes=True)
    before, metrics = log_probs(engine, data, 100), step(engine, data, 6)
    reference = engine.compute_reference_columns(data, ("log_probs",), PassLimits("", 100))["log_probs"]
    return metrics, before, reference.values.numpy().copy()


def test_with_lora_the_reference_replays_too(path: str, whole: dict[str, Any]) -> None:
    """Factors are nothing at first, so the policy is its reference; after a step that is still what it was."""
    ((metrics, before, reference),) = run_ranks(1, with_factors, path)
    np.testing.assert_allclose(before, whole["shared"]["log_probs"], atol=1e-5)
    np.testing.assert_allclose(reference, before, atol=1e-5)
    assert metrics["actor/grad_norm"] > 0
