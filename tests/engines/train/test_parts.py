"""A model with a vision part: its language part trains, nothing else of its folder changes or is lost; pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.engines.train.model_loading import open_model
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.media import MEDIA
from tests.engines.train.plain import weights
from tests.messages import refuses
from tests.models import VOCAB, add_tokenizer, objective, random_batch, trainable_engine
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


def export(rank: int, model: str, folder: Path, lora: LoraSection | None) -> dict[str, Any]:
    """A policy that has learnt a step, and its adapter beside it."""
    torch.manual_seed(0)
    engine = trainable_engine(model, lora=lora)
    ranks = torch.distributed.get_world_size()
    rows = random_batch(num_groups=2, n=2).index(np.arange(4)[rank::ranks])
    engine.train_mini_batch(rows, objective(), PassLimits("", 1))
    engine.export_hf_model(folder / "export", "fp32")
    return weights(engine)


@pytest.mark.parametrize("family", first(FAMILIES, "Gemma3", "Qwen3_5"))
def test_what_does_not_train_is_in_the_export_as_it_was(family: str, tmp_path: Path) -> None:
    source = Path(whole_model(family, tmp_path / "source"))
    taught, _ = run_ranks(2, export, str(source), tmp_path, None)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "export" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    vision = {name for name in before if "vision" in name or "visual" in name}
    assert vision
    assert changed.isdisjoint(vision)
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
    assert not any("vision" in name or "visual" in name for name in factors)
    ids = torch.arange(3, 20)[None]
    expected = merged.double()(ids).logits  # what differs is the rounding of the merged weights alone
    torch.testing.assert_close(adapted.double()(ids).logits, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_a_class_without_a_causal_lm_is_refused(tmp_path: Path) -> None:
    text = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    config = transformers.Glm4vConfig(text_config=text, vision_config=QWEN)
    transformers.Glm4vForConditionalGeneration(config).save_pretrained(tmp_path)
    named = f"actor_rollout_ref.model.path={tmp_path}"
    row = checked_models(load_config([named, "data=arithmetic"])[0])[0]
    with refuses(ConfigError, named, "glm4v_text", "Glm4vForConditionalGeneration"):
        open_model(row.settings, "cpu", 1)


# --- with pictures: what the language part gets of them, in every layout and on any number of ranks ------------------
TEMPERATURE = 0.7
LAYOUTS = ("padded", "packed", "shared")
SEEING = first(["Idefics3", "SmolVLM", *MROPE], "Idefics3", "Qwen3VL")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


def made(family: str, folder: Path) -> str:
    """The folder of a family's model."""
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
    columns = {
        "prompts": Ragged.from_rows([ids for ids, _ in rows], torch.int32),
        "responses": Ragged.from_rows([random.integers(40, 90, length) for length in lengths], torch.int32),
        "response_mask": Ragged.from_rows([np.ones(length) for length in lengths], torch.int8),
        "old_log_probs": Ragged.from_rows([-4.5 + 0.1 * x for x in flat], torch.float32),
        "ref_log_probs": Ragged.from_rows([-4.5 + 0.2 * x for x in flat], torch.float32),
        "advantages": Ragged.from_rows([np.full(len(x), x[0]) for x in flat], torch.float32),
    }
    objects = {"uid": [f"p{i // 2}" for i in range(6)], MEDIA: [media for _, media in rows]}
    return DataProto.from_dict(columns, objects)


def own_log_probs(path: str, data: DataProto) -> list[torch.Tensor]:
    """Log-probs of the responses by transformers' class of the whole model, one row after the other."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
    rows, lead = [], ... if Path(path).name in MROPE else None
    for prompt, response, media in zip(data["prompts"].rows(), data["responses"].rows(), data[MEDIA], strict=True):
        pictures = () if media is None else media.pictures
        names = pictures[0].tensors if pictures else ()
        tensors = {name: torch.cat([torch.tensor(p.tensors[name]) for p in pictures])[lead] for name in names}
        ids = torch.cat([prompt, response]).long()[None]
        tensors |= {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if "image_grid_thw" in names else {}
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **tensors).logits[0] / TEMPERATURE
        predicted = logits[len(prompt) - 1 : -1].log_softmax(-1)
        rows.append(predicted.gather(1, response.long()[:, None])[:, 0])
    return rows


@contextmanager
def counted_passes(engine: FSDPEngine) -> Iterator[list[int]]:
    """The number of pictures in each pass of the tower."""
    counts: list[int] = []
    tower: Any = engine.model.tower
    with pytest.MonkeyPatch.context() as patch:
        compute = tower._compute
        patch.setattr(tower, "_compute", lambda pictures: counts.append(len(pictures)) or compute(pictures))
        yield counts


def forward(rank: int, path: str) -> dict[str, Any]:
    data, ranks = groups(path), torch.distributed.get_world_size()
    own = np.arange(6)[rank::ranks] if ranks > 1 else np.arange(6)
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        engine = trainable_engine(path, layout=layout, sees_images=True)
        log_probs = engine.compute_log_probs(data.index(own), PassLimits("", 6))
        with counted_passes(engine) as counts:
            engine.compute_log_probs(data.index(own), PassLimits("", 6))
        found[layout] = [row.numpy() for row in log_probs.rows()], counts, engine.forward.report
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", SEEING)
def test_log_probs_are_those_of_the_models_own_class(folder: Path, family: str, ranks: int) -> None:
    path = made(family, folder)
    expected = own_log_probs(path, groups(path))
    for rank, found in enumerate(run_ranks(ranks, forward, path)):
        for rows, counts, report in found.values():
            for row, own in zip(rows, expected[rank::ranks], strict=True):
                np.testing.assert_allclose(row, own, atol=1e-5)
            assert sum(counts) == 3, "each different picture once"
            assert "instead of" not in report, report


def trained(rank: int, path: str, layout: str, split: int, kind: str) -> dict[str, Any]:
    """The weights that train behind a step, in two passes, by the names of the files."""
    torch.manual_seed(0)
    ranks, factors = torch.distributed.get_world_size() // split, lora() if kind == "lora" else None
    options: dict[str, Any] = {"layout": layout, "lora": factors, "sequence_parallel_size": split}
    engine = trainable_engine(path, sees_images=True, trains_vision=kind == "vision", **options)
    data = groups(path).index(np.arange(6)[rank // split :: ranks])
    engine.train_mini_batch(data, objective(), PassLimits("", 4))
    return {name: weight.numpy() for name, weight in engine.full_parameters("float32", as_in_files=True)}


STEPS = [("Idefics3", "language"), ("Idefics3", "lora"), ("Idefics3", "vision"), ("Qwen3VL", "vision")]


@pytest.mark.parametrize("row", first(STEPS, STEPS[1]))
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
