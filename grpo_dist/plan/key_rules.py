"""Rules between keys that need nothing but their values, and notes on valid values whose result may surprise.

A text begins with the keys, `<rollout.n>`, in whose place stands `actor_rollout_ref.rollout.n=8`; then it says what is
wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.assets import expanded
from grpo_dist.config.problems import between_keys
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.plan.placement import placement
from grpo_dist.plan.sampler_rules import CORRECTION, correction_rules
from grpo_dist.plan.teacher_rules import endpoint_rules, reference_rules, self_distillation_rules
from grpo_dist.plugins.names import (
    ADV_ESTIMATORS,
    EQUAL_SCORES_ADV_ESTIMATORS,
    GROUP_ADV_ESTIMATORS,
    OLD_POLICY_ADV_ESTIMATORS,
    OVERLONG_PENALTY,
    REWARD_MODEL_FUNCTION,
    SEQUENCE_LOSSES,
    TOKEN_ADV_ESTIMATORS,
    parse_code,
)
from grpo_dist.sizes import ENGINE_LORA_RANKS

_USE_KL = "actor_rollout_ref.actor.use_kl_loss"


@between_keys
def job_rules(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong between keys that all commands have."""
    trainer, validates = config.trainer, bool(config.data.val_files)
    if trainer.val_only and not validates:
        yield "<trainer.val_only>: there is nothing to validate on; set data.val_files"
    metrics = {"keep_best_metric": trainer.keep_best_metric, "stop_at.metric": trainer.stop_at}
    for key in (key for key, value in metrics.items() if value is not None):
        if not (validates and trainer.test_freq > 0):
            why = "the metric is measured by validating; set data.val_files and trainer.test_freq"
            yield f"<trainer.{key}>, <trainer.test_freq>: {why}"
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        why = "set resume_from_path to a global_step_N folder, or resume_mode=auto"
        yield f"<trainer.resume_mode>, <trainer.resume_from_path>: {why}"


@between_keys
def job_notes(config: JobConfig) -> Iterator[str]:
    """Yield what may surprise of keys that all commands have."""
    trainer = config.trainer
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        yield "<trainer.resume_from_path>, <trainer.resume_mode>: the run does not resume from there"
    if trainer.nnodes > 1 and not expanded(trainer.default_local_dir).is_absolute():
        why = "the workers of other machines write there too; set an absolute path on a disk that all machines share"
        yield f"<trainer.nnodes>, <trainer.default_local_dir>: {why}"
    if trainer.keep_best_metric is not None and trainer.save_freq > 0 and trainer.save_freq % trainer.test_freq:
        why = "only checkpoints of validated steps can be the best, and some steps are saved without validation"
        yield f"<trainer.keep_best_metric>, <trainer.save_freq>, <trainer.test_freq>: {why}"


@between_keys
def method_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong between the keys of estimators and losses."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    estimator, loss = algorithm.adv_estimator, actor.policy_loss.loss_mode
    if estimator in GROUP_ADV_ESTIMATORS and config.actor_rollout_ref.rollout.n < 2:
        why = "the estimator compares the responses of one prompt; set rollout.n to 2 or more"
        yield f"<rollout.n>, <algorithm.adv_estimator>: {why}"
    least, n = algorithm.min_group_size, config.actor_rollout_ref.rollout.n
    if least is not None and least > n:
        why = f"a group has {n} responses at most; set it to a number up to that, or to null for all of them"
        yield f"<algorithm.min_group_size>, <rollout.n>: {why}"
    if least is not None and least < 2 and estimator in GROUP_ADV_ESTIMATORS:
        why = "the estimator compares the responses of one prompt; set the first to 2 or more"
        yield f"<algorithm.min_group_size>, <algorithm.adv_estimator>: {why}"
    if config.critic.enable and estimator in ADV_ESTIMATORS and estimator != "gae":
        why = f"{estimator} reads no values; set the first to null, or the second to gae"
        yield f"<critic.enable>, <algorithm.adv_estimator>: {why}"
    if config.needs_critic and config.critic.loss_agg_mode == "prompt-mean":
        yield "<critic.loss_agg_mode>: the values of a critic are no prompt's; set it to token-mean"
    if algorithm.mask_equal_groups and estimator in EQUAL_SCORES_ADV_ESTIMATORS:
        why = "this estimator trains groups of equal scores too; set the first to false"
        yield f"<algorithm.mask_equal_groups>, <algorithm.adv_estimator>: {why}"
    if actor.observation_coeff and config.actor_rollout_ref.rollout.agent.is_single_turn:
        why = (
            "a single response has no tokens of an environment; set the first to 0, or let an agent make the responses"
        )
        yield f"<actor.observation_coeff>, <rollout.agent.default_agent_loop>: {why}"
    if estimator == "gigpo" and config.actor_rollout_ref.rollout.agent.is_single_turn:
        why = "it compares the turns of an agent; choose an agent loop, or grpo"
        yield f"<algorithm.adv_estimator>, <rollout.agent.default_agent_loop>: {why}"
    if len(config.old_policy_columns) > 1 and algorithm.rollout_correction.bypass_mode:
        key = "algorithm.adv_estimator" if estimator in OLD_POLICY_ADV_ESTIMATORS else "actor.top_entropy_quantile"
        why = "it goes by the pass that bypass_mode leaves out"
        yield f"<{key}>, <{CORRECTION}.bypass_mode>: {why}; set the second to false"
    returns = {"reinforce_plus_plus": algorithm.use_kl_in_reward or algorithm.gamma != 1}
    returns |= {"remax": algorithm.use_kl_in_reward} | dict.fromkeys(TOKEN_ADV_ESTIMATORS, True)
    if loss == "geo_mean" and (algorithm.credit == "agent" or returns.get(estimator)):
        key = "credit" if algorithm.credit == "agent" else "adv_estimator"
        why = "the loss has one advantage for a response, the mean, in which those of its tokens cancel; choose gspo"
        yield f"<actor.policy_loss.loss_mode>, <algorithm.{key}>: {why}"
    if actor.top_entropy_quantile < 1 and loss in SEQUENCE_LOSSES[:2]:
        why = "the loss has one ratio for the whole sequence; choose another loss_mode or set the share to 1"
        yield f"<actor.top_entropy_quantile>, <actor.policy_loss.loss_mode>: {why}"


@between_keys
def weight_rules(config: RunConfig) -> Iterator[str]:
    """Yield what cannot be computed with LoRA's factors beside the model's weights, or contradicts its output layer."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if model.lora_rank and actor.use_kl_loss and actor.kl_loss_type == "full" and model.targets_output_layer:
        why = "the exact KL needs an output layer without factors; choose low_var_kl or leave lm_head out"
        yield f"<actor.kl_loss_type>, <model.target_modules>: {why}"
    if model.sends_factors and model.lora_rank > ENGINE_LORA_RANKS[-1]:
        why = f"engines take ranks up to {ENGINE_LORA_RANKS[-1]}; lower it, or set the second to true"
        yield f"<model.lora_rank>, <model.lora.merge>: {why}"
    if model.sends_factors and model.targets_output_layer:
        why = "engines get no factors of the output layer; leave lm_head out, or set the second to true"
        yield f"<model.target_modules>, <model.lora.merge>: {why}"
    if "head_dtype" in model.override_config:
        why = "config.json's entry would change the engines alone; leave it out, and set the second"
        yield f"<model.override_config>, <model.head_dtype>: {why}"
    if model.head_dtype and actor.fsdp_config.model_dtype == "bf16":
        why = "a float32 output layer is that of float32 weights; set the second to fp32, or the first to null"
        yield f"<model.head_dtype>, <actor.fsdp_config.model_dtype>: {why}"


@between_keys
def credit_rules(config: RunConfig) -> Iterator[str]:
    """Yield why agents cannot have advantages of their own."""
    if config.algorithm.credit != "agent":
        return
    if config.actor_rollout_ref.rollout.agent.is_single_turn:
        why = "a single turn has no agents; choose an agent loop, or episode"
        yield f"<algorithm.credit>, <rollout.agent.default_agent_loop>: {why}"
    if config.algorithm.adv_estimator in ("remax", "gdpo"):
        why = "the estimator reads scores of whole episodes; choose another one, or episode"
        yield f"<algorithm.credit>, <algorithm.adv_estimator>: {why}"


@between_keys
def gdpo_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with gdpo, which compares the components of the reward, and nothing that is no component."""
    algorithm, buffer = config.algorithm, config.reward.overlong_buffer
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator != "gdpo":
        return
    if algorithm.use_kl_in_reward:
        why = "gdpo compares the reward's components, and the KL is none; set it to false"
        yield f"<algorithm.use_kl_in_reward>, <algorithm.adv_estimator>: {why} and {_USE_KL}=true"
    if keys is None and config.custom_reward_function.path is None:
        why = (
            "the built-in scorers declare no components; name those of their values that gdpo is to compare, or set "
            "the path to grpo_dist.rewards.weighted"
        )
        yield f"<algorithm.adv_estimator>, <algorithm.gdpo_reward_keys>, <custom_reward_function.path>: {why}"
    if keys is not None and buffer.enable and OVERLONG_PENALTY not in keys:
        why = f"the penalty would have no effect; add {OVERLONG_PENALTY} to the keys, or set the second to false"
        yield f"<algorithm.gdpo_reward_keys>, <reward.overlong_buffer.enable>: {why}"
    if keys is not None and weights is not None and len(keys) != len(weights):
        yield "<algorithm.gdpo_reward_weights>, <algorithm.gdpo_reward_keys>: one weight for each of the keys, or null"


@between_keys
def sampling_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong between the keys of prompts, samples and their lengths."""
    data, rollout, filters = config.data, config.actor_rollout_ref.rollout, config.algorithm.filter_groups.enable
    longest, val = data.max_prompt_length + data.max_response_length, rollout.val_kwargs
    if data.prompt_template is not None and data.prompt_key != "prompt":
        why = "both say what the prompt is; set the first to null, or leave out the second"
        yield f"<data.prompt_template>, <data.prompt_key>: {why}"
    if not (data.apply_chat_template or rollout.agent.is_single_turn):
        why = "this agent loop writes its turns by the chat template; set the first to true, or leave out the second"
        yield f"<data.apply_chat_template>, <rollout.agent.default_agent_loop>: {why}"
    if data.gen_batch_size not in (None, data.train_batch_size) and not filters:
        why = "without algorithm.filter_groups.enable=true a step samples the prompts that it trains on; set it to null"
        yield f"<data.gen_batch_size>, <data.train_batch_size>: {why}"
    if rollout.over_sample_rate and filters:
        why = "dynamic sampling has data.gen_batch_size for that; set the rate to 0"
        yield f"<rollout.over_sample_rate>, <algorithm.filter_groups.enable>: {why}"
    if config.reward.overlong_buffer.enable and config.overlong_buffer_len > data.max_response_length:
        yield "<reward.overlong_buffer.len>, <data.max_response_length>: the buffer is part of the longest response"
    if rollout.min_tokens > data.max_response_length:
        yield "<rollout.min_tokens>, <data.max_response_length>: no response can be that long"
    if config.max_model_len < longest:
        why = f"must be at least prompt + response = {longest}, or null"
        yield f"<rollout.max_model_len>, <data.max_prompt_length>, <data.max_response_length>: {why}"
    if val.n > 1 and not val.do_sample:
        why = "greedy responses are all the same; set do_sample=true or n=1"
        yield f"<rollout.val_kwargs.n>, <rollout.val_kwargs.do_sample>: {why}"
    if val.do_sample and val.temperature == 0:
        why = "sampling needs a positive temperature; for greedy set do_sample=false"
        yield f"<rollout.val_kwargs.do_sample>, <rollout.val_kwargs.temperature>: {why}"


@between_keys
def reward_model_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with a reward model, which has a path, is asked, and judges whole responses or steps."""
    section, process = config.reward_model, config.reward_model.process
    if section.enable and section.model.path is None:
        why = "name the reward model: a folder, or a model of the Hugging Face hub"
        yield f"<reward_model.model.path>, <reward_model.enable>: {why}"
    if process.enable and not section.enable:
        why = "there is no reward model that could judge steps; set the second to true, or the first to false"
        yield f"<reward_model.process.enable>, <reward_model.enable>: {why}"
    for name in ("step_tag", "good", "bad"):
        if getattr(process, name) is not None and not process.enable:
            why = "it is for a model that judges steps; set the second to true, or the first to null"
            yield f"<reward_model.process.{name}>, <reward_model.process.enable>: {why}"
    if (process.good is None) != (process.bad is None):
        why = "the model chooses between two tokens; name both or none"
        yield f"<reward_model.process.good>, <reward_model.process.bad>: {why}"
    if not section.enable and REWARD_MODEL_FUNCTION in config.reward_paths:
        why = f"{REWARD_MODEL_FUNCTION} returns the reward model's score; set enable to true, or leave the function out"
        yield f"<reward_model.enable>, <custom_reward_function.path>: {why}"


@between_keys
def retraining_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with retraining, which needs a model, labels, and batches that meet one model."""
    section, steps = config.reward_model, config.reward_model.process.enable
    splits = config.algorithm.adv_estimator == "grpo_process"
    if not section.retrain.enable:
        return
    if not section.enable:
        why = "there is no reward model to retrain; set the second to true, or the first to -1"
        yield f"<reward_model.retrain.freq>, <reward_model.enable>: {why}"
    elif config.custom_reward_function.path is None:
        why = (
            "the reward model's own score is no label for it; set the path to grpo_dist.rewards.weighted, with the "
            "rule among its functions, or to a function of yours that returns reward_model.retrain.label"
        )
        yield f"<reward_model.retrain.freq>, <custom_reward_function.path>: {why}"
    if config.trainer.max_staleness:
        why = "groups sampled ahead would be scored by different reward models; set one of the two to its default"
        yield f"<trainer.max_staleness>, <reward_model.retrain.freq>: {why}"
    if steps and not splits:
        why = "only grpo_process splits responses into steps, whose labels are needed; set the estimator to it"
        yield f"<reward_model.retrain.freq>, <algorithm.adv_estimator>: {why}"
    if splits and section.enable and not steps:
        why = "a whole response has no labels of steps; set the last to true, or the first to -1"
        yield f"<reward_model.retrain.freq>, <algorithm.adv_estimator>, <reward_model.process.enable>: {why}"


@between_keys
def naming_rules(config: RunConfig) -> Iterator[str]:
    """Yield names that are missing or twice: a sampler and a function have one, of several each has its own."""
    sampler, custom = config.data.sampler, config.custom_reward_function
    code, functions, weights = sampler.code, custom.listed, custom.weights
    if (sampler.class_name is not None) if code is None else not code.attribute:
        why = "set both or none, or write the first as file.py:Class"
        yield f"<data.sampler.class_path>, <data.sampler.class_name>: {why}"
    elif code is not None and sampler.class_name not in (None, code.attribute):
        yield "<data.sampler.class_path>, <data.sampler.class_name>: two names of a class; set the second to null"
    if code is not None and config.data.curriculum.enable:
        why = "two orders of the prompts; set the first to null, or the second to false"
        yield f"<data.sampler.class_path>, <data.curriculum.enable>: {why}"
    if functions is None:
        named = parse_code(custom.path).attribute if isinstance(custom.path, str) else ""
        if named and custom.name not in ("compute_score", named):
            why = "two names of a function; leave out the second"
            yield f"<custom_reward_function.path>, <custom_reward_function.name>: {why}"
        if weights is not None:
            why = "weights are for a list of functions; write path=[...]"
            yield f"<custom_reward_function.weights>, <custom_reward_function.path>: {why}"
        return
    if custom.name != "compute_score":
        why = "write the name of each function behind its file, as file.py:function"
        yield f"<custom_reward_function.name>, <custom_reward_function.path>: {why}"
    if custom.reward_kwargs:
        why = "write the arguments of a function beside it, as [{path: file.py:function, reward_kwargs: {...}}]"
        yield f"<custom_reward_function.reward_kwargs>, <custom_reward_function.path>: {why}"
    if weights is not None and len(weights) != len(functions):
        why = f"write {len(functions)} weights, one for each function"
        yield f"<custom_reward_function.weights>, <custom_reward_function.path>: {why}"
    if weights is not None and any(isinstance(entry, dict) and "weight" in entry for entry in custom.path or ()):
        why = "weights twice; write them in one of the two"
        yield f"<custom_reward_function.weights>, <custom_reward_function.path>: {why}"


@between_keys
def stopping_rules(config: RunConfig) -> Iterator[str]:
    """Yield health rules that are to stop the run, and whose metric this run does not compute."""
    health, bypass = config.trainer.health, config.algorithm.rollout_correction.bypass_mode
    if health.kl.action == "stop" and not config.needs_reference:
        why = f"without a reference there is no KL to it; set the action to off, or {_USE_KL}=true"
        yield f"<trainer.health.kl.action>, <actor.use_kl_loss>: {why}"
    if health.rollout_mismatch.action == "stop" and bypass:
        why = "this mode computes no log-probs to compare the sampler's with; set the action to off"
        yield f"<trainer.health.rollout_mismatch.action>, <{CORRECTION}.bypass_mode>: {why}"
    if health.entropy.action == "stop" and bypass and not config.actor_rollout_ref.actor.computes_entropy:
        why = "entropy is not known in this mode; set the action to off, or entropy_coeff above 0"
        yield f"<trainer.health.entropy.action>, <{CORRECTION}.bypass_mode>, <actor.entropy_coeff>: {why}"


@between_keys
def run_notes(config: RunConfig) -> Iterator[str]:
    """Yield what may surprise of valid values."""
    roles, stale = config.actor_rollout_ref, config.trainer.max_staleness
    actor, rollout = roles.actor, roles.rollout
    if actor.use_kl_loss and actor.kl_loss_type in ("k1", "kl"):
        why = "as a loss its gradient has mean zero, so it does not regularise; use k2 or k3 (low_var_kl)"
        yield f"<actor.kl_loss_type>: {why}"
    luspo = (actor.policy_loss.loss_mode, actor.loss_agg_mode) == ("gspo", "seq-mean-token-sum")
    if actor.policy_loss.loss_mode in SEQUENCE_LOSSES and actor.loss_agg_mode != "seq-mean-token-mean" and not luspo:
        why = "the loss is published with seq-mean-token-mean; this one weighs long responses differently"
        yield f"<actor.policy_loss.loss_mode>, <actor.loss_agg_mode>: {why}"
    if config.algorithm.adv_estimator == "gae" and not config.needs_critic:
        yield "<algorithm.adv_estimator>, <critic.enable>: there is no critic, so all values are 0"
    if config.reward_model.model.path is not None and not config.reward_model.enable:
        yield "<reward_model.model.path>, <reward_model.enable>: this reward model is not asked"
    if cut := [f"<rollout.{name}>" for name in config.filters]:
        yield (
            f"{', '.join(cut)}: responses are sampled from a truncated distribution, but the trainer's log-probs are "
            "of the full one; mismatch/filters shows the difference, algorithm.rollout_correction corrects for it"
        )
    bypass = config.algorithm.rollout_correction.bypass_mode
    if config.rollout_is is None and config.algorithm.rollout_correction.rollout_is not in ("auto", None):
        why = "the ratio to the sampler's log-probs corrects already, so the first has no effect"
        yield f"<{CORRECTION}.rollout_is>, <{CORRECTION}.bypass_mode>: {why}"
    if stale and config.rollout_is is None and not bypass:
        why = f"responses may be {stale} updates old, and nothing corrects for it; set the second to auto"
        yield f"<trainer.max_staleness>, <{CORRECTION}.rollout_is>: {why}"
    if rollout.over_sample_rate:
        yield (
            "<rollout.over_sample_rate>: the slowest groups are aborted, so batches are biased towards short "
            "responses, and a run cannot be repeated exactly with the same seed"
        )
    if placement(config).shares_gpu and rollout.gpu_memory_utilization > 0.5 and not rollout.free_cache_engine:
        why = "the actor shares the GPU; set the first to 0.5 or less, or the second to true"
        yield f"<rollout.gpu_memory_utilization>, <rollout.free_cache_engine>: {why}"


KEY_RULES = (
    method_rules,
    correction_rules,
    weight_rules,
    credit_rules,
    gdpo_rules,
    sampling_rules,
    reference_rules,
    endpoint_rules,
    self_distillation_rules,
    reward_model_rules,
    retraining_rules,
    naming_rules,
    stopping_rules,
)
