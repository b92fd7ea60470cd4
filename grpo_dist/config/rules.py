"""Rules between config keys: one small function each, which yields a problem that names keys and values.

All of them run, so one attempt shows everything. Machines are not asked here: whether a GPU is
really there is found out when Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from grpo_dist.assets import (
    BUILTIN,
    CRITIC_KEY,
    POLICY_KEY,
    POLICY_SECTION,
    REWARD_MODEL_KEY,
    TEACHER_KEY,
    resolve_model_path,
)
from grpo_dist.assets.paths import expanded, is_file, is_folder
from grpo_dist.code_names import parse_code
from grpo_dist.config.adapter import ADAPTER_KEY, engines_take_the_factors, targets_output_layer
from grpo_dist.config.data_files import DataFileProblem, parse_data_file
from grpo_dist.config.engine_arguments import ENGINE_RULES
from grpo_dist.config.model_rules import model_problems
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.placement_rules import PLACEMENT_RULES, Rule
from grpo_dist.config.problems import Problem, problem_between
from grpo_dist.config.role_rules import ROLE_RULES
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.errors import ConfigError
from grpo_dist.names import (
    GROUP_ADV_ESTIMATORS,
    OVERLONG_PENALTY,
    SEQUENCE_LOSSES,
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"


def groups_need_two_responses(config: RunConfig) -> Iterator[Problem]:
    """Group-relative estimators compare responses of one prompt."""
    n = config.actor_rollout_ref.rollout.n
    if config.algorithm.adv_estimator in GROUP_ADV_ESTIMATORS and n < 2:
        why = "the estimator compares the responses of one prompt; set rollout.n to 2 or more"
        yield problem_between(config, why, f"{_ROLLOUT}.n", "algorithm.adv_estimator")


def estimators_get_what_they_need(config: RunConfig) -> Iterator[Problem]:
    """Settings that an estimator or loss cannot work with."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction, quantile = algorithm.rollout_correction, f"{_ACTOR}.top_entropy_quantile"
    bypass, reinforce = f"{_CORRECTION}.bypass_mode", correction.loss_type == "reinforce"
    if correction.bypass_mode and config.rollout_is is not None and not reinforce:
        why = "with the sampler's log-probs as the old ones the ratio corrects already; set one of the two"
        yield problem_between(config, why, bypass, f"{_CORRECTION}.rollout_is")
    if correction.bypass_mode and correction.rollout_is_batch_normalize:
        why = "these weights change during the update, so there is no mean over the batch; set one of the two"
        yield problem_between(config, why, bypass, f"{_CORRECTION}.rollout_is_batch_normalize")
    if reinforce and not correction.bypass_mode:
        why = "reinforce is a loss of bypass_mode; set bypass_mode=true, or actor.policy_loss.loss_mode=gpg"
        yield problem_between(config, why, f"{_CORRECTION}.loss_type", bypass)
    if reinforce and actor.policy_loss.loss_mode != "vanilla":
        why = "two losses; leave one of them at its default"
        yield problem_between(config, why, f"{_CORRECTION}.loss_type", f"{_ACTOR}.policy_loss.loss_mode")
    if (correction.rollout_rs is None) != (correction.rollout_rs_threshold is None):
        yield problem_between(
            config, "set both or none", f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold"
        )
    if correction.bypass_mode and actor.top_entropy_quantile < 1:
        why = "entropies come from the pass that bypass_mode leaves out"
        yield problem_between(config, why, quantile, bypass)
    if actor.policy_loss.loss_mode in SEQUENCE_LOSSES[:2] and actor.top_entropy_quantile < 1:
        why = "the loss has one ratio for the whole sequence; choose another loss_mode or set the share to 1"
        yield problem_between(config, why, quantile, f"{_ACTOR}.policy_loss.loss_mode")


def gdpo_sees_the_whole_reward(config: RunConfig) -> Iterator[Problem]:
    """The estimator compares the components of the reward, and nothing that is no component."""
    algorithm, estimator = config.algorithm, "algorithm.adv_estimator"
    if algorithm.adv_estimator != "gdpo":
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    named, weighed, buffer = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights", "reward.overlong_buffer"
    if algorithm.use_kl_in_reward:
        why = (
            f"gdpo compares the reward's components, and the KL is none; set it to false and {_ACTOR}.use_kl_loss=true"
        )
        yield problem_between(config, why, "algorithm.use_kl_in_reward", estimator)
    if keys is None and config.custom_reward_function.path is None:
        why = (
            "the built-in scorers declare no components; name those of their values that gdpo is to compare, or set "
            "the path to grpo_dist.rewards.weighted"
        )
        yield problem_between(config, why, estimator, named, "custom_reward_function.path")
    if keys is not None and config.reward.overlong_buffer.enable and OVERLONG_PENALTY not in keys:
        why = f"the penalty would have no effect; add {OVERLONG_PENALTY} to the keys, or set {buffer}.enable=false"
        yield problem_between(config, why, named, f"{buffer}.enable")
    if keys is not None and weights is not None and len(keys) != len(weights):
        yield problem_between(config, "one weight for each of the keys, or null", weighed, named)


def over_sampling_ends_one_batch(config: RunConfig) -> Iterator[Problem]:
    """Two ways to sample more prompts than train."""
    if config.actor_rollout_ref.rollout.over_sample_rate and config.algorithm.filter_groups.enable:
        why = "dynamic sampling has data.gen_batch_size for that; set the rate to 0"
        yield problem_between(config, why, f"{_ROLLOUT}.over_sample_rate", "algorithm.filter_groups.enable")


def the_reference_moves_between_batches(config: RunConfig) -> Iterator[Problem]:
    """Sampled ahead, groups of one batch would meet the reference before and after it moves."""
    if (
        config.trainer.max_staleness
        and config.actor_rollout_ref.ref.ref_model_sync_steps > 0
        and config.needs_reference
    ):
        why = "groups sampled ahead would be compared with different references; set one of the two to its default"
        yield problem_between(config, why, "trainer.max_staleness", "actor_rollout_ref.ref.ref_model_sync_steps")


def prompts_are_sampled_for_use(config: RunConfig) -> Iterator[Problem]:
    """Without a filter the prompts that are sampled are those that train; others would be thrown away."""
    data = config.data
    if data.gen_batch_size not in (None, data.train_batch_size) and not config.algorithm.filter_groups.enable:
        why = "without algorithm.filter_groups.enable=true a step samples the prompts that it trains on; set it to null"
        yield problem_between(config, why, "data.gen_batch_size", "data.train_batch_size")


def lora_reference_stands_still(config: RunConfig) -> Iterator[Problem]:
    """With LoRA the reference is the model without its factors, which cannot move; or a teacher."""
    model, ref = config.actor_rollout_ref.model, config.actor_rollout_ref.ref
    if model.lora_rank and ref.ref_model_sync_steps > 0 and not config.has_teacher:
        why = "with LoRA the reference is the model without its factors and cannot move; set it to -1"
        yield problem_between(
            config, why, "actor_rollout_ref.ref.ref_model_sync_steps", "actor_rollout_ref.model.lora_rank"
        )


def exact_kl_has_a_plain_output_layer(config: RunConfig) -> Iterator[Problem]:
    """The exact KL is made of hidden states and the output layer, which LoRA's factors would change."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if model.lora_rank and actor.use_kl_loss and actor.kl_loss_type == "full" and targets_output_layer(model):
        why = "the exact KL needs an output layer without factors; choose low_var_kl or leave lm_head out"
        yield problem_between(config, why, f"{_ACTOR}.kl_loss_type", "actor_rollout_ref.model.target_modules")


def something_to_validate(config: JobConfig) -> Iterator[Problem]:
    """`val_only` validates, and the best checkpoint is found by validating."""
    trainer = config.trainer
    if trainer.val_only and not config.data.val_files:
        yield problem_between(config, "there is nothing to validate on; set data.val_files", "trainer.val_only")
    if trainer.keep_best_metric is not None and not (config.data.val_files and trainer.test_freq > 0):
        why = "the best checkpoint is found by validating; set data.val_files and trainer.test_freq"
        yield problem_between(config, why, "trainer.keep_best_metric", "trainer.test_freq")


def stopping_rules_have_a_metric(config: RunConfig) -> Iterator[Problem]:
    """A rule that is to stop the run, and whose metric this run does not compute."""
    health, bypass_key = config.trainer.health, f"{_CORRECTION}.bypass_mode"
    bypass, entropy = config.algorithm.rollout_correction.bypass_mode, config.actor_rollout_ref.actor.entropy_coeff
    if health.kl.action == "stop" and not config.needs_reference:
        why = "without a reference there is no KL to it; set the action to off, or use_kl_loss=true"
        yield problem_between(config, why, "trainer.health.kl.action", f"{_ACTOR}.use_kl_loss")
    if health.rollout_mismatch.action == "stop" and bypass:
        why = "this mode computes no log-probs to compare the sampler's with; set the action to off"
        yield problem_between(config, why, "trainer.health.rollout_mismatch.action", bypass_key)
    if health.entropy.action == "stop" and bypass and not entropy:
        why = "entropy is not known in this mode; set the action to off, or entropy_coeff above 0"
        yield problem_between(config, why, "trainer.health.entropy.action", bypass_key, f"{_ACTOR}.entropy_coeff")


def overlong_buffer_fits(config: RunConfig) -> Iterator[Problem]:
    """The buffer lies within the longest response."""
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and config.overlong_buffer_len > longest:
        why = "the buffer is part of the longest response"
        yield problem_between(config, why, "reward.overlong_buffer.len", "data.max_response_length")


def shortest_response_fits(config: RunConfig) -> Iterator[Problem]:
    """A response may be as long as it must be."""
    if config.actor_rollout_ref.rollout.min_tokens > config.data.max_response_length:
        yield problem_between(
            config, "no response can be that long", f"{_ROLLOUT}.min_tokens", "data.max_response_length"
        )


def the_model_takes_it(config: RunConfig) -> Iterator[Problem]:
    """What the model's config.json rules out, where that is at hand."""
    at_hand = model_config_at_hand(config.actor_rollout_ref.model.path)
    yield from model_problems(config, at_hand, config.cluster.gpu_memory_gib if config.num_gpus else None)


def validation_samples_differ(config: RunConfig) -> Iterator[Problem]:
    """Several greedy responses would be the same response; sampling needs a temperature."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    keys = f"{_ROLLOUT}.val_kwargs.do_sample", f"{_ROLLOUT}.val_kwargs.temperature"
    if val.n > 1 and not val.do_sample:
        why = "greedy responses are all the same; set do_sample=true or n=1"
        yield problem_between(config, why, f"{_ROLLOUT}.val_kwargs.n", keys[0])
    if val.do_sample and val.temperature == 0:
        yield problem_between(config, "sampling needs a positive temperature; for greedy set do_sample=false", *keys)


def resume_path_is_set(config: JobConfig) -> Iterator[Problem]:
    """resume_mode=resume_path says where."""
    trainer = config.trainer
    keys = "trainer.resume_mode", "trainer.resume_from_path"
    if trainer.resume_mode != "resume_path":
        return
    if trainer.resume_from_path is None:
        yield problem_between(config, "set resume_from_path to a global_step_N folder, or resume_mode=auto", *keys)
    elif not is_folder(trainer.resume_from_path):
        yield _missing(keys[1], trainer.resume_from_path, "folder")


def data_files_exist(config: JobConfig) -> Iterator[Problem]:
    """Data files and folders are there and of a kind that can be read."""
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        for name in files:
            parsed = parse_data_file(name)
            if isinstance(parsed, DataFileProblem):
                yield Problem(f"{key}={name}: {parsed.text}", (key,), missing_file=parsed.missing)


def sampler_class_is_named(config: RunConfig) -> Iterator[Problem]:
    """A sampler of the user's has a file or module, and one name in it."""
    sampler, keys = config.data.sampler, ("data.sampler.class_path", "data.sampler.class_name")
    if sampler.code is None and sampler.class_name is not None:
        yield problem_between(config, "set both or none", *keys)
    elif sampler.code is not None and not sampler.code.attribute:
        yield problem_between(config, "set both or none, or write the first as file.py:Class", *keys)
    elif sampler.code is not None and sampler.class_name not in (None, sampler.code.attribute):
        yield problem_between(config, "two names of a class; set the second to null", *keys)


def reward_functions_are_named_once(config: RunConfig) -> Iterator[Problem]:
    """One function has one name; of several, each has its own weight and arguments."""
    custom, section = config.custom_reward_function, "custom_reward_function"
    path, weights = f"{section}.path", f"{section}.weights"
    if custom.listed is None:
        named = parse_code(custom.path).attribute if isinstance(custom.path, str) else ""
        if named and custom.name not in ("compute_score", named):
            yield problem_between(config, "two names of a function; leave out the second", path, f"{section}.name")
        if custom.weights is not None:
            yield problem_between(config, "weights are for a list of functions; write path=[...]", weights, path)
        return
    if custom.name != "compute_score":
        why = "write the name of each function behind its file, as file.py:function"
        yield problem_between(config, why, f"{section}.name", path)
    if custom.reward_kwargs:
        why = "write the arguments of a function beside it, as [{path: file.py:function, reward_kwargs: {...}}]"
        yield problem_between(config, why, f"{section}.reward_kwargs", path)
    if custom.weights is not None and len(custom.weights) != len(custom.listed):
        yield problem_between(config, f"write {len(custom.listed)} weights, one for each function", weights, path)
    if custom.weights is not None and any(isinstance(each, dict) and "weight" in each for each in custom.path or ()):
        yield problem_between(config, "weights twice; write them in one of the two", weights, path)


def the_prompt_is_made_once(config: RunConfig) -> Iterator[Problem]:
    """A prompt is a column, or a template with columns in it."""
    if config.data.prompt_template is not None and config.data.prompt_key != "prompt":
        why = "both say what the prompt is; set the first to null, or leave out the second"
        yield problem_between(config, why, "data.prompt_template", "data.prompt_key")


def model_folders_exist(config: RunConfig) -> Iterator[Problem]:
    """The models are there."""
    paths = {POLICY_KEY: config.actor_rollout_ref.model.path}
    if config.reward_model.enable and config.reward_model.model.path is not None:
        paths[REWARD_MODEL_KEY] = config.reward_model.model.path
    if config.needs_critic:
        paths[CRITIC_KEY] = config.critic.model.path
    if (teacher := config.actor_rollout_ref.ref.model.path) is not None:
        paths[TEACHER_KEY] = teacher
    for key, path in paths.items():
        yield from model_folder_exists(key, path)
    yield from adapter_folder_exists(POLICY_SECTION, config.actor_rollout_ref.model.lora_adapter_path)


def model_folder_exists(key: str, path: str) -> Iterator[Problem]:
    """A built-in model is known, and a path that is no hub name is a folder with a config.json."""
    if path.startswith(BUILTIN):
        try:
            resolve_model_path(path, key=key)
        except ConfigError as error:
            yield Problem(str(error), (key,))
    elif looks_like_folder(path):
        if not is_folder(path):
            yield _missing(key, path, "folder")
        elif not is_file(f"{path}/config.json"):
            yield _missing(key, path, "config.json in the folder")


def adapter_folder_exists(section: str, path: str | None) -> Iterator[Problem]:
    """The folder of the adapter to go on from is there."""
    if path is not None and not is_folder(path):
        yield _missing(f"{section}.{ADAPTER_KEY}", path, "folder")


def options_of_episodes_have_episodes(config: RunConfig) -> Iterator[Problem]:
    """What an agent loop is given has an effect only with one."""
    agent = config.actor_rollout_ref.rollout.agent
    given = {
        "endpoint_kwargs": agent.endpoint_kwargs,
        "episode_timeout_s": agent.episode_timeout_s,
        "max_assistant_turns": agent.max_assistant_turns,
        "max_concurrent_episodes": agent.max_concurrent_episodes,
        "reward_function_weight": agent.reward_function_weight,
    }
    loop = f"{_ROLLOUT}.agent.default_agent_loop"
    for name, value in given.items():
        if agent.is_single_turn and value:
            key = f"{_ROLLOUT}.agent.{name}"
            what = f"has no effect on {loop}={agent.default_agent_loop}, whose episodes are one response each"
            yield Problem(f"{key}={value}: {what}; leave it out, or name an agent loop", (key, loop))


def custom_code_exists(config: RunConfig) -> Iterator[Problem]:
    """Python files named by the config are there."""
    agent, custom = config.actor_rollout_ref.rollout.agent, config.custom_reward_function
    named = {
        "data.sampler.class_path": config.data.sampler.class_path,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        f"{_ROLLOUT}.name": config.actor_rollout_ref.rollout.name,
        f"{_ROLLOUT}.agent.default_agent_loop": agent.default_agent_loop,
        f"{_ACTOR}.kl_loss_type": config.actor_rollout_ref.actor.kl_loss_type,
        f"{_ACTOR}.policy_loss.loss_mode": config.actor_rollout_ref.actor.policy_loss.loss_mode,
    }
    functions = [custom.path] if custom.listed is None else [each.get("path") for each in custom.listed]
    for key, name in [*(("custom_reward_function.path", path) for path in functions), *named.items()]:
        source = parse_code(str(name or "")).source
        if source and (source.endswith(".py") or "/" in source) and not is_file(source):
            yield _missing(key, source, "file")


def vllm_is_installed(config: RunConfig) -> Iterator[Problem]:
    """On this machine, unless the workers run on a cluster that is already there, or with another engine."""
    if config.actor_rollout_ref.rollout.name != "vllm":
        return
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local" and find_spec("vllm") is None:
        key = f"{_ROLLOUT}.name"
        text = f"{key}=vllm: vLLM is not installed here; pip install -e '.[cpu]', or '.[gpu]' on a GPU machine"
        yield Problem(text, (key,), missing_file=True)


RULES: tuple[Rule, ...] = (
    groups_need_two_responses,
    estimators_get_what_they_need,
    gdpo_sees_the_whole_reward,
    *ROLE_RULES,
    prompts_are_sampled_for_use,
    over_sampling_ends_one_batch,
    the_reference_moves_between_batches,
    something_to_validate,
    lora_reference_stands_still,
    engines_take_the_factors,
    exact_kl_has_a_plain_output_layer,
    stopping_rules_have_a_metric,
    options_of_episodes_have_episodes,
    overlong_buffer_fits,
    shortest_response_fits,
    *PLACEMENT_RULES,
    *ENGINE_RULES,
    the_model_takes_it,
    validation_samples_differ,
    resume_path_is_set,
    data_files_exist,
    sampler_class_is_named,
    reward_functions_are_named_once,
    the_prompt_is_made_once,
    model_folders_exist,
    custom_code_exists,
    vllm_is_installed,
)


def looks_like_folder(path: str) -> bool:
    """Whether a model path means a local folder rather than a hub name (NAME or OWNER/NAME)."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or is_folder(path)


def _missing(key: str, path: str, kind: str) -> Problem:
    where = "" if expanded(path).is_absolute() else f" (looked in {Path.cwd()})"
    return Problem(f"{key}={path}: no such {kind}{where}", (key,), missing_file=True)
