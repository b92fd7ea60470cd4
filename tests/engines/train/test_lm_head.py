"""The chunked head against plain logits and autograd; an output layer in float32 beside layers in bf16."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from grpo_dist.algorithms import kl_penalty
from grpo_dist.algorithms.aggregate import token_entropy, token_log_probs
from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train import forward, lm_head, model_loading
from grpo_dist.engines.train.fsdp_model import build_model
from grpo_dist.engines.train.lora import add_lora
from grpo_dist.errors import ConfigError
from grpo_dist.protocol import DataProto, Ragged
from tests.engines.train.plain import built, causal_lm, flat, log_probs, step, told, weights, with_sgd
from tests.messages import refuses, says
from tests.models import objective, random_batch, random_model, trainable_engine
from tests.ranks import run_ranks
from tests.tiers import first
from tests.worker_settings import lora, model_settings

B, L, H, V, M, TEMPERATURE = 2, 9, 16, 50, 11, 0.7
NAMES = ("hidden", "weight", "bias")


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
        "reference": lm_head.ReferenceHead(normal(V, 8), None),
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
    request = lm_head.HeadRequest(x["predictors"], x["targets"], TEMPERATURE, entropies, True, *reference)
    values = lm_head.response_values(x["hidden"], x["weight"], x["bias"], request, chunk_tokens)
    assert (values.entropies is None, values.exact_kl is None) == (not entropies, not kl)
    assert values.hidden_states is not None
    assert torch.equal(values.hidden_states, x["hidden"].flatten(0, 1)[x["predictors"]])
    return [value for value in values[:3] if value is not None]


def gradients(x: dict[str, Any], found: list[torch.Tensor]) -> list[torch.Tensor]:
    loss = sum((value * weight).sum() for value, weight in zip(found, x["upstream"], strict=False))
    assert isinstance(loss, torch.Tensor)
    return list(torch.autograd.grad(loss, [x[name] for name in NAMES if x[name] is not None]))


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
    x = inputs(torch.float32, False)
    weight, bias, results = x["reference"].weight, torch.linspace(-1, 1, V), []
    padded = lm_head.ReferenceHead(torch.cat([weight, 9 * torch.ones(6, 8)]), torch.cat([bias, torch.ones(6)]))
    for x["reference"] in (lm_head.ReferenceHead(weight, bias), padded):
        found = chunked(x, False, True, 4)
        results.append([*found, *gradients(x, found)])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk_tokens", [2, 3, 100])
def test_bf16_states_sum_in_float32(chunk_tokens: int, weights: torch.dtype) -> None:
    """Beside float32 weights as if they were float32 too: a product in bf16 would be off by a hundredth."""
    x = inputs(weights, bias=weights == torch.float32)
    x["hidden"] = x["hidden"].detach().bfloat16().requires_grad_()
    exact = x | {"hidden": x["hidden"].detach().to(weights).requires_grad_()}
    expected, found = plain(exact, True, True), chunked(x, True, True, chunk_tokens)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for name, mine, theirs in zip(NAMES, gradients(x, found), gradients(exact, expected), strict=False):
        assert mine.dtype == x[name].dtype
        off = (mine.float() - theirs.float()).norm() / theirs.float().norm()
        assert off < (1e-2 if mine.dtype == torch.bfloat16 else 1e-5), name
    if weights == torch.float32:
        rounded = x | {name: x[name].detach().bfloat16() for name in ("weight", "bias")}
        assert (plain(rounded, False, False)[0] - expected[0]).abs().max() > 1e-3, "the comparison is about something"


def test_no_tensor_over_all_tokens_and_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
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


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


CHANGES = [
    (lambda model: setattr(model.config, "final_logit_softcapping", 30.0), "final_logit_softcapping"),
    (lambda model: add_lora(model, lora(2, 4.0, ("q_proj", "lm_head"))), "LoRA's factors"),
    (lambda model: model.set_output_embeddings(Scaled(32, 96, bias=False)), "Scaled"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_an_output_layer_that_does_not_tell_the_logits_stays_and_gives_no_exact_kl(
    random_models: dict[str, str], change: Any, reason: str
) -> None:
    change(model := causal_lm(random_models["untied"]))
    layer = model.get_output_embeddings()
    with refuses(ConfigError, "actor_rollout_ref.actor.kl_loss_type=full", reason, "low_var_kl"):
        lm_head.copy_output_layer(model, "cpu", torch.float32)
    if reason == "final_logit_softcapping":
        assert lm_head.ResponseHead.install(model) is None
        assert model.get_output_embeddings() is layer


def without_the_chunked_head(rank: int, path: str) -> None:
    """The check at the first pass is made to find that the chunked output layer gives other log-probs."""
    forward.PolicyForward._difference = lambda *args: (1.0, "")  # type: ignore[method-assign]
    data = random_batch(num_groups=2, n=2)
    states = [torch.ones(length, 32) for length in data["responses"].lengths.tolist()]
    data = data.union(DataProto({"ref_hidden_states": Ragged.from_rows(states, torch.float32)}))
    for method, what in (("train_mini_batch", objective(kl_loss_type="full")), ("compute_columns", ("hidden_states",))):
        engine = trainable_engine(path)
        engine.reference_head, before = engine.output_layer("cpu"), flat(engine)
        message = told(getattr(engine, method), data, what, PassLimits("", 4))
        says(message, "ConfigError", "actor_rollout_ref.actor.kl_loss_type=full", "log-probs differ")
        np.testing.assert_array_equal(flat(engine), before)


def test_plain_logits_refuse_the_exact_kl(random_models: dict[str, str]) -> None:
    run_ranks(1, without_the_chunked_head, random_models["untied"])


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
    top = lm_head.TopTokens(told.indices, told.values / TEMPERATURE)
    scaled = (own / TEMPERATURE).requires_grad_()
    expected = kl_penalty("full", scaled.gather(1, top.ids), top.log_probs)
    loss = (expected * upstream[2]).sum() + (token_log_probs(scaled, targets, 1.0) * upstream[0]).sum()
    (gradient,) = torch.autograd.grad(loss, scaled)
    values = lm_head.token_values(own, targets, TEMPERATURE, None, entropies=False, top=top)
    torch.testing.assert_close(values.exact_kl, expected.detach(), rtol=1e-5, atol=1e-5)
    mass = torch.softmax(scaled, -1).gather(1, top.ids).sum(1)
    torch.testing.assert_close(values.mass, mass.detach(), rtol=1e-5, atol=1e-6)
    upstreams = lm_head.HeadValues(upstream[0], None, upstream[2])
    found = lm_head.logits_gradient(own, targets, TEMPERATURE, None, values, upstreams, top)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def test_the_squared_norm_of_the_gradient_of_a_log_prob() -> None:
    own, _, targets, _ = logits()
    values = lm_head.token_values(own, targets, TEMPERATURE, None, entropies=False, gradient_norms=True)
    scaled = (own / TEMPERATURE).requires_grad_()
    gradient = torch.autograd.grad(token_log_probs(scaled, targets, 1.0).sum(), scaled)[0]
    torch.testing.assert_close(values.gradient_norms, gradient.square().sum(1), rtol=1e-5, atol=1e-6)
    assert values.entropies is None


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_values_and_gradients_are_the_same(dtype: torch.dtype) -> None:
    own, reference, targets, upstream = logits()
    own, reference = own.to(dtype), reference.to(dtype)
    results = []
    for compute in (lambda function: function, torch.compile):
        values = compute(lm_head.token_values)(own, targets, TEMPERATURE, reference, entropies=True)
        upstreams = lm_head.HeadValues(*upstream)
        gradient = compute(lm_head.logits_gradient)(own, targets, TEMPERATURE, reference, values, upstreams)
        assert gradient.dtype == dtype
        results.append([*(value for value in values if value is not None), gradient.float()])
    for mine, theirs in zip(*results, strict=True):
        error = 1e-2 if dtype == torch.bfloat16 and mine is results[0][-1] else 1e-5
        assert (mine - theirs).norm() <= error * theirs.norm()


# --- in float32 beside layers in bf16 --------------------------------------------------------------------------------
# What bf16 layers in another layout may change: log-probs, in nats; gradients, as a share of their norm.
ROUNDING, SHARE = 0.05, 0.2
APART = {"compute_dtype": "bf16", "head_dtype": "fp32"}
# Its gradient is that of the sum of log-probs.
SUM = objective(loss_mode="gpg", loss_agg_mode="token-sum", use_kl_loss=False, entropy_coeff=0.0)


def dense(path: str, data: DataProto) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probs of responses, and the gradient of their sum: layers in bf16, all logits at once in float32."""
    model = causal_lm(path)
    own = dict(model.named_parameters())
    head = model.lm_head.weight
    rounded = {name.removeprefix("model."): w.to(torch.bfloat16) for name, w in own.items() if name != "lm_head.weight"}
    rows = []
    for prompt, response in zip(data["prompts"].rows(), data["responses"].rows(), strict=True):
        ids = torch.cat([prompt, response]).long().unsqueeze(0)
        hidden = functional_call(model.model, rounded, (ids,)).last_hidden_state
        assert hidden.dtype == torch.bfloat16
        logits = hidden[0, len(prompt) - 1 : -1].float() @ head.t()
        rows.append(token_log_probs(logits, response.long(), TEMPERATURE))
    (found := torch.cat(rows)).sum().backward()
    return found.detach().numpy(), {name: w.grad.numpy() for name, w in own.items()}


def stepped(rank: int, path: str, micro_batch_size: int, factors: bool = False) -> tuple[Any, ...]:
    """The same by a step of an engine, of whose ranks each has its share of the rows; and what is sent after it."""
    rows = 8 // torch.distributed.get_world_size()
    data = random_batch(num_groups=4, n=2).slice(rank * rows, (rank + 1) * rows)
    data["advantages"].values.fill_(1.0)
    engine = with_sgd(path, 1.0, TEMPERATURE, lora=lora(targets=("q_proj",)) if factors else None, **APART)
    numbers, before = log_probs(engine, data, micro_batch_size), weights(engine)
    metrics, after = step(engine, data, micro_batch_size, SUM), weights(engine)
    assert "logits" not in engine.forward.report, "the chunked output layer is in use"
    sent = {name: tensor.clone() for name, tensor in engine.full_parameters("bfloat16")}
    (name,) = [name for name, tensor in sent.items() if tensor.dtype == torch.float32]
    assert name == ("lm_head.weight" if "lm_head.weight" in sent else "model.embed_tokens.weight")
    np.testing.assert_array_equal(sent[name].numpy(), after[name], "it is sent as it is held")
    np.testing.assert_array_equal(before[name], model_weight(path, name), "it is not rounded")
    assert np.array_equal(before[name], after[name]) == factors, "its optimizer step"
    gradients = {name: after[name] - weight for name, weight in before.items()}
    return numbers, gradients, metrics["actor/grad_norm"]


def model_weight(path: str, name: str) -> np.ndarray:
    return causal_lm(path).get_parameter(name).detach().numpy()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("factors", [False, True])
def test_log_probs_and_gradients_equal_the_dense_computation(random_models: Any, name: str, factors: bool) -> None:
    """Whatever the micro-batches and ranks, also of the embedding's share; and beside factors on a bf16 base."""
    path, norms = random_models[name], []
    numbers, gradients = dense(path, random_batch(num_groups=4, n=2))
    for ranks, micro_batch_size in ((1, 8), (1, 3), (2, 2)):
        results = run_ranks(ranks, stepped, path, micro_batch_size, factors)
        mine = np.concatenate([found for found, _, _ in results])
        assert np.abs(mine - numbers).mean() < ROUNDING
        for _, found, norm in results:
            assert found.keys() == gradients.keys() or factors
            for weight, gradient in found.items() if not factors else ():
                off = np.linalg.norm(gradient - gradients[weight]) / np.linalg.norm(gradients[weight])
                assert off < SHARE, weight
            norms.append(norm)
    assert factors or norms == pytest.approx([norms[0]] * len(norms), rel=SHARE)


def frozen(rank: int, path: str) -> None:
    """A reference, which no rank shards, and its output layer for the exact KL; and the logits without the layer."""
    engine = built(path, temperature=TEMPERATURE, model_dtype="bf16", **APART)
    ids, head = torch.arange(3, 15).unsqueeze(0), engine.output_layer("cpu")
    with torch.no_grad():
        logits, hidden = engine.model(input_ids=ids).logits, engine.model.model(input_ids=ids).last_hidden_state
    assert {weight.dtype for weight in engine.model.parameters()} == {torch.bfloat16, torch.float32}
    assert (hidden.dtype, head.weight.dtype) == (torch.bfloat16, torch.float32)
    np.testing.assert_array_equal(head.weight.numpy(), model_weight(path, "lm_head.weight"))
    assert torch.equal(logits, hidden.float() @ head.weight.t())


@pytest.mark.parametrize("name", first(["tied", "untied"], "tied"))
def test_a_reference_holds_it_too(random_models: dict[str, str], name: str) -> None:
    run_ranks(1, frozen, random_models[name])


def capped(rank: int, path: str) -> None:
    engine = trainable_engine(path, dtype="bf16", head_dtype="fp32")
    step(engine, random_batch(num_groups=2, n=2), 2)
    layer = engine.model.get_output_embeddings()
    assert layer.weight.dtype == torch.float32
    assert not isinstance(layer, lm_head.ResponseHead)
    says(engine.forward.report, "whole micro-batches")


def test_a_model_that_changes_its_logits(tmp_path: Path) -> None:
    """Its own output layer takes hidden states in bf16, and gives logits in float32."""
    run_ranks(1, capped, random_model("Granite", tmp_path, logits_scaling=2.0, tie_word_embeddings=False))


def distributed(rank: int, path: str) -> None:
    model_loading._why_whole = lambda model, shards: "the test says so"  # type: ignore[assignment]
    engine = trainable_engine(path, dtype="bf16", head_dtype="fp32", lora=lora(targets=("q_proj",)))
    np.testing.assert_array_equal(weights(engine)["lm_head.weight"], model_weight(path, "lm_head.weight"))


@pytest.mark.deep
def test_loaded_by_one_rank_and_given_out_it_is_not_rounded(random_models: dict[str, str]) -> None:
    run_ranks(2, distributed, random_models["untied"])


APARTNESS = [({}, True), ({"compute_dtype": "fp32", "model_dtype": "bf16"}, True)]
APARTNESS += [({"compute_dtype": "fp32"}, False), ({"head_dtype": None}, False)]


@pytest.mark.parametrize(("changes", "apart"), APARTNESS)
def test_it_is_apart_only_from_layers_of_another_type(changes: dict[str, Any], apart: bool) -> None:
    assert model_settings(**(APART | changes)).head_apart == apart


def test_an_embedding_that_scales_its_rows_is_refused(tmp_path: Path) -> None:
    path = random_model("Gemma", tmp_path, head_dim=8)
    with refuses(ConfigError, "actor_rollout_ref.model.head_dtype=fp32", "GemmaTextScaledWordEmbedding", "null"):
        build_model(model_settings(path, **APART), "cpu", 1)
