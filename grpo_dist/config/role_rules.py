"""Rules of the models beside the policy: reward model, critic and teacher. See rules.py."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.assets import CRITIC_KEY, REWARD_MODEL_KEY, TEACHER_KEY
from grpo_dist.config.model_rules import max_positions
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.placement_rules import Rule
from grpo_dist.config.problems import Problem, problem_between
from grpo_dist.config.schema import RunConfig
from grpo_dist.names import ADV_ESTIMATORS, REWARD_MODEL_FUNCTION

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def reward_model_is_named(config: RunConfig) -> Iterator[Problem]:
    """A reward model is a folder or a hub name, and nothing asks for the score of one that is not enabled."""
    section, key = config.reward_model, REWARD_MODEL_KEY
    if section.enable and section.model.path is None:
        why = "name the reward model: a folder, or a model of the Hugging Face hub"
        yield problem_between(config, why, key, "reward_model.enable")
    elif section.enable and section.max_length is not None:
        positions = max_positions(model_config_at_hand(section.model.path or "") or {})
        if positions is not None and section.max_length > positions[1]:
            why = f"the reward model has {positions[1]} positions ({positions[0]} in its config.json); lower it"
            yield problem_between(config, why, "reward_model.max_length", key)
    process, process_key = section.process, "reward_model.process.enable"
    if process.enable and not section.enable:
        why = "there is no reward model that could judge steps; set the second to true, or the first to false"
        yield problem_between(config, why, process_key, "reward_model.enable")
    for name in ("step_tag", "good", "bad"):
        if getattr(process, name) is not None and not process.enable:
            why = "it is for a model that judges steps; set the second to true, or the first to null"
            yield problem_between(config, why, f"reward_model.process.{name}", process_key)
    if (process.good is None) != (process.bad is None):
        keys = ("reward_model.process.good", "reward_model.process.bad")
        yield problem_between(config, "the model chooses between two tokens; name both or none", *keys)
    if not section.enable and REWARD_MODEL_FUNCTION in config.reward_paths:
        why = f"{REWARD_MODEL_FUNCTION} returns the reward model's score; set enable to true, or leave the function out"
        yield problem_between(config, why, "reward_model.enable", "custom_reward_function.path")


def the_reward_model_is_retrained_on_labels(config: RunConfig) -> Iterator[Problem]:
    """Retraining needs a reward model, a function that says what is good, and batches that meet one model."""
    section, freq = config.reward_model, "reward_model.retrain.freq"
    if not section.retrain.enable:
        return
    if not section.enable:
        why = "there is no reward model to retrain; set the second to true, or the first to -1"
        yield problem_between(config, why, freq, "reward_model.enable")
    elif config.custom_reward_function.path is None:
        why = (
            "the reward model's own score is no label for it; set the path to grpo_dist.rewards.weighted, with the "
            "rule among its functions, or to a function of yours that returns reward_model.retrain.label"
        )
        yield problem_between(config, why, freq, "custom_reward_function.path")
    if config.trainer.max_staleness:
        why = "groups sampled ahead would be scored by different reward models; set one of the two to its default"
        yield problem_between(config, why, "trainer.max_staleness", freq)
    splits = config.algorithm.adv_estimator == "grpo_process"
    if section.process.enable and not splits:
        why = "only grpo_process splits responses into steps, whose labels are needed; set the estimator to it"
        yield problem_between(config, why, freq, "algorithm.adv_estimator")
    if section.enable and splits and not section.process.enable:
        why = (
            "labels of steps are not where the score of a whole response is read; set the last to true, or the first "
            "to -1"
        )
        yield problem_between(config, why, freq, "algorithm.adv_estimator", "reward_model.process.enable")


def the_critic_fits(config: RunConfig) -> Iterator[Problem]:
    """A critic is for estimators that read its values, and it reads the longest sequence."""
    estimator, critic = config.algorithm.adv_estimator, config.critic
    if critic.enable and estimator in ADV_ESTIMATORS and estimator != "gae":
        why = f"{estimator} reads no values; set the first to null, or the second to gae"
        yield problem_between(config, why, "critic.enable", "algorithm.adv_estimator")
    if not config.needs_critic:
        return
    positions = max_positions({**(model_config_at_hand(critic.model.path) or {}), **critic.model.override_config})
    if positions is not None and config.max_model_len > positions[1]:
        why = (
            f"the critic has {positions[1]} positions ({positions[0]} in its config.json), and sequences may have "
            f"{config.max_model_len} tokens; lower a length, or extend the positions with critic.model.override_config"
        )
        yield problem_between(config, why, CRITIC_KEY, "data.max_prompt_length", "data.max_response_length")


def the_teacher_is_of_use(config: RunConfig) -> Iterator[Problem]:
    """A teacher is what the KL compares with, it stands still, and it reads the longest sequence."""
    ref, estimator, kl = config.actor_rollout_ref.ref, "algorithm.adv_estimator", f"{_ACTOR}.use_kl_loss"
    if not config.trains_on_scores and ref.model.path is None:
        why = "the KL to a teacher is all that trains the policy; name the teacher: a folder, or a model of the hub"
        yield problem_between(config, why, TEACHER_KEY, estimator)
    if ref.model.path is None:
        return
    if not config.needs_reference:
        why = "without a KL nothing is compared with the teacher; set one of the two to true, or leave the path out"
        yield problem_between(config, why, TEACHER_KEY, kl, "algorithm.use_kl_in_reward")
    if ref.ref_model_sync_steps > 0:
        why = "a teacher does not move towards the policy; set the first to -1, or leave the path out"
        yield problem_between(config, why, "actor_rollout_ref.ref.ref_model_sync_steps", TEACHER_KEY)
    positions = max_positions({**(model_config_at_hand(ref.model.path) or {}), **ref.model.override_config})
    if positions is not None and config.max_model_len > positions[1]:
        why = (
            f"the teacher has {positions[1]} positions ({positions[0]} in its config.json), and sequences may have "
            f"{config.max_model_len} tokens; lower a length, or extend the positions with "
            "actor_rollout_ref.ref.model.override_config"
        )
        yield problem_between(config, why, TEACHER_KEY, "data.max_prompt_length", "data.max_response_length")


ROLE_RULES: tuple[Rule, ...] = (
    reward_model_is_named,
    the_reward_model_is_retrained_on_labels,
    the_critic_fits,
    the_teacher_is_of_use,
)
