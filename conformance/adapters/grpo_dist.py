"""grpo_dist, by the functions that its trainer calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.adapters.tensors import column, columns, rows
from conformance.form import Case
from grpo_dist import __version__
from grpo_dist.algorithms import agg_loss, compute_advantage, compute_policy_loss, compute_rollout_correction
from grpo_dist.algorithms.correction import off_policy_mask, second_moment_mask
from grpo_dist.algorithms.kl import kl_penalty
from grpo_dist.algorithms.settings import ObjectiveSettings


def version() -> str:
    """Of the package."""
    return f"grpo_dist {__version__}"


def advantage(name: str, case: Case) -> dict[str, Any]:
    """`compute_advantage`, whose arguments are the columns."""
    known = {int(role): value for role, value in case.settings.get("agent_baselines", {}).items()}
    found = compute_advantage(name, **columns(case.inputs), config=case.settings | {"agent_baselines": known})
    return dict(zip(("advantages", "returns"), map(rows, found), strict=True))


def policy_loss(name: str, case: Case) -> dict[str, Any]:
    """`compute_policy_loss`; the settings of a run are an object with verl's names."""
    given = columns(case.inputs)
    log_probs = given["log_probs"].requires_grad_()
    none = {"clip_ratio": 0.2, "loss_scale_factor": None}
    actor = SimpleNamespace(policy_loss=SimpleNamespace(loss_mode=name), **(none | case.settings))
    loss, metrics = compute_policy_loss(given, ObjectiveSettings(actor))
    loss.backward()
    found = {"loss": float(loss.detach()), "gradient": rows(log_probs.grad)}
    if "actor/pg_clipfrac" in metrics:
        found["clip_fraction"] = float(metrics["actor/pg_clipfrac"])
    return found


def kl(name: str, case: Case) -> dict[str, Any]:
    """`kl_penalty`, token by token, and the gradient of its sum over the trained tokens."""
    given = columns(case.inputs)
    own, reference = ("logits", "ref_logits") if name == "full" else ("log_probs", "ref_log_probs")
    policy = given[own].requires_grad_()
    found = kl_penalty(name, policy, given[reference], old_log_probs=given.get("old_log_probs"))
    (found * given.get("response_mask", 1.0)).sum().backward()
    return {"kl": rows(found), "gradient": rows(policy.grad)}


def aggregation(name: str, case: Case) -> dict[str, Any]:
    """`agg_loss`, of micro-batches with the counts of the whole mini-batch."""
    losses, mask = column(case.inputs["losses"]), column(case.inputs["response_mask"])
    counts: dict[str, Any] = {"global_tokens": mask.sum(), "global_sequences": (mask.sum(-1) > 0).sum()}
    counts["loss_scale_factor"] = case.settings.get("loss_scale_factor")
    weights = None
    if "index" in case.inputs:
        weights = prompt_weights(mask, case.inputs["index"])
        counts["global_prompts"] = weights.sum()
    parts = case.settings.get("micro_batches", [list(range(len(mask)))])
    found = [
        agg_loss(losses[p], mask[p], name, prompt_weights=None if weights is None else weights[p], **counts)
        for p in parts
    ]
    return {"loss": float(sum(found))}


def prompt_weights(mask: Tensor, index: list[str]) -> Tensor:
    """1 / number of tokens of a prompt's responses, on each of them: a column that the trainer makes of a batch."""
    totals = [sum(float(mask[j].sum()) for j, other in enumerate(index) if other == label) for label in index]
    return mask / torch.tensor(totals)[:, None].clamp_min(1)


def correction(name: str, case: Case) -> dict[str, Any]:
    """`compute_rollout_correction`, or one of the two masks that depend on the advantage."""
    given = columns(case.inputs)
    if name == "second_moment_mask":
        return {"weights": rows(second_moment_mask(**given, **case.settings))}
    if name == "off_policy_mask":
        return {"weights": rows(off_policy_mask(**given, **case.settings))}
    weights, kept, _ = compute_rollout_correction(**given, **case.settings)
    return {"kept": rows(kept)} | ({} if weights is None else {"weights": rows(weights)})
