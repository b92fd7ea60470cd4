"""Rules between config keys: one small function each, which yields a problem that names keys and values.

`rule_problems` runs them all, so one attempt shows everything. Machines are not asked here: whether a GPU is
really there is found out when Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_dist.assets import BUILTIN, resolve_model_path
from grpo_dist.assets.paths import expanded, is_file, is_folder
from grpo_dist.config.data_files import DataFileProblem, parse_data_file
from grpo_dist.config.names import GROUP_ADV_ESTIMATORS, SEQUENCE_LOSSES
from grpo_dist.config.placement import placement
from grpo_dist.config.problems import Problem, shown
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError

Rule = Callable[[RunConfig], Iterator[Problem]]

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_CLUSTER = ("cluster.actor_world_size", "cluster.rollout_world_size", "cluster.ref_world_size")


def rule_problems(config: RunConfig) -> list[Problem]:
    """Everything that is wrong between keys, or with files they name."""
    return [problem for rule in RULES for problem in rule(config)]


def groups_need_two_responses(config: RunConfig) -> Iterator[Problem]:
    """Group-relative estimators compare responses of one prompt."""
    n = config.actor_rollout_ref.rollout.n
    if config.algorithm.adv_estimator in GROUP_ADV_ESTIMATORS and n < 2:
        why = "the estimator compares the responses of one prompt; set rollout.n to 2 or more"
        yield _problem(config, why, f"{_ROLLOUT}.n", "algorithm.adv_estimator")


def estimators_get_what_they_need(config: RunConfig) -> Iterator[Problem]:
    """Settings that an estimator or loss cannot work with."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction, quantile = algorithm.rollout_correction, f"{_ACTOR}.top_entropy_quantile"
    bypass, reinforce = f"{_CORRECTION}.bypass_mode", correction.loss_type == "reinforce"
    if correction.bypass_mode and config.rollout_is is not None and not reinforce:
        why = "with the sampler's log-probs as the old ones the ratio corrects already; set one of the two"
        yield _problem(config, why, bypass, f"{_CORRECTION}.rollout_is")
    if correction.bypass_mode and correction.rollout_is_batch_normalize:
        why = "these weights change during the update, so there is no mean over the batch; set one of the two"
        yield _problem(config, why, bypass, f"{_CORRECTION}.rollout_is_batch_normalize")
    if reinforce and not correction.bypass_mode:
        why = "reinforce is a loss of bypass_mode; set bypass_mode=true, or actor.policy_loss.loss_mode=gpg"
        yield _problem(config, why, f"{_CORRECTION}.loss_type", bypass)
    if reinforce and actor.policy_loss.loss_mode != "vanilla":
        why = "two losses; leave one of them at its default"
        yield _problem(config, why, f"{_CORRECTION}.loss_type", f"{_ACTOR}.policy_loss.loss_mode")
    if (correction.rollout_rs is None) != (correction.rollout_rs_threshold is None):
        yield _problem(config, "set both or none", f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_rs_threshold")
    if correction.bypass_mode and actor.top_entropy_quantile < 1:
        why = "entropies come from the pass that bypass_mode leaves out"
        yield _problem(config, why, quantile, bypass)
    if actor.policy_loss.loss_mode in SEQUENCE_LOSSES[:2] and actor.top_entropy_quantile < 1:
        why = "the loss has one ratio for the whole sequence; choose another loss_mode or set the share to 1"
        yield _problem(config, why, quantile, f"{_ACTOR}.policy_loss.loss_mode")


def over_sampling_ends_one_batch(config: RunConfig) -> Iterator[Problem]:
    """Two ways to sample more prompts than train."""
    if config.actor_rollout_ref.rollout.over_sample_rate and config.algorithm.filter_groups.enable:
        why = "dynamic sampling has data.gen_batch_size for that; set the rate to 0"
        yield _problem(config, why, f"{_ROLLOUT}.over_sample_rate", "algorithm.filter_groups.enable")


def the_reference_moves_between_batches(config: RunConfig) -> Iterator[Problem]:
    """Sampled ahead, groups of one batch would meet the reference before and after it moves."""
    if (
        config.trainer.max_staleness
        and config.actor_rollout_ref.ref.ref_model_sync_steps > 0
        and config.needs_reference
    ):
        why = "groups sampled ahead would be compared with different references; set one of the two to its default"
        yield _problem(config, why, "trainer.max_staleness", "actor_rollout_ref.ref.ref_model_sync_steps")


def prompts_are_sampled_for_use(config: RunConfig) -> Iterator[Problem]:
    """Without a filter, groups beyond the batch would be thrown away."""
    data = config.data
    if (data.gen_batch_size or 0) > data.train_batch_size and not config.algorithm.filter_groups.enable:
        why = "only algorithm.filter_groups.enable=true needs more prompts than the batch has; set it to null"
        yield _problem(config, why, "data.gen_batch_size", "data.train_batch_size")


def lora_reference_stands_still(config: RunConfig) -> Iterator[Problem]:
    """With LoRA the reference is the model without its factors, which cannot move."""
    model, ref = config.actor_rollout_ref.model, config.actor_rollout_ref.ref
    if model.lora_rank and ref.ref_model_sync_steps > 0:
        why = "with LoRA the reference is the model without its factors and cannot move; set it to -1"
        yield _problem(config, why, "actor_rollout_ref.ref.ref_model_sync_steps", "actor_rollout_ref.model.lora_rank")


def something_to_validate(config: RunConfig) -> Iterator[Problem]:
    """`val_only` validates, and the best checkpoint is found by validating."""
    trainer = config.trainer
    if trainer.val_only and not config.data.val_files:
        yield _problem(config, "there is nothing to validate on; set data.val_files", "trainer.val_only")
    if trainer.keep_best_metric is not None and not (config.data.val_files and trainer.test_freq > 0):
        why = "the best checkpoint is found by validating; set data.val_files and trainer.test_freq"
        yield _problem(config, why, "trainer.keep_best_metric", "trainer.test_freq")


def stopping_rules_have_a_metric(config: RunConfig) -> Iterator[Problem]:
    """A rule that is to stop the run, and whose metric this run does not compute."""
    health, bypass_key = config.trainer.health, f"{_CORRECTION}.bypass_mode"
    bypass, entropy = config.algorithm.rollout_correction.bypass_mode, config.actor_rollout_ref.actor.entropy_coeff
    if health.kl.action == "stop" and not config.needs_reference:
        why = "without a reference there is no KL to it; set the action to off, or use_kl_loss=true"
        yield _problem(config, why, "trainer.health.kl.action", f"{_ACTOR}.use_kl_loss")
    if health.rollout_mismatch.action == "stop" and bypass:
        why = "this mode computes no log-probs to compare the sampler's with; set the action to off"
        yield _problem(config, why, "trainer.health.rollout_mismatch.action", bypass_key)
    if health.entropy.action == "stop" and bypass and not entropy:
        why = "entropy is not known in this mode; set the action to off, or entropy_coeff above 0"
        yield _problem(config, why, "trainer.health.entropy.action", bypass_key, f"{_ACTOR}.entropy_coeff")


def overlong_buffer_fits(config: RunConfig) -> Iterator[Problem]:
    """The buffer lies within the longest response."""
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.resolved_len(config.data) > longest:
        why = "the buffer is part of the longest response"
        yield _problem(config, why, "reward.overlong_buffer.len", "data.max_response_length")


def shortest_response_fits(config: RunConfig) -> Iterator[Problem]:
    """A response may be as long as it must be."""
    if config.actor_rollout_ref.rollout.min_tokens > config.data.max_response_length:
        yield _problem(config, "no response can be that long", f"{_ROLLOUT}.min_tokens", "data.max_response_length")


def mini_batches_divide_the_batch(config: RunConfig) -> Iterator[Problem]:
    """A training batch is a whole number of mini-batches."""
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % mini:
        fitting = max(size for size in range(1, mini + 1) if batch % size == 0)
        why = f"the batch must be a multiple of the mini-batch; for example ppo_mini_batch_size={fitting}"
        yield _problem(config, why, "data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size")


def actor_ranks_divide_the_mini_batch(config: RunConfig) -> Iterator[Problem]:
    """Every actor rank gets the same number of sequences of a mini-batch."""
    mini, n = config.actor_rollout_ref.actor.ppo_mini_batch_size, config.actor_rollout_ref.rollout.n
    ranks = placement(config).actor_world_size
    if (mini * n) % ranks:
        why = f"{mini} * {n} = {mini * n} sequences of a mini-batch do not split over {ranks} actor ranks"
        yield _problem(config, why, f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n", "cluster.actor_world_size")


def copies_divide_the_actor_ranks(config: RunConfig) -> Iterator[Problem]:
    """Each copy of the actor's weights lies on equally many ranks."""
    size, ranks = config.actor_rollout_ref.actor.fsdp_config.fsdp_size, placement(config).actor_world_size
    if size > 0 and ranks % size:
        why = f"{ranks} actor ranks do not split into copies of {size}; set a divisor, or -1"
        yield _problem(config, why, f"{_ACTOR}.fsdp_config.fsdp_size", "cluster.actor_world_size")


def engines_use_whole_groups_of_gpus(config: RunConfig) -> Iterator[Problem]:
    """Rollout GPUs are a multiple of the GPUs of one engine, which lie in one machine."""
    place, per_node = placement(config), config.trainer.n_gpus_per_node
    key = f"{_ROLLOUT}.tensor_model_parallel_size"
    if place.device == "cpu":
        if place.tensor_parallel > 1:
            yield _problem(config, "an engine on CPU is one process; set it to 1", key)
        return
    if place.tensor_parallel > per_node:
        yield _problem(config, "an engine lies in one machine", key, "trainer.n_gpus_per_node")
    if place.rollout_world_size % place.tensor_parallel:
        why = "rollout GPUs must be a multiple of the GPUs of one engine"
        yield _problem(config, why, "cluster.rollout_world_size", key)


def roles_fit_on_the_gpus(config: RunConfig) -> Iterator[Problem]:
    """Each process has a GPU of its own, or one process of each role shares the only GPU."""
    place, gpus = placement(config), config.num_gpus
    roles = {
        "actor": place.actor_world_size,
        "rollout": place.rollout_world_size,
        "ref": place.ref_world_size,
    }
    split = " + ".join(f"{role} {size}" for role, size in roles.items() if size)
    asked = [key for key in _CLUSTER if _value(config, key) is not None]
    keys = (*asked, f"{_ROLLOUT}.tensor_model_parallel_size", "trainer.nnodes", "trainer.n_gpus_per_node")
    if place.shares_gpu:
        if max(roles.values()) > 1:
            why = f"one process of each role shares the only GPU, and this is {split}; leave cluster.* null"
            yield _problem(config, why, *keys)
    elif place.device == "cuda" and place.world_size > gpus:
        drop = f", or {_ACTOR}.use_kl_loss=false (no reference)" if config.needs_reference_workers else ""
        why = (
            f"{split} = {place.world_size} GPUs are needed and there are {gpus}; set smaller "
            "cluster.actor_world_size, cluster.rollout_world_size or cluster.ref_world_size, or more "
            f"machines{drop}"
        )
        yield _problem(config, why, *keys)


def broadcast_has_a_gpu_for_each_process(config: RunConfig) -> Iterator[Problem]:
    """NCCL takes no two processes on one GPU."""
    key, place = f"{_ROLLOUT}.checkpoint_engine.backend", placement(config)
    if config.actor_rollout_ref.rollout.checkpoint_engine.backend == "broadcast" and place.shares_gpu:
        why = "NCCL refuses two processes on one GPU, and all roles share the only one; set it to null or object_store"
        yield _problem(config, why, key, "trainer.n_gpus_per_node")


def engine_holds_the_longest_sequence(config: RunConfig) -> Iterator[Problem]:
    """The engine's longest sequence covers the longest prompt and response."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    if config.actor_rollout_ref.rollout.resolved_max_model_len(config.data) < longest:
        why = f"must be at least prompt + response = {longest}, or null"
        yield _problem(config, why, f"{_ROLLOUT}.max_model_len", "data.max_prompt_length", "data.max_response_length")


def token_budgets_hold_the_longest_sequence(config: RunConfig) -> Iterator[Problem]:
    """A pass that is filled by tokens holds at least one sequence."""
    roles, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    own = f"{_ACTOR}.ppo_max_token_len_per_gpu"
    budgets = {own: actor.max_token_len}
    for name, role in (("rollout", roles.rollout), ("ref", roles.ref)):
        key = f"actor_rollout_ref.{name}.log_prob_max_token_len_per_gpu"
        budgets[key if role.log_prob_max_token_len_per_gpu else own] = actor.log_prob_max_token_len(role)
    for key, budget in budgets.items():
        if budget is not None and budget < longest:
            why = f"a pass must hold the longest sequence: at least prompt + response = {longest}"
            yield _problem(config, why, key, "data.max_prompt_length", "data.max_response_length")


def validation_samples_differ(config: RunConfig) -> Iterator[Problem]:
    """Several greedy responses would be the same response; sampling needs a temperature."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    keys = f"{_ROLLOUT}.val_kwargs.do_sample", f"{_ROLLOUT}.val_kwargs.temperature"
    if val.n > 1 and not val.do_sample:
        why = "greedy responses are all the same; set do_sample=true or n=1"
        yield _problem(config, why, f"{_ROLLOUT}.val_kwargs.n", keys[0])
    if val.do_sample and val.temperature == 0:
        yield _problem(config, "sampling needs a positive temperature; for greedy set do_sample=false", *keys)


def resume_path_is_set(config: RunConfig) -> Iterator[Problem]:
    """resume_mode=resume_path says where."""
    trainer = config.trainer
    keys = "trainer.resume_mode", "trainer.resume_from_path"
    if trainer.resume_mode != "resume_path":
        return
    if trainer.resume_from_path is None:
        yield _problem(config, "set resume_from_path to a global_step_N folder, or resume_mode=auto", *keys)
    elif not is_folder(trainer.resume_from_path):
        yield _missing(keys[1], trainer.resume_from_path, "folder")


def data_files_exist(config: RunConfig) -> Iterator[Problem]:
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
    """A sampler of the user's has a file or module, and a name in it."""
    sampler = config.data.sampler
    if (sampler.class_path is None) != (sampler.class_name is None):
        yield _problem(config, "set both or none", "data.sampler.class_path", "data.sampler.class_name")


def model_folder_exists(config: RunConfig) -> Iterator[Problem]:
    """A model path that is no hub name is a folder with a config.json."""
    key, path = "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path
    if path.startswith(BUILTIN):
        try:
            resolve_model_path(path)
        except ConfigError as error:
            text = str(error)
            yield Problem(text if text.startswith(key) else f"{key}={path}: {text}", (key,))
    elif looks_like_folder(path):
        if not is_folder(path):
            yield _missing(key, path, "folder")
        elif not is_file(f"{path}/config.json"):
            yield _missing(key, path, "config.json in the folder")


def custom_code_exists(config: RunConfig) -> Iterator[Problem]:
    """Python files named by the config are there."""
    agent = config.actor_rollout_ref.rollout.agent
    named = {
        "custom_reward_function.path": config.custom_reward_function.path,
        "data.sampler.class_path": config.data.sampler.class_path,
        "algorithm.adv_estimator": config.algorithm.adv_estimator.rpartition(":")[0],
        f"{_ROLLOUT}.agent.default_agent_loop": agent.default_agent_loop.rpartition(":")[0],
        f"{_ACTOR}.kl_loss_type": config.actor_rollout_ref.actor.kl_loss_type.rpartition(":")[0],
        f"{_ACTOR}.policy_loss.loss_mode": config.actor_rollout_ref.actor.policy_loss.loss_mode.rpartition(":")[0],
    }
    for key, named_source in named.items():
        source = (named_source or "").removeprefix("file://").removeprefix("pkg://")  # verl's forms
        if source and (source.endswith(".py") or "/" in source) and not is_file(source):
            yield _missing(key, source, "file")


def vllm_is_installed(config: RunConfig) -> Iterator[Problem]:
    """On this machine, unless the workers run on a cluster that is already there."""
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local" and find_spec("vllm") is None:
        key = f"{_ROLLOUT}.name"
        text = f"{key}=vllm: vLLM is not installed here; pip install -e '.[cpu]', or '.[gpu]' on a GPU machine"
        yield Problem(text, (key,), missing_file=True)


RULES: tuple[Rule, ...] = (
    groups_need_two_responses,
    estimators_get_what_they_need,
    prompts_are_sampled_for_use,
    over_sampling_ends_one_batch,
    the_reference_moves_between_batches,
    something_to_validate,
    lora_reference_stands_still,
    stopping_rules_have_a_metric,
    overlong_buffer_fits,
    shortest_response_fits,
    mini_batches_divide_the_batch,
    actor_ranks_divide_the_mini_batch,
    copies_divide_the_actor_ranks,
    engines_use_whole_groups_of_gpus,
    roles_fit_on_the_gpus,
    broadcast_has_a_gpu_for_each_process,
    engine_holds_the_longest_sequence,
    token_budgets_hold_the_longest_sequence,
    validation_samples_differ,
    resume_path_is_set,
    data_files_exist,
    sampler_class_is_named,
    model_folder_exists,
    custom_code_exists,
    vllm_is_installed,
)


def looks_like_folder(path: str) -> bool:
    """Whether a model path means a local folder rather than a hub name (NAME or OWNER/NAME)."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or is_folder(path)


def _problem(config: RunConfig, why: str, *keys: str) -> Problem:
    return Problem(f"{', '.join(f'{key}={shown(_value(config, key))}' for key in keys)}: {why}", keys)


def _missing(key: str, path: str, kind: str) -> Problem:
    where = "" if expanded(path).is_absolute() else f" (looked in {Path.cwd()})"
    return Problem(f"{key}={path}: no such {kind}{where}", (key,), missing_file=True)


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config
