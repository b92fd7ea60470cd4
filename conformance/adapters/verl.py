"""verl, by the functions of `verl.trainer.ppo` that its trainer calls."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    compute_rollout_correction_and_rejection_mask,
)
from verl.workers.config import ActorConfig, PolicyLossConfig

from conformance.adapters import NotOffered
from conformance.adapters.tensors import column, columns, rows
from conformance.form import Case

LOSS_KEYS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "dro_beta")


def version() -> str:
    """Of the package."""
    return f"verl {metadata.version('verl')}"


def advantage(name: str, case: Case) -> dict[str, Any]:
    """The registered estimator, with the arguments that `compute_advantage` of its trainer gives."""
    if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
        raise NotOffered(f"no estimator {name}")
    estimator = core_algos.get_adv_estimator_fn(name)
    given, settings = columns(case.inputs), dict(case.settings)
    given.pop("step_mask", None)
    if "index" in given:
        given["index"] = np.array(given["index"])
    if name == "optimal_token_baseline":  # p is 0 here, so that 1 + sum p^2 is the norm
        norms = given.pop("gradient_norms")
        given |= {"old_log_probs": torch.full_like(norms, -torch.inf), "sum_pi_squared": norms - 1}
        found = estimator(**given)
    elif name == "gae":
        found = estimator(**given, **settings)
    elif name == "gdpo":
        found = estimator(**gdpo_arguments(given, settings))
    elif name == "gpg":
        found = estimator(**given, **settings)
    else:
        by_std = {key: settings[key] for key in ("norm_adv_by_std_in_grpo",) if key in settings and name == "grpo"}
        found = estimator(**given, **by_std, config=AlgoConfig(**settings))
    return dict(zip(("advantages", "returns"), map(rows, found), strict=True))


def gdpo_arguments(given: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Components as the reward loop hands them over; the score lies on a response's last attended token."""
    components = given.pop("reward_components")
    if any(torch.isnan(scores).any() for scores in components.values()):
        raise NotOffered("no missing scores")
    response = torch.ones_like(given["response_mask"], dtype=torch.long)
    batch = {"prompts": torch.zeros(len(response), 1), "attention_mask": torch.cat([response[:, :1], response], 1)}
    named = {key: scores.numpy() for key, scores in components.items()}
    config = AlgoConfig(gdpo_reward_keys=list(components), gdpo_reward_weights=settings["gdpo_reward_weights"])
    return {**given, "config": config, "non_tensor_batch": named, "batch": batch}


def policy_loss(name: str, case: Case) -> dict[str, Any]:
    """The registered loss, with the actor's config."""
    if name not in core_algos.POLICY_LOSS_REGISTRY:
        raise NotOffered(f"no policy loss {name}")
    settings = dict(case.settings)
    own = {key: settings.pop(key) for key in LOSS_KEYS if key in settings}
    mode = settings.pop("loss_agg_mode")
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=name, **own),
        loss_agg_mode=mode,
        **settings,
    )
    given = columns(case.inputs)
    log_probs = given["log_probs"].requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=given["old_log_probs"],
        log_prob=log_probs,
        advantages=given["advantages"],
        response_mask=given["response_mask"],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=given.get("rollout_is_weights"),
    )
    loss.backward()
    found = {"loss": float(loss.detach()), "gradient": rows(log_probs.grad)}
    if "actor/pg_clipfrac" in metrics:
        found["clip_fraction"] = metrics["actor/pg_clipfrac"]
    return found


def kl(name: str, case: Case) -> dict[str, Any]:
    """`kl_penalty`, token by token, and the gradient of its sum over the trained tokens."""
    given = columns(case.inputs)
    if name == "full":
        raise NotOffered("kl_penalty raises NotImplementedError for full")
    if name == "unbiased_k3":
        raise NotOffered("no importance weight on the KL")
    policy = given["log_probs"].requires_grad_()
    found = core_algos.kl_penalty(policy, given["ref_log_probs"], name)
    (found * given["response_mask"]).sum().backward()
    return {"kl": rows(found), "gradient": rows(policy.grad)}


def aggregation(name: str, case: Case) -> dict[str, Any]:
    """`agg_loss`, of micro-batches with the counts of the whole mini-batch."""
    if name == "prompt-mean":
        raise NotOffered("no mean over prompts")
    losses, mask = column(case.inputs["losses"]), column(case.inputs["response_mask"])
    counts: dict[str, Any] = {"loss_scale_factor": case.settings.get("loss_scale_factor")}
    parts = case.settings.get("micro_batches")
    if parts is None:
        return {"loss": float(core_algos.agg_loss(losses, mask, name, **counts))}
    counts |= whole_batch(mask)
    return {"loss": float(sum(core_algos.agg_loss(losses[part], mask[part], name, **counts) for part in parts))}


def whole_batch(mask: Tensor) -> dict[str, Any]:
    """The counts that verl's engines give to each micro-batch: tokens, and all sequences of the mini-batch."""
    return {"batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}


def correction(name: str, case: Case) -> dict[str, Any]:
    """`compute_rollout_correction_and_rejection_mask`."""
    if name.endswith("_mask"):
        raise NotOffered(f"no {name}")
    missing = set(case.settings.get("rollout_rs", "token_k1").split(",")) - SUPPORTED_ROLLOUT_RS_OPTIONS
    if missing:
        raise NotOffered(f"no rejection {', '.join(missing)}")
    given = columns(case.inputs)
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=given["old_log_probs"],
        rollout_log_prob=given["rollout_log_probs"],
        response_mask=given["response_mask"],
        **case.settings,
    )
    return {"kept": rows(kept)} | ({} if weights is None else {"weights": rows(weights.batch["rollout_is_weights"])})
