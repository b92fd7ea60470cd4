"""Which gradient the ways of distillation have in expectation, and their losses on an engine in any layout."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_dist.algorithms import kl_penalty, policy_objective
from grpo_dist.algorithms.settings import TOP_IDS, TOP_LOG_PROBS, TargetSettings
from grpo_dist.algorithms.targets import compute_targets
from grpo_dist.engines.settings import PassLimits
from grpo_dist.protocol import DataProto, Metric, Ragged, merge_metrics, metric_values
from grpo_dist.protocol.sequences import TEACHER_MASK, TEACHER_PROMPTS, as_teacher_reads
from tests.engines.train.plain import causal_lm, response_logits
from tests.models import random_batch, trainable_engine
from tests.ranks import run_ranks
from tests.worker_settings import objective_settings

# A policy writes two tokens of three: each of the nine responses is there, weighed with its probability, without noise.
V = 3
RESPONSES = torch.tensor(list(product(range(V), repeat=2)))
N = len(RESPONSES)


def logits(seed: int) -> Tensor:
    """(1 + V, V): of the first token, and of the second one behind each first one."""
    return torch.randn(1 + V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(table: Tensor) -> Tensor:
    """(N, 2, V) log-softmax at each token of each response."""
    log_softmax = torch.log_softmax(table, -1)
    return torch.stack([log_softmax[0].expand(N, V), log_softmax[1 + RESPONSES[:, 0]]], 1)


def of_tokens(table: Tensor) -> Tensor:
    """(N, 2) log-probs of the responses' tokens."""
    return rows(table).gather(2, RESPONSES.unsqueeze(2)).squeeze(2)


def between_responses(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(policy || teacher) of whole responses."""
    log_p, log_q = of_tokens(policy).sum(1), of_tokens(teacher).sum(1)
    return (log_p.exp() * (log_p - log_q)).sum()


def at_sampled_states(policy: Tensor, teacher: Tensor, *, reverse: bool = True) -> Tensor:
    """The KL of each next token, over the states that the policy samples, which stand still."""
    states = of_tokens(policy).sum(1).exp().detach().unsqueeze(1)
    p, q = (rows(table) for table in ((policy, teacher) if reverse else (teacher, policy)))
    return (states * (p.exp() * (p - q)).sum(2)).sum()


def objective(policy: Tensor, teacher: Tensor, *, kl_loss_type: str | None, advantages: Tensor) -> Tensor:
    """The loss that the trainer takes, each response as often as the policy writes it."""
    log_probs, mask = of_tokens(policy), torch.ones(N, 2)
    weights = log_probs.sum(1).exp().detach()
    columns = {"log_probs": log_probs, "old_log_probs": log_probs.detach(), "advantages": advantages}
    columns |= {"response_mask": mask, "ref_log_probs": of_tokens(teacher)}
    columns |= {"exact_kl": kl_penalty("full", rows(policy), rows(teacher)).double()}
    keys = {"use_kl_loss": kl_loss_type is not None, "kl_loss_type": kl_loss_type or "", "kl_loss_coef": 1.0}
    settings = objective_settings(loss_agg_mode="token-sum", **keys)
    rows_of = [{name: values[i : i + 1] for name, values in columns.items()} for i in range(N)]
    losses = [policy_objective(row, settings, global_tokens=1, global_sequences=1)[0] for row in rows_of]
    return (weights * torch.stack(losses)).sum()


def advantages(policy: Tensor, teacher: Tensor, *, gamma: float, kl_in_reward: bool) -> Tensor:
    columns = dict.fromkeys(("rollout_log_probs", "old_log_probs"), of_tokens(policy).detach())
    columns |= dict.fromkeys(("token_level_scores", "response_mask"), torch.ones(N, 2))  # scores do not count
    columns["ref_log_probs"] = of_tokens(teacher)
    settings = TargetSettings("distill", {"gamma": gamma}, kl_penalty="k1" if kl_in_reward else None)
    made, _ = compute_targets(columns, settings, index=list(range(N)), truncated=torch.zeros(N), kl_coef=1.0)
    return made["advantages"].double()


def gradient(value: Tensor, policy: Tensor) -> Tensor:
    return torch.autograd.grad(value, policy)[0]


@pytest.mark.parametrize("kl_loss_type", ["full", "k2", "k1+", None])
def test_at_sampled_states_the_loss_and_the_advantage_have_the_kls_gradient(kl_loss_type: str | None) -> None:
    """In the loss by `full` and by sampled tokens (k2 and what has its gradient), in the reward with gamma 0."""
    policy, teacher = logits(0).requires_grad_(), logits(1)
    wanted = gradient(at_sampled_states(policy, teacher), policy)
    made = advantages(policy, teacher, gamma=0.0, kl_in_reward=kl_loss_type is None)
    found = gradient(objective(policy, teacher, kl_loss_type=kl_loss_type, advantages=made), policy)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert wanted.abs().max() > 0.1


def test_with_gamma_one_it_is_the_gradient_of_the_kl_between_responses() -> None:
    policy, teacher = logits(0).requires_grad_(), logits(1)
    wanted = gradient(between_responses(policy, teacher), policy)
    made = advantages(policy, teacher, gamma=1.0, kl_in_reward=True)
    found = gradient(objective(policy, teacher, kl_loss_type=None, advantages=made), policy)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - gradient(at_sampled_states(policy, teacher), policy)).abs().max() > 0.01, "another one"


def test_other_estimators_have_other_gradients() -> None:
    """k1 as a loss has none, and k3 that of the forward KL."""
    policy, teacher = logits(0).requires_grad_(), logits(1)
    nothing = torch.zeros(N, 2)
    losses = [objective(policy, teacher, kl_loss_type=name, advantages=nothing) for name in ("k1", "k3")]
    k1, k3 = (gradient(loss, policy) for loss in losses)
    torch.testing.assert_close(k1, torch.zeros_like(k1), rtol=0, atol=1e-6)
    forward = gradient(at_sampled_states(policy, teacher, reverse=False), policy)
    torch.testing.assert_close(k3, forward, rtol=1e-4, atol=1e-5)
    assert (forward - gradient(at_sampled_states(policy, teacher), policy)).abs().max() > 0.1


# --- a policy that teaches itself --------------------------------------------------------------------------------
TEMPERATURE = 0.7
KEYS = {"loss_agg_mode": "token-mean", "use_kl_loss": True, "kl_loss_coef": 1.0, "on_policy": True}


def shown_batch() -> DataProto:
    """Twelve responses to three prompts, of which two in three have a prompt of a teacher; advantages are 0."""
    data = random_batch(num_groups=3, n=4).select(["uid", "prompts", "responses", "response_mask"])
    generator = torch.Generator().manual_seed(5)
    shown = [torch.randint(3, 96, (5 + i if i % 3 else 0,), generator=generator) for i in range(len(data))]
    lengths = data["responses"].lengths.tolist()
    mask = [[float(i % 3 > 0)] * length for i, length in enumerate(lengths)]
    columns = {TEACHER_PROMPTS: Ragged.from_rows(shown, torch.int32)}
    columns[TEACHER_MASK] = Ragged.from_rows(mask, torch.float32)
    columns["advantages"] = Ragged.from_rows([[0.0] * length for length in lengths], torch.float32)
    return data.union(DataProto.from_dict(columns))


CASES = (("padded", 12), ("padded", 1), ("packed", 5), ("shared", 12), ("shared", 3))  # layout, sequences of a pass


def taught(
    rank: int, path: str, data: DataProto, kl_loss_type: str, kind: str, cases: tuple[tuple[str, int], ...] = CASES
) -> list[dict[str, Metric]]:
    """The metrics of an optimizer step in each case, of one of two ranks, which has its own rows."""
    data, found = data.index([2, 5, 6] if rank else [0, 1, 3, 4, 7, 8, 9, 10, 11]), []
    for layout, size in cases:
        engine, rows = trainable_engine(path, lr=1e-3, temperature=TEMPERATURE, layout=layout), data
        if kind == "teaches_itself":
            engine.reference_head = engine.output_layer("cpu")
            column = "hidden_states" if kl_loss_type == "full" else "log_probs"
            seen = engine.compute_columns(as_teacher_reads(data), (column,), PassLimits("", size))[column]
            rows = data.union(DataProto.from_dict({f"ref_{column}": seen}))
        settings = objective_settings(**KEYS, kl_loss_type=kl_loss_type, **{kind: True})
        found.append(engine.train_mini_batch(rows, settings, PassLimits("", size)).metrics)
    return found


def by_case(path: str, data: DataProto, name: str, kind: str, loss: Tensor, model: Any) -> Iterator[dict[str, float]]:
    """What two ranks measure in each case, whose loss and norm of its gradient are the plain ones."""
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    of_ranks = run_ranks(2, taught, path, data, name, kind)
    for case, parts in zip(CASES, zip(*of_ranks, strict=True), strict=True):
        metrics = metric_values(merge_metrics(parts))
        assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-4), case
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3), case
        yield metrics


@pytest.mark.deep
@pytest.mark.parametrize("name", ["full", "k2"])
def test_what_a_policy_teaches_itself_is_the_plain_formulas_in_any_layout_and_on_two_ranks(
    random_models: dict[str, str], name: str
) -> None:
    """The KL to what the model says behind the teacher's prompt, summed over its tokens, over the count of all."""
    path, data = random_models["tied"], shown_batch()
    model, responses, shown = causal_lm(path), data["responses"].values.long()[:, None], data[TEACHER_MASK].values
    z = torch.cat(response_logits(model, data)) / TEMPERATURE
    q = torch.cat(response_logits(model, as_teacher_reads(data))).detach() / TEMPERATURE
    if name != "full":
        z, q = (torch.log_softmax(x, -1).gather(1, responses)[:, 0] for x in (z, q))
    loss = (kl_penalty(name, z, q) * shown).mean()
    assert loss > 0.1
    for metrics in by_case(path, data, name, "teaches_itself", loss, model):
        assert metrics["actor/self_distilled_fraction"] == pytest.approx(shown.mean().item())


def test_where_nothing_was_shown_nothing_is_learned(random_models: dict[str, str]) -> None:
    data = shown_batch()
    mask, (_, rest) = data[TEACHER_MASK], data.pop((TEACHER_PROMPTS, TEACHER_MASK))
    none = {TEACHER_PROMPTS: Ragged.from_rows([[]] * len(data), torch.int32)}
    none[TEACHER_MASK] = Ragged(torch.zeros_like(mask.values), mask.offsets)
    rest = rest.union(DataProto.from_dict(none))
    for (found,) in run_ranks(2, taught, random_models["tied"], rest, "full", "teaches_itself", CASES[:1]):
        metrics = metric_values(found)
        assert metrics["actor/loss"] == metrics["actor/grad_norm"] == metrics["actor/self_distilled_fraction"] == 0


# --- a teacher that tells of its likeliest tokens ----------------------------------------------------------------
def told_batch() -> DataProto:
    """Twelve responses, four tokens at each place with their log-probs by a made-up teacher."""
    data = random_batch(num_groups=3, n=4).select(["uid", "prompts", "responses", "response_mask"])
    offsets, generator = data["responses"].offsets, torch.Generator().manual_seed(6)
    told = torch.log_softmax(2 * torch.randn(int(offsets[-1]), 96, generator=generator), -1).topk(4)
    columns = {TOP_IDS: Ragged(told.indices.int(), offsets), TOP_LOG_PROBS: Ragged(told.values, offsets)}
    columns["advantages"] = Ragged(torch.zeros(int(offsets[-1])), offsets)
    return data.union(DataProto.from_dict(columns))


def test_the_loss_over_a_teachers_tokens_is_the_plain_formulas_in_any_layout_and_on_two_ranks(
    random_models: dict[str, str],
) -> None:
    path, data = random_models["tied"], told_batch()
    model, ids, told = causal_lm(path), data[TOP_IDS].values.long(), data[TOP_LOG_PROBS].values
    z = torch.cat(response_logits(model, data)) / TEMPERATURE
    loss = kl_penalty("full", z.gather(1, ids), told / TEMPERATURE).mean()
    mass = torch.softmax(z, -1).gather(1, ids).sum(1).mean().item()
    for metrics in by_case(path, data, "full", "by_top_tokens", loss, model):
        assert metrics["actor/policy_top_mass"] == pytest.approx(mass, rel=1e-4)
        assert metrics["actor/teacher_top_mass"] == pytest.approx(told.exp().sum(-1).mean().item(), rel=1e-5)
