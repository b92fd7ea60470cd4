"""Engines of a model with a vision part: they have its language part alone, and take what trains of it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import peft
import pytest
import torch
import transformers

from grpo_dist.engines.vllm import backend
from grpo_dist.engines.weights.buckets import Bucket, pack
from grpo_dist.runtime.group import WorkerGroup
from tests.engines.train.test_parts import whole_model
from tests.engines.vllm.test_adapter import settings_of
from tests.engines.vllm.test_engine import (
    PROMPTS,
    assert_log_probs_equal,
    generate,
    greedy,
    hf_answers,
    load,
    perturbed,
    sampling,
    started,
)
from tests.messages import says
from tests.worker_settings import engine_settings


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Idefics3 (SmolVLM), whose class in vLLM needs no torchvision."""
    return whole_model("Idefics3", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def engines(local_ray: None, source: str) -> Iterator[WorkerGroup]:
    """One that gets whole weights, and one that gets factors."""
    with started(engine_settings(source), settings_of(source, target_modules=("q_proj", "v_proj"))) as group:
        yield group


def whole(source: str) -> Any:
    return transformers.Idefics3ForConditionalGeneration.from_pretrained(source, dtype=torch.float32).eval()


def language(model: Any) -> list[Bucket]:
    """What a trainer sends: weights of the language part by the names that they have in the files of the whole."""
    names = dict(model.named_parameters())
    return list(pack(((name, names[name].detach()) for name in names if "text_model" in name), bucket_bytes=20_000))


@pytest.mark.ray
@pytest.mark.deep
def test_the_language_part_samples_and_takes_what_trains(engines: WorkerGroup, source: str) -> None:
    old = whole(source)
    new = perturbed(old, 1)
    for version, model in ((-1, old), (0, new)):
        assert version < 0 or load(engines, 0, language(model), version) == version
        assert greedy(engines) == hf_answers(model)
        assert_log_probs_equal(model, generate(engines, 0, PROMPTS, sampling()))
    assert hf_answers(new) != hf_answers(old)


@pytest.mark.ray
@pytest.mark.deep
def test_factors_have_the_names_of_the_whole_model(engines: WorkerGroup, source: str) -> None:
    torch.manual_seed(1)
    chosen = r".*text_model.*\.(q_proj|v_proj)"
    model = peft.get_peft_model(whole(source), peft.LoraConfig(r=4, lora_alpha=8, target_modules=chosen)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3)
    sent = list(pack(peft.get_peft_model_state_dict(model).items(), bucket_bytes=8000))
    assert load(engines, 1, sent, 0) == 0
    assert greedy(engines, 1) == hf_answers(model) != hf_answers(whole(source))


@pytest.mark.deep
def test_a_class_that_needs_torchvision_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(name: str, parts: dict[str, Any]) -> str:
        return backend.VLLMBackend().model_problem({"architectures": [name], "head_dim": 64, **parts}, "cpu", "float32")

    gemma = ("Gemma3ForConditionalGeneration", {"text_config": {"model_type": "gemma3_text"}})
    monkeypatch.setattr(backend, "find_spec", lambda name: None if name == "torchvision" else find_spec(name))
    assert problem("LlamaForCausalLM", {}) == ""
    assert problem("NewForConditionalGeneration", gemma[1]) == "", "which vLLM judges"
    if find_spec("torchvision") is None:
        says(problem(*gemma), gemma[0], "torchvision")
    monkeypatch.setattr(backend, "find_spec", lambda name: True if name == "torchvision" else find_spec(name))
    assert problem(*gemma) == ""
