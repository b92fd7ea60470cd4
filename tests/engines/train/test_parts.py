"""A model with a vision part: its language part trains, and nothing else of its folder changes or is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import ADAPTER_FOLDER, ADAPTER_WEIGHTS
from grpo_dist.checks.models import checked_models
from grpo_dist.config.schema_roles import LoraSection
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.model_loading import open_model
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from tests.engines.train.plain import weights
from tests.messages import refuses
from tests.models import VOCAB, objective, random_batch, trainable_engine
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
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model_path("builtin:tiny-qwen3"), name), folder)
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
