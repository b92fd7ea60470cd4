"""Imports the functions and classes that the config names, to report wrong names before anything starts."""

from __future__ import annotations

from grpo_dist.agents import load_agent_loop
from grpo_dist.agents.base import KEY as AGENT_KEY
from grpo_dist.algorithms.advantage import ADVANTAGE
from grpo_dist.algorithms.correction import KEY, read_bounds, read_rejections
from grpo_dist.algorithms.kl import KL
from grpo_dist.algorithms.policy_loss import POLICY_LOSS
from grpo_dist.config.problems import shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.data.curriculum import load_sampler_class
from grpo_dist.engines.base import ROLLOUT_ENGINES, rollout_engine
from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import load_reward_function
from grpo_dist.rewards.base import RowNeeds
from grpo_dist.rewards.components import chosen_components
from grpo_dist.rewards.scorer import Scorer

WEIGHT_KEY = "actor_rollout_ref.rollout.agent.reward_function_weight"


def resolve_names(config: RunConfig) -> None:
    """Import every function and class that the config names, except the reward function, and parse the bounds of
    `algorithm.rollout_correction`.

    Raises:
        ConfigError: a function or class does not exist or has the wrong kind, or a bound cannot be parsed.
    """
    actor, agent = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.agent
    ADVANTAGE.get(config.algorithm.adv_estimator)
    KL.get(config.algorithm.kl_penalty, "algorithm.kl_penalty")
    correction = config.algorithm.rollout_correction
    read_bounds(correction.rollout_is_threshold, key=f"{KEY}.rollout_is_threshold")
    read_rejections(correction.rollout_rs, correction.rollout_rs_threshold)
    KL.get(actor.kl_loss_type.removesuffix("+"))
    POLICY_LOSS.get(actor.policy_loss.loss_mode)
    load_agent_loop(agent.default_agent_loop, agent.agent_kwargs).resolved(agent.agent_kwargs)
    if (engine := config.actor_rollout_ref.rollout.name) not in ROLLOUT_ENGINES:
        rollout_engine(engine)
    if config.data.sampler.code is not None:
        load_sampler_class(*config.data.sampler.code)


def import_reward(config: RunConfig) -> RowNeeds:
    """Import the reward function; a custom one in a separate process, as the reward processes do.

    Returns:
        What it reads of a row.

    Raises:
        ConfigError: it does not exist, cannot be imported, hangs, exits its process, or lacks the components that gdpo
            needs; or it is named and not asked, since the agent loop gives the reward.
    """
    algorithm, named = config.algorithm, config.custom_reward_function.path
    agent = config.actor_rollout_ref.rollout.agent
    if load_agent_loop(agent.default_agent_loop, agent.agent_kwargs).gives_reward and not agent.reward_function_weight:
        if named is not None:
            raise ConfigError(
                f"custom_reward_function.path={shown(named)}: not asked, since {AGENT_KEY}={agent.default_agent_loop} "
                f"gives the reward; set {WEIGHT_KEY} to how much of the function's score is added, or leave it out"
            )
        return RowNeeds(ground_truth=False, asked=False)
    if named is None:
        return load_reward_function(*config.reward_code).needs
    scorer = Scorer(*config.reward_code, timeout_s=config.reward.timeout_s)
    try:
        scorer.start()
    except RewardError as error:
        raise ConfigError(f"custom_reward_function.path={shown(named)}: {error}") from error
    finally:
        scorer.stop()
    label = config.reward_model.retrain.label
    if config.reward_model.is_retrained and scorer.components and label not in scorer.components:
        raise ConfigError(
            f"reward_model.retrain.label={label}: the reward function's values are {', '.join(scorer.components)}; "
            "name the one that says which responses are good"
        )
    if "reward_components" in ADVANTAGE.needs(algorithm.adv_estimator):
        chosen_components(
            algorithm.gdpo_reward_keys,
            algorithm.gdpo_reward_weights,
            declared=scorer.components,
            overlong_penalty=config.reward.overlong_buffer.enable,
        )
    return scorer.needs
