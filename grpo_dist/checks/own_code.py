"""Imports the functions and classes that a config names, and tries those that are code of its own, before a run starts.

Estimators, losses, KL terms and samplers are called as a run calls them, with made-up numbers of the shapes and types
of a run, so that what would end the run at its first update ends it here. What a run may do without, such as a response
of which no token trains or a group that lacks a response, is not made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from grpo_dist.agents import load_agent_loop
from grpo_dist.agents.base import KEY as AGENT_KEY
from grpo_dist.algorithms.advantage import ADVANTAGE, compute_advantage
from grpo_dist.algorithms.correction import read_rejections, read_weight_bounds
from grpo_dist.algorithms.kl import KL, kl_penalty
from grpo_dist.algorithms.policy_loss import POLICY_LOSS, compute_policy_loss
from grpo_dist.config.keys import shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.sampler import CustomSampler, PromptSampler, load_sampler_class
from grpo_dist.engines.base import rollout_backend
from grpo_dist.errors import BatchError, ConfigError, RewardError
from grpo_dist.plan.plan import make_plan
from grpo_dist.rewards import load_reward_function
from grpo_dist.rewards.contract import RowNeeds
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.rewards.weighted import chosen_components
from grpo_dist.sandbox.base import given

GROUPS, LENGTH = 2, 4  # of the made-up batch: prompts, and most tokens of a response
_KL_IN_REWARD = "algorithm.kl_penalty"
# What an estimator may need of each token, and in all, besides the rewards.
_OF_TOKENS = ("entropies", "gradient_norms", "turn_states")
_OPTIONAL = ("values", *_OF_TOKENS, "step_mask", "reward_baselines")


def resolve_names(config: RunConfig) -> None:
    """Import all code that the config names but the reward function, and parse the bounds of `rollout_correction`.

    Raises:
        ConfigError: a function or class does not exist or has the wrong kind, or a bound cannot be parsed.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    correction, agent = config.algorithm.rollout_correction, rollout.agent
    ADVANTAGE.get(config.algorithm.adv_estimator)
    KL.get(config.algorithm.kl_penalty, _KL_IN_REWARD)
    read_weight_bounds(correction.rollout_is_threshold)
    read_rejections(correction.rollout_rs, correction.rollout_rs_threshold)
    KL.get(actor.kl_loss_type.removesuffix("+"))
    POLICY_LOSS.get(actor.policy_loss.loss_mode)
    load_agent_loop(agent.default_agent_loop, agent.agent_kwargs).resolved(agent.agent_kwargs)
    rollout_backend(rollout.name).load()
    if config.data.sampler.code is not None:
        load_sampler_class(*config.data.sampler.code)


def import_reward(config: RunConfig) -> RowNeeds:
    """Import the reward function, a custom one in a process of its own as in a run; returns what it reads of a row.

    Raises:
        ConfigError: it does not exist, cannot be imported, hangs, exits its process, or lacks the components that gdpo
            needs; or it is named and not asked, since the agent loop gives the reward.
    """
    algorithm, agent = config.algorithm, config.actor_rollout_ref.rollout.agent
    named = config.custom_reward_function.path
    loop = load_agent_loop(agent.default_agent_loop, agent.agent_kwargs)
    if loop.rewards(agent.agent_kwargs) and not agent.reward_function_weight:
        if named is not None:
            weight = "actor_rollout_ref.rollout.agent.reward_function_weight"
            raise ConfigError(
                f"custom_reward_function.path={shown(named)}: not asked, since {AGENT_KEY}={agent.default_agent_loop} "
                f"gives the reward; set {weight} to how much of the function's score is added, or leave it out"
            )
        return RowNeeds(ground_truth=False, asked=False)
    if named is None:
        return load_reward_function(*config.reward_code).needs
    with started_scorer(config) as scorer:
        pass
    label = config.reward_model.retrain.label
    if config.reward_model.is_retrained and scorer.components and label not in scorer.components:
        raise ConfigError(
            f"reward_model.retrain.label={label}: the reward function's values are {', '.join(scorer.components)}; "
            "name the one that says which responses are good"
        )
    if "reward_components" in ADVANTAGE.needs(algorithm.adv_estimator):
        chosen = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
        chosen_components(*chosen, declared=scorer.components, overlong_penalty=config.reward.overlong_buffer.enable)
    return scorer.needs


@contextmanager
def started_scorer(config: RunConfig) -> Iterator[Scorer]:
    """Start the reward function of a config in a process of its own, which ends with the block.

    Raises:
        ConfigError: it cannot be imported, hangs, or exits its process.
    """
    scorer = Scorer(*config.reward_code, timeout_s=config.reward.timeout_s)
    with given(config.sandbox.model_dump()):
        try:
            try:
                scorer.start()
            except RewardError as error:
                named = shown(config.custom_reward_function.path)
                raise ConfigError(f"custom_reward_function.path={named}: {error}") from error
            yield scorer
        finally:
            scorer.stop()


def own_functions(config: RunConfig) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (`key=name`, a call that tries it) for each function of the config's own that the run calls.

    The call raises a ConfigError where the run would fail.
    """
    batch, plan = _made_up(config), make_plan(config)
    targets, objective = plan.targets, plan.objective
    actor, mask, needs = objective.actor, batch["response_mask"], targets.needs
    batch["values"] *= targets.has_values  # without a critic they are 0
    kl, kl_loss = targets.kl_penalty or "", actor.kl_loss_type if actor.use_kl_loss else ""

    def estimate() -> None:
        given = {name: batch[name] for name in _OPTIONAL if name in needs or (name == "values" and targets.has_values)}
        given |= {"token_level_rewards": batch["scores"][:, None] * batch["step_mask"], "response_mask": mask}
        index = [row // config.actor_rollout_ref.rollout.n for row in range(len(mask))]
        try:
            compute_advantage(targets.adv_estimator, index=index, reward_components={}, config=targets.options, **given)
        except BatchError as error:  # it asks for what it has not declared
            raise ConfigError(f"{ADVANTAGE.key}={targets.adv_estimator}: {error}") from error

    def loss() -> None:
        columns = batch | ({"old_log_probs": batch["log_probs"].detach()} if objective.on_policy else {})
        if objective.weighted or objective.correction is not None or objective.off_policy_threshold is not None:
            columns["rollout_is_weights"] = torch.ones_like(mask)
        compute_policy_loss(columns, objective, global_tokens=mask.sum(), global_sequences=len(mask))

    reference = batch["ref_log_probs"]
    named: tuple[tuple[str, str, Callable[[], object]], ...] = (
        (ADVANTAGE.key, targets.adv_estimator, estimate),
        (_KL_IN_REWARD, kl, lambda: kl_penalty(kl, batch["old_log_probs"], reference, key=_KL_IN_REWARD)),
        (KL.key, kl_loss, lambda: kl_penalty(kl_loss, batch["log_probs"], reference)),
        (POLICY_LOSS.key, actor.policy_loss.loss_mode, loss),
    )
    for key, name, call in named:
        # names of reward components are those of the rows' reward functions, which are not called here
        if ":" in name and not (key == ADVANTAGE.key and "reward_components" in needs):
            yield f"{key}={name}", call


def _made_up(config: RunConfig) -> dict[str, Tensor]:
    """Return responses of 1 to `LENGTH` tokens to `GROUPS` prompts, (N, T) or (N,) float32 as in a run.

    The scores of a group differ, but those of the last one are equal where a run trains on such groups too.
    """
    n, random = config.actor_rollout_ref.rollout.n, torch.Generator().manual_seed(0)
    rows = torch.arange(GROUPS * n)
    lengths, differ = rows % LENGTH + 1, (rows < n) | config.algorithm.filter_groups.enable
    mask = (torch.arange(LENGTH) < lengths[:, None]).float()
    drawn = ("log_probs", "old_log_probs", "ref_log_probs", "values")
    batch = {name: -torch.rand(len(rows), LENGTH, generator=random) * mask for name in drawn}
    batch["log_probs"].requires_grad_()
    batch |= {name: torch.ones_like(mask) for name in _OF_TOKENS}
    return batch | {
        "reward_baselines": torch.zeros(len(rows)),
        "response_mask": mask,
        "scores": ((rows % n + 1) % 2).float().where(differ, 1.0),
        "step_mask": torch.nn.functional.one_hot(lengths - 1, LENGTH).float(),
        "advantages": (2 * (rows % 2).float() - 1)[:, None] * mask,
    }


def try_sampler(config: RunConfig, sampler: PromptSampler | CustomSampler) -> None:
    """Have the sampler choose a batch, learn from made-up scores, and go back to where it was.

    Raises:
        DataError: it fails, or returns what it must not.
    """
    state, scores = sampler.state_dict(), np.zeros(config.actor_rollout_ref.rollout.n, np.float32)
    sampler.update({int(position): scores for position in sampler.next_batch()})
    sampler.load_state_dict(state)
