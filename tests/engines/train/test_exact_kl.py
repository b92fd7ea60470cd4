"""The reference's output layer; the KL itself is in test_head.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from grpo_dist.engines.settings import LoraSettings
from grpo_dist.engines.train import forward
from grpo_dist.engines.train.exact_kl import copy_output_layer
from grpo_dist.engines.train.lora import add_lora
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Ragged
from tests.messages import says
from tests.models import objective, random_batch, trainable_engine
from tests.ranks import run_ranks


def test_the_copy_is_the_models_own(random_models: dict[str, str]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_models["tied"], dtype=torch.float32)
    head = copy_output_layer(model, "cpu", torch.bfloat16)
    weight = model.get_input_embeddings().weight
    assert head.weight.dtype == torch.bfloat16
    assert torch.equal(head.weight, weight.detach().bfloat16())
    weight.data.zero_()
    assert head.weight.abs().sum() > 0, "a copy"
    assert head.bias is None


class Scaled(nn.Linear):
    """An output layer that does more than its weights say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def softcapped(model: Any) -> None:
    model.config.final_logit_softcapping = 30.0


def with_factors(model: Any) -> None:
    add_lora(model, LoraSettings(2, 4.0, ("q_proj", "lm_head")))


def another_class(model: Any) -> None:
    model.set_output_embeddings(Scaled(32, 96, bias=False))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (softcapped, "final_logit_softcapping"),
        (with_factors, "LoRA's factors"),
        (another_class, "Scaled"),
    ],
)
def test_an_output_layer_that_does_not_tell_the_logits_is_refused(
    random_models: dict[str, str], change: Any, reason: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(random_models["untied"])
    change(model)
    with pytest.raises(ConfigError) as caught:
        copy_output_layer(model, "cpu", torch.float32)
    message = str(caught.value)
    says(message, "actor_rollout_ref.actor.kl_loss_type=full", reason, "low_var_kl")


def without_the_chunked_head(rank: int, path: str) -> list[str]:
    """The check at the first pass is made to find that the chunked output layer gives other log-probs."""
    forward.TOLERANCE = {torch.float32: -1.0}
    messages = []
    for training in (True, False):
        engine = trainable_engine(path)
        engine.reference_head = engine.output_layer("cpu")
        data = random_batch(num_groups=2, n=2)
        states = [torch.ones(length, 32) for length in data["responses"].lengths.tolist()]
        data = data.union(DataProto({"ref_hidden_states": Ragged.from_rows(states, torch.float32)}))
        before = {name: tensor.clone() for name, tensor in engine.full_parameters("float32")}
        try:
            if training:
                engine.train_mini_batch(data, micro_batch_size=4, objective=objective(kl_loss_type="full"))
            else:
                engine.compute_columns(data, ("hidden_states",), micro_batch_size=4)
        except ConfigError as error:
            messages.append(str(error))
        assert all(torch.equal(before[name], value) for name, value in engine.full_parameters("float32"))
    return messages


def test_plain_logits_refuse_the_exact_kl(random_models: dict[str, str]) -> None:
    """Neither the policy nor the reference goes on without the term."""
    (messages,) = run_ranks(1, without_the_chunked_head, random_models["untied"])
    assert len(messages) == 2
    for message in messages:
        says(message, "actor_rollout_ref.actor.kl_loss_type=full", "log-probs differ")
