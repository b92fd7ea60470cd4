"""The exact KL from hidden states against the KL from both models' logits."""

from __future__ import annotations

import pytest
import torch
import transformers

from grpo_dist.algorithms import kl_penalty
from grpo_dist.engines import exact_kl
from grpo_dist.engines.exact_kl import ReferenceHead, at_responses, output_layer_input
from grpo_dist.errors import ConfigError

TEMPERATURE = 0.7
RESPONSE_INDEX = torch.tensor([[0, 1, 2, 2], [2, 3, 4, 5]])


@pytest.mark.parametrize("chunk_logits", [1, 400, 1 << 24])
def test_value_and_gradient_equal_the_logits_own(
    random_models: dict[str, str], chunk_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens are taken at a time: 1, 2 or all."""
    monkeypatch.setattr(exact_kl, "CHUNK_LOGITS", chunk_logits)
    path = random_models["tied"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), output_layer_input(reference, enabled=True) as seen:
        ref_logits = reference(input_ids=ids).logits
    generator = torch.Generator().manual_seed(1)
    logits = (ref_logits + torch.randn(ref_logits.shape, generator=generator)).requires_grad_()
    head = ReferenceHead.of(reference, "cpu", torch.float32)
    kl = head.kl(logits, RESPONSE_INDEX, at_responses(seen[0], RESPONSE_INDEX), TEMPERATURE)
    kl.sum().backward()
    found, logits.grad = logits.grad.clone(), None
    rows = torch.arange(2).unsqueeze(-1)
    expected = kl_penalty(
        "full", logits[rows, RESPONSE_INDEX] / TEMPERATURE, ref_logits[rows, RESPONSE_INDEX] / TEMPERATURE
    )
    expected.sum().backward()
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, logits.grad, rtol=1e-4, atol=1e-5)
    assert (kl > 0).all()


def test_the_stand_in_of_a_rank_without_rows(random_models: dict[str, str]) -> None:
    head = ReferenceHead(torch.ones(5, 3), None)
    kl = head.kl(torch.zeros(1, 1, 5, requires_grad=True), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), 1.0)
    kl.sum().backward()
    assert kl.item() == pytest.approx(0)


def test_hooks_are_gone_afterwards(random_models: dict[str, str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_models["untied"])
    with output_layer_input(model, enabled=True) as seen:
        model(input_ids=torch.tensor([[5, 6]]), logits_to_keep=1)
    model(input_ids=torch.tensor([[5, 6]]))
    assert [tuple(states.shape[:2]) for states in seen] == [(1, 1)]
    with output_layer_input(model, enabled=False) as seen:
        model(input_ids=torch.tensor([[5, 6]]))
    assert seen == []


def test_a_model_that_changes_its_logits_is_refused(random_models: dict[str, str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_models["untied"])
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="kl_loss_type=full: models with final_logit_softcapping"):
        ReferenceHead.of(model, "cpu", torch.float32)
