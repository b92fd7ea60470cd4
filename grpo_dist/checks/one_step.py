"""One gradient step on a group of episodes by the run's estimator and loss: does it make the better ones likelier?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_dist.algorithms.advantage import ADVANTAGE, compute_advantage
from grpo_dist.algorithms.policy_loss import compute_policy_loss
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError
from grpo_dist.plan.plan import Plan

STEP = 0.05  # length of the step, in the space of all parameters
_OF_TOKENS = ("values", "entropies", "gradient_norms")
_NOT_HERE = ("reward_components", "agent_baselines", "turn_states")  # what estimators compare beside rewards


class Scored(NamedTuple):
    """An episode: prompt, response, 1 on the tokens that train, and the reward."""

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[int]
    reward: float


def step_changes(plan: Plan[RunConfig], model: Any, group: Sequence[Scored]) -> list[float]:
    """Return by how much a gradient step changes the mean log-prob of each episode's trained tokens, in nats.

    Raises:
        ConfigError: the estimator compares what is not here.
    """
    targets = plan.targets
    if lacking := [name for name in _NOT_HERE if name in targets.needs]:
        raise ConfigError(f"{ADVANTAGE.key}={targets.adv_estimator} compares {', '.join(lacking)}")
    longest = max(len(each.response) for each in group)
    mask = torch.tensor([[*each.mask, *[0] * (longest - len(each.mask))] for each in group]).float()
    places = torch.arange(longest)
    ends = (places == (mask * places).argmax(1)[:, None]).float()
    given: dict[str, Any] = {name: torch.zeros_like(mask) for name in _OF_TOKENS if name in targets.needs}
    if targets.has_values:
        given["values"] = torch.zeros_like(mask)
    if "reward_baselines" in targets.needs:
        given["reward_baselines"] = torch.zeros(len(group))
    if "step_mask" in targets.needs:
        given["step_mask"] = ends
    given |= {"token_level_rewards": ends * torch.tensor([[each.reward] for each in group]), "response_mask": mask}
    index = [0] * len(group)
    advantages, _ = compute_advantage(targets.adv_estimator, index=index, config=targets.options, **given)
    before = _log_probs(model, group, longest)
    columns = {"log_probs": before, "old_log_probs": before.detach(), "advantages": advantages, "response_mask": mask}
    columns |= {"prompt_weights": mask / mask.sum(), "rollout_is_weights": torch.ones_like(mask)}
    counts: dict[str, Any] = {"global_tokens": mask.sum(), "global_sequences": len(group), "global_prompts": 1.0}
    loss, _ = compute_policy_loss(columns, plan.objective, **counts)
    parameters = list(model.parameters())
    slopes = [0.0 if each is None else each for each in torch.autograd.grad(loss, parameters, allow_unused=True)]
    length = float(sum(torch.as_tensor(each).square().sum() for each in slopes)) ** 0.5
    with torch.no_grad():
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter -= slope * (STEP / length if length else 0.0)
        changes = ((_log_probs(model, group, longest) - before) * mask).sum(1) / mask.sum(1).clamp_min(1)
    return [float(change) for change in changes]


def _log_probs(model: Any, group: Sequence[Scored], longest: int) -> Tensor:
    """(N, T): of the responses' tokens, 0 behind them."""
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine others would wait for each other at every small operation
    for prompt, response, *_ in group:
        logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        rows.append(torch.nn.functional.pad(chosen, (0, longest - len(chosen))))
    torch.set_num_threads(threads)
    return torch.stack(rows)
