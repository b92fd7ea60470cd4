"""The chunked head against plain logits and autograd: values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from grpo_dist.algorithms import kl_penalty
from grpo_dist.algorithms.aggregate import token_entropy, token_log_probs
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import forward, lm_head
from grpo_dist.engines.train.lm_head import (
    HeadRequest,
    HeadValues,
    ReferenceHead,
    ResponseHead,
    TopTokens,
    copy_output_layer,
    logits_gradient,
    response_values,
    token_values,
)
from grpo_dist.engines.train.lora import add_lora
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Ragged
from tests.engines.train.plain import causal_lm, told, weights
from tests.messages import refuses, says
from tests.models import objective, random_batch, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import lora

B, L, H, V, M, TEMPERATURE = 2, 9, 16, 50, 11, 0.7


def inputs(dtype: torch.dtype, bias: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "hidden": normal(B, L, H).requires_grad_(),
        "weight": normal(V, H).requires_grad_(),
        "bias": normal(V).requires_grad_() if bias else None,
        # token 3 predicts twice: the first tokens of two responses to one prompt
        "predictors": torch.tensor([3, 3, 4, 5, 8, 9, 12, 13, 14, 16, 17]),
        "targets": torch.randint(0, V, (M,), generator=generator),
        "reference": ReferenceHead(normal(V, 8), None),
        "reference_states": normal(M, 8),
        "upstream": torch.randn(3, M, generator=generator),
    }


def plain(x: dict[str, Any], entropies: bool, kl: bool) -> list[torch.Tensor]:
    states = x["hidden"].flatten(0, 1)[x["predictors"]]
    logits = nn.functional.linear(states, x["weight"], x["bias"])
    found = [token_log_probs(logits, x["targets"], TEMPERATURE)]
    found += [token_entropy(logits, TEMPERATURE)] if entropies else []
    if kl:
        reference = nn.functional.linear(x["reference_states"], x["reference"].weight)
        found.append(kl_penalty("full", logits.float() / TEMPERATURE, reference.float() / TEMPERATURE))
    return found


def chunked(x: dict[str, Any], entropies: bool, kl: bool, chunk_tokens: int | None) -> list[torch.Tensor]:
    reference = (x["reference"], x["reference_states"]) if kl else (None, None)
    request = HeadRequest(x["predictors"], x["targets"], TEMPERATURE, entropies, True, *reference)
    values = response_values(x["hidden"], x["weight"], x["bias"], request, chunk_tokens)
    assert (values.entropies is None, values.exact_kl is None) == (not entropies, not kl)
    assert values.hidden_states is not None
    assert torch.equal(values.hidden_states, x["hidden"].flatten(0, 1)[x["predictors"]])
    return [value for value in values[:3] if value is not None]


def gradients(x: dict[str, Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
    loss = sum((value * weight).sum() for value, weight in zip(found, x["upstream"], strict=False))
    assert isinstance(loss, torch.Tensor)
    return list(torch.autograd.grad(loss, [x[name] for name in ("hidden", "weight", "bias") if x[name] is not None]))


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 11, 100, None])
@pytest.mark.parametrize(("entropies", "kl", "bias"), [(False, False, False), (True, False, True), (True, True, False)])
def test_values_and_gradients_equal_plain_logits(
    chunk_tokens: int | None, entropies: bool, kl: bool, bias: bool
) -> None:
    x = inputs(torch.float32, bias)
    expected, found = plain(x, entropies, kl), chunked(x, entropies, kl, chunk_tokens)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(x, found), gradients(x, expected), strict=True):
        largest = theirs.abs().max().item()  # the sums hold terms of this size, whose rounding differs by processor
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * largest)
        assert largest > 0.1


def test_a_teachers_padding_is_left_out() -> None:
    """Rows of its output layer beyond the policy's vocabulary change nothing, whatever they hold."""
    x = inputs(torch.float32, False)
    layer = x["reference"]
    assert isinstance(layer, ReferenceHead)
    x["reference"] = ReferenceHead(layer.weight, torch.linspace(-1, 1, V))
    expected = chunked(x, False, True, 4)
    expected += gradients(x, expected)
    rows, more = torch.cat([layer.weight, 9 * torch.ones(6, 8)]), torch.cat([torch.linspace(-1, 1, V), torch.ones(6)])
    x["reference"] = ReferenceHead(rows, more)
    found = chunked(x, False, True, 4)
    for mine, theirs in zip([*found, *gradients(x, found)], expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_bf16_inputs_sum_in_float32(chunk_tokens: int) -> None:
    x = inputs(torch.bfloat16, False)
    expected, found = plain(x, True, True), chunked(x, True, True, chunk_tokens)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(x, found), gradients(x, expected), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - theirs.float()).norm() / theirs.float().norm() < 1e-2


@pytest.mark.parametrize("chunk_tokens", [2, 3, 100])
def test_float32_weights_beside_bf16_states_round_nothing_but_the_states_gradient(chunk_tokens: int) -> None:
    """The dense computation: states in float32 times the weights; a product in bf16 would be off by a hundredth."""
    x = inputs(torch.float32, True)
    x["hidden"] = x["hidden"].detach().bfloat16().requires_grad_()
    exact = x | {"hidden": x["hidden"].detach().float().requires_grad_()}
    expected, found = plain(exact, True, True), chunked(x, True, True, chunk_tokens)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    of_states, *of_weights = zip(gradients(x, found), gradients(exact, expected), strict=True)
    assert of_states[0].dtype == torch.bfloat16
    assert (of_states[0].float() - of_states[1]).norm() / of_states[1].norm() < 1e-2
    for mine, theirs in of_weights:
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() / theirs.norm() < 1e-5
    rounded = x | {name: x[name].detach().bfloat16() for name in ("weight", "bias")}
    assert (plain(rounded, False, False)[0] - expected[0]).abs().max() > 1e-3, "the comparison is about something"


def test_no_tensor_over_all_tokens_and_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward see logits of at most `chunk_tokens` tokens at a time; the last chunk's are kept."""
    seen: list[int] = []
    logits = lm_head._logits
    monkeypatch.setattr(lm_head, "_logits", lambda z, *more: seen.append(len(z)) or logits(z, *more))
    x = inputs(torch.float32, False)
    values = chunked(x, True, False, 4)
    loss = values[0].sum() + values[1].sum()
    first = torch.autograd.grad(loss, x["weight"], retain_graph=True)[0]
    assert seen == [4, 4, 3, 4, 4]
    assert torch.equal(torch.autograd.grad(loss, x["weight"])[0], first), "also once they are gone"
    assert seen[5:] == [3, 4, 4]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_inside_a_model(random_models: dict[str, str], name: str) -> None:
    """Gradients of all parameters, the embedding's shared ones too; without a request the layer gives logits."""
    model = causal_lm(random_models[name])
    names = [name for name, _ in model.named_parameters()]
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    expected = token_log_probs(model(input_ids=ids).logits[:, 1:4], ids[:, 2:5], TEMPERATURE)
    expected.sum().backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    head = ResponseHead.install(model)
    assert head is not None
    assert [name for name, _ in model.named_parameters()] == names
    predictors = torch.tensor([1, 2, 3, 7, 8, 9])
    with head.answering(HeadRequest(predictors, ids.flatten()[predictors + 1], TEMPERATURE)):
        found = model(input_ids=ids).logits.log_probs
    torch.testing.assert_close(found.view(2, 3), expected, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[parameter_name], rtol=1e-4, atol=1e-5, msg=parameter_name)
    assert model(input_ids=ids).logits.shape == (2, 6, 96)


def test_the_copy_is_the_models_own(random_models: dict[str, str]) -> None:
    model = causal_lm(random_models["tied"])
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.config, "final_logit_softcapping", 30.0), "final_logit_softcapping"),
        (lambda model: add_lora(model, lora(2, 4.0, ("q_proj", "lm_head"))), "LoRA's factors"),
        (lambda model: model.set_output_embeddings(Scaled(32, 96, bias=False)), "Scaled"),
    ],
)
def test_an_output_layer_that_does_not_tell_the_logits_stays_and_gives_no_exact_kl(
    random_models: dict[str, str], change: Any, reason: str
) -> None:
    model = causal_lm(random_models["untied"])
    change(model)
    layer = model.get_output_embeddings()
    with refuses(ConfigError, "actor_rollout_ref.actor.kl_loss_type=full", reason, "low_var_kl"):
        copy_output_layer(model, "cpu", torch.float32)
    if reason == "final_logit_softcapping":
        assert ResponseHead.install(model) is None
        assert model.get_output_embeddings() is layer


def without_the_chunked_head(rank: int, path: str) -> list[str]:
    """The check at the first pass is made to find that the chunked output layer gives other log-probs."""
    forward.PolicyForward._difference = lambda *args: (1.0, "")  # type: ignore[method-assign]
    messages = []
    for training in (True, False):
        engine = trainable_engine(path)
        engine.reference_head = engine.output_layer("cpu")
        data = random_batch(num_groups=2, n=2)
        states = [torch.ones(length, 32) for length in data["responses"].lengths.tolist()]
        data = data.union(DataProto({"ref_hidden_states": Ragged.from_rows(states, torch.float32)}))
        before = weights(engine)
        if training:
            messages.append(told(engine.train_mini_batch, data, objective(kl_loss_type="full"), PassLimits("", 4)))
        else:
            messages.append(told(engine.compute_columns, data, ("hidden_states",), PassLimits("", 4)))
        assert all(np.array_equal(before[name], value) for name, value in weights(engine).items())
    return messages


def test_plain_logits_refuse_the_exact_kl(random_models: dict[str, str]) -> None:
    """Neither the policy nor the reference goes on without the term."""
    (messages,) = run_ranks(1, without_the_chunked_head, random_models["untied"])
    for message in messages:
        says(message, "ConfigError", "actor_rollout_ref.actor.kl_loss_type=full", "log-probs differ")


# --- a chunk of logits -----------------------------------------------------------------------------------------------
def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, those of a reference, tokens, and gradients of log-probs, entropies and KL."""
    generator = torch.Generator().manual_seed(3)
    own, reference = (4 * torch.randn(5, 37, generator=generator) for _ in range(2))
    return own, reference, torch.randint(0, 37, (5,), generator=generator), torch.randn(3, 5, generator=generator)


def test_a_kl_over_the_tokens_that_a_teacher_tells() -> None:
    """As if there were no others; beside it their probability, and gradients of log-probs too."""
    own, reference, targets, upstream = logits()
    told = torch.log_softmax(reference, -1).topk(4)
    top = TopTokens(told.indices, told.values / TEMPERATURE)
    scaled = (own / TEMPERATURE).requires_grad_()
    expected = kl_penalty("full", scaled.gather(1, top.ids), top.log_probs)
    loss = (expected * upstream[2]).sum() + (token_log_probs(scaled, targets, 1.0) * upstream[0]).sum()
    (gradient,) = torch.autograd.grad(loss, scaled)
    values = token_values(own, targets, TEMPERATURE, None, entropies=False, top=top)
    torch.testing.assert_close(values.exact_kl, expected.detach(), rtol=1e-5, atol=1e-5)
    mass = torch.softmax(scaled, -1).gather(1, top.ids).sum(1)
    torch.testing.assert_close(values.mass, mass.detach(), rtol=1e-5, atol=1e-6)
    upstreams = HeadValues(upstream[0], None, upstream[2])
    found = logits_gradient(own, targets, TEMPERATURE, None, values, upstreams, top)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def test_the_squared_norm_of_the_gradient_of_a_log_prob() -> None:
    own, _, targets, _ = logits()
    values = token_values(own, targets, TEMPERATURE, None, entropies=False, gradient_norms=True)
    scaled = (own / TEMPERATURE).requires_grad_()
    gradient = torch.autograd.grad(token_log_probs(scaled, targets, 1.0).sum(), scaled)[0]
    torch.testing.assert_close(values.gradient_norms, gradient.square().sum(1), rtol=1e-5, atol=1e-6)
    assert values.entropies is None


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_values_and_gradients_are_the_same(dtype: torch.dtype) -> None:
    """By Inductor, which fuses all of it."""
    own, reference, targets, upstream = logits()
    own, reference = own.to(dtype), reference.to(dtype)
    results = []
    for compute in (lambda function: function, torch.compile):
        values = compute(token_values)(own, targets, TEMPERATURE, reference, entropies=True)
        gradient = compute(logits_gradient)(own, targets, TEMPERATURE, reference, values, HeadValues(*upstream))
        assert gradient.dtype == dtype
        results.append([*(value for value in values if value is not None), gradient.float()])
    for mine, theirs in zip(*results, strict=True):
        error = 1e-2 if dtype == torch.bfloat16 and mine is results[0][-1] else 1e-5
        assert (mine - theirs).norm() <= error * theirs.norm()
