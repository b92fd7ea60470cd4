"""The reference's output layer; the KL itself is in test_head.py."""

from __future__ import annotations

import pytest
import torch
import transformers

from grpo_dist.engines.exact_kl import ReferenceHead
from grpo_dist.errors import ConfigError


def test_the_copy_is_the_models_own(random_models: dict[str, str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_models["tied"], dtype=torch.float32)
    head = ReferenceHead.of(model, "cpu", torch.bfloat16)
    weight = model.get_input_embeddings().weight
    assert head.weight.dtype == torch.bfloat16
    assert torch.equal(head.weight, weight.detach().bfloat16())
    weight.data.zero_()
    assert head.weight.abs().sum() > 0, "a copy"
    assert head.bias is None


def test_a_model_that_changes_its_logits_is_refused(random_models: dict[str, str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_models["untied"])
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="kl_loss_type=full: models with final_logit_softcapping"):
        ReferenceHead.of(model, "cpu", torch.float32)
