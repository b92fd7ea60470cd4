"""Rules between keys that need nothing but their values, and notes on valid values whose result may surprise.

A rule is a row: the keys that are shown with their values, the combination that is wrong, and what to do about it. All
of them are asked, so that one attempt shows everything. What needs more than values is in placement.py (sizes and
machines) and model_rules.py (models and their folders). Machines are not asked here: whether a GPU is really there is
found out when Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

from grpo_dist.assets import expanded, is_file
from grpo_dist.config.field_types import ALL_INTERFACES, EIGHT_BIT, NEEDS_TORCHAO
from grpo_dist.config.keys import Problem, between_keys, leaf_keys, missing_path, shown, value_of
from grpo_dist.config.processor import is_wsl
from grpo_dist.config.run_code import UPDATE
from grpo_dist.config.schema import TEXT, RunConfig
from grpo_dist.config.schema_job import JobConfig
from grpo_dist.engines.base import DIFFERENCES, RolloutBackend, builtin_backends, rollout_backend
from grpo_dist.plan.placement import placement
from grpo_dist.plan.roles import engine_dtype, is_deterministic, train_dtype, weight_transport
from grpo_dist.plugins import names
from grpo_dist.plugins.names import AGENT_LOOPS, OVERLONG_PENALTY, REWARD_MODEL_FUNCTION, SEQUENCE_LOSSES, parse_code
from grpo_dist.sizes import ENGINE_LORA_RANKS


class Values:
    """A config and its sections, by the names that conditions are written with."""

    def __init__(self, config: RunConfig) -> None:
        roles, method, custom = config.actor_rollout_ref, config.algorithm, config.custom_reward_function
        sync = roles.rollout.checkpoint_engine
        self.config, self.place, self.on_gpus = config, placement(config), config.device == "cuda"
        self.data, self.sampler, self.code = config.data, config.data.sampler, config.data.sampler.code
        self.trainer, self.health, self.staleness = config.trainer, config.trainer.health, config.trainer.max_staleness
        self.algorithm, self.correction, self.teaching = method, method.rollout_correction, method.self_distillation
        self.actor, self.rollout, self.model, self.ref = roles.actor, roles.rollout, roles.model, roles.ref
        self.critic, self.scorer, self.process = config.critic, config.reward_model, config.reward_model.process
        self.custom, self.listed, self.weights = custom, custom.listed, custom.weights
        self.backend, self.changes_only = sync.backend, sync.changes_only
        self.estimator, self.loss = method.adv_estimator, roles.actor.policy_loss.loss_mode
        self.one_ratio = self.loss in SEQUENCE_LOSSES[:2]  # for the whole sequence
        self.loop, self.single_turn = roles.rollout.agent.default_agent_loop, roles.rollout.agent.is_single_turn
        self.by_agent, self.dynamic = method.credit == "agent", method.filter_groups.enable
        self.elsewhere, self.teaches_itself = config.teacher_is_elsewhere, method.self_distillation.enable
        self.moves = roles.ref.ref_model_sync_steps > 0  # the reference, which then follows the policy
        self.kl_in_reward, self.overlong = method.use_kl_in_reward, config.reward.overlong_buffer.enable
        self.exact_kl = roles.actor.use_kl_loss and roles.actor.kl_loss_type == "full"


@dataclass(frozen=True)
class Rule:
    """A combination of values that is wrong, or may surprise.

    Attributes:
        keys: those that are shown, in this order; without `actor_rollout_ref.` before them.
    """

    keys: str
    when: Callable[[Values], object]
    why: str


def rules_of(*rows: Rule) -> Callable[[RunConfig], Iterator[Problem]]:
    """Make one rule of rows."""

    @between_keys
    def broken(config: RunConfig) -> Iterator[str]:
        values = Values(config)
        for row in rows:
            if row.when(values):
                yield f"{', '.join(f'<{key}>' for key in row.keys.split(', '))}: {row.why}"

    return broken


def _tokens_differ(v: Values) -> bool:
    """Tell if the tokens of a response may have different advantages."""
    of_kl = v.kl_in_reward and v.estimator in ("reinforce_plus_plus", "remax")
    discounted = v.estimator == "reinforce_plus_plus" and v.algorithm.gamma != 1
    return v.estimator in names.TOKEN_ADV_ESTIMATORS or of_kl or discounted or v.by_agent


CORRECTION, PROCESS, RETRAIN = "algorithm.rollout_correction", "reward_model.process", "reward_model.retrain"
_ENDPOINT, _TEACHES = "ref.model.endpoint", "algorithm.self_distillation"
_LOOP, _LOSS, _FUNCTION = "rollout.agent.default_agent_loop", "actor.policy_loss.loss_mode", "custom_reward_function"
_BACKEND = "rollout.checkpoint_engine.backend"
_KL_KEYS = "actor.use_kl_loss, actor.kl_loss_type, algorithm.use_kl_in_reward"
_OFFLOADED = "only what gradient checkpointing keeps is offloaded; set the second to true, or the first to false"
# fmt: off
_METHOD = (
    Rule("rollout.n, algorithm.adv_estimator", lambda v: v.rollout.n < 2 and v.estimator in names.GROUP_ADV_ESTIMATORS,
         "the estimator compares the responses of one prompt; set rollout.n to 2 or more"),
    Rule("algorithm.min_group_size, rollout.n", lambda v: (v.algorithm.min_group_size or 0) > v.rollout.n,
         "a group has no more responses; set it to a number up to that, or to null for all of them"),
    Rule("algorithm.min_group_size, algorithm.adv_estimator",
         lambda v: v.algorithm.min_group_size == 1 and v.estimator in names.GROUP_ADV_ESTIMATORS,
         "the estimator compares the responses of one prompt; set the first to 2 or more"),
    Rule("critic.enable, algorithm.adv_estimator",
         lambda v: v.critic.enable and v.estimator in names.ADV_ESTIMATORS and v.estimator != "gae",
         "this estimator reads no values; set the first to null, or the second to gae"),
    Rule("critic.loss_agg_mode", lambda v: v.config.needs_critic and v.critic.loss_agg_mode == "prompt-mean",
         "the values of a critic are no prompt's; set it to token-mean"),
    Rule("algorithm.mask_equal_groups, algorithm.adv_estimator",
         lambda v: v.algorithm.mask_equal_groups and v.estimator in names.EQUAL_SCORES_ADV_ESTIMATORS,
         "this estimator trains groups of equal scores too; set the first to false"),
    Rule(f"actor.observation_coeff, {_LOOP}", lambda v: v.actor.observation_coeff and v.single_turn,
         "a single response has no tokens of an environment; set the first to 0, or let an agent make the responses"),
    Rule(f"algorithm.adv_estimator, {_LOOP}", lambda v: v.estimator == "gigpo" and v.single_turn,
         "it compares the turns of an agent; choose an agent loop, or grpo"),
    Rule(f"algorithm.credit, {_LOOP}", lambda v: v.by_agent and v.single_turn,
         "a single turn has no agents; choose an agent loop, or episode"),
    Rule("algorithm.credit, algorithm.adv_estimator", lambda v: v.by_agent and v.estimator in ("remax", "gdpo"),
         "the estimator reads scores of whole episodes; choose another one, or episode"),
    Rule(f"algorithm.adv_estimator, {CORRECTION}.bypass_mode",
         lambda v: v.correction.bypass_mode and v.estimator in names.OLD_POLICY_ADV_ESTIMATORS,
         "it goes by the pass that bypass_mode leaves out; set the second to false"),
    Rule(f"actor.top_entropy_quantile, {CORRECTION}.bypass_mode",
         lambda v: v.correction.bypass_mode and v.actor.top_entropy_quantile < 1,
         "it goes by the pass that bypass_mode leaves out; set the second to false"),
    Rule(f"{_LOSS}, algorithm.adv_estimator, algorithm.credit", lambda v: v.loss == "geo_mean" and _tokens_differ(v),
         "the loss has one advantage for a response, the mean, in which those of its tokens cancel; choose gspo"),
    Rule(f"actor.top_entropy_quantile, {_LOSS}", lambda v: v.actor.top_entropy_quantile < 1 and v.one_ratio,
         "the loss has one ratio for the whole sequence; choose another loss_mode or set the share to 1"),
    # gdpo compares the components of the reward, and nothing that is no component
    Rule("algorithm.use_kl_in_reward, algorithm.adv_estimator", lambda v: v.estimator == "gdpo" and v.kl_in_reward,
         "gdpo compares the reward's components, and the KL is none; set it to false and "
         "actor_rollout_ref.actor.use_kl_loss=true"),
    Rule("algorithm.adv_estimator, algorithm.gdpo_reward_keys, custom_reward_function.path",
         lambda v: v.estimator == "gdpo" and v.algorithm.gdpo_reward_keys is None and v.custom.path is None,
         "the built-in scorers declare no components; name those of their values that gdpo is to compare, or set the "
         "path to grpo_dist.rewards.weighted"),
    Rule("algorithm.gdpo_reward_keys, reward.overlong_buffer.enable", lambda v: v.estimator == "gdpo" and v.overlong
         and OVERLONG_PENALTY not in (v.algorithm.gdpo_reward_keys or (OVERLONG_PENALTY,)),
         f"the penalty would have no effect; add {OVERLONG_PENALTY} to the keys, or set the second to false"),
    Rule("algorithm.gdpo_reward_weights, algorithm.gdpo_reward_keys",
         lambda v: v.estimator == "gdpo" and None not in (v.algorithm.gdpo_reward_keys, v.algorithm.gdpo_reward_weights)
         and len(v.algorithm.gdpo_reward_keys or ()) != len(v.algorithm.gdpo_reward_weights or ()),
         "one weight for each of the keys, or null"),
)
_SAMPLER = (  # what corrects for the sampler
    Rule(f"{CORRECTION}.bypass_mode, {CORRECTION}.rollout_is_batch_normalize",
         lambda v: v.correction.bypass_mode and v.correction.loss_type == "reinforce"
         and v.correction.rollout_is_batch_normalize,
         "these weights change during the update, so there is no mean over the batch; set one of the two"),
    Rule(f"{CORRECTION}.m2_threshold, {CORRECTION}.bypass_mode",
         lambda v: v.correction.m2_threshold is not None and v.correction.bypass_mode,
         "the second moment is that of the whole batch by the log-probs that bypass_mode leaves out; set the first to "
         "null, or the second to false"),
    Rule(f"{CORRECTION}.m2_threshold, {_LOSS}", lambda v: v.correction.m2_threshold is not None and v.one_ratio,
         "the loss has one ratio for the whole sequence; choose another loss_mode, or set the first to null"),
    Rule(f"{CORRECTION}.loss_type, {CORRECTION}.bypass_mode",
         lambda v: v.correction.loss_type == "reinforce" and not v.correction.bypass_mode,
         "reinforce is a loss of bypass_mode; set bypass_mode=true, or actor.policy_loss.loss_mode=gpg"),
    Rule(f"{CORRECTION}.loss_type, {_LOSS}", lambda v: v.correction.loss_type == "reinforce" and v.loss != "vanilla",
         "two losses; leave one of them at its default"),
    Rule(f"{CORRECTION}.rollout_rs, {CORRECTION}.rollout_rs_threshold",
         lambda v: (v.correction.rollout_rs is None) != (v.correction.rollout_rs_threshold is None),
         "set both or none"),
)
_WEIGHTS = (  # LoRA's factors, the output layer, and how weights reach the engines
    Rule("actor.kl_loss_type, model.target_modules",
         lambda v: v.model.trains_factors and v.exact_kl and v.model.targets_output_layer,
         "the exact KL needs an output layer without factors; choose low_var_kl or leave lm_head out"),
    Rule("model.lora_rank, model.lora.merge",
         lambda v: v.model.sends_factors and v.model.lora_rank > ENGINE_LORA_RANKS[-1],
         f"engines take ranks up to {ENGINE_LORA_RANKS[-1]}; lower it, or set the second to true"),
    Rule("model.target_modules, model.lora.merge", lambda v: v.model.sends_factors and v.model.targets_output_layer,
         "engines get no factors of the output layer; leave lm_head out, or set the second to true"),
    Rule("model.override_config, model.head_dtype", lambda v: "head_dtype" in v.model.override_config,
         "config.json's entry would change the engines alone; leave it out, and set the second"),
    Rule("sandbox.backend, sandbox.image",
         lambda v: (v.config.sandbox.backend == "bubblewrap") != (v.config.sandbox.image is None),
         "docker and podman run an image, bubblewrap none; set the first or the second"),
    Rule("model.head_dtype, actor.fsdp_config.model_dtype",
         lambda v: v.model.head_dtype and v.actor.fsdp_config.model_dtype == "bf16",
         "a float32 output layer is that of float32 weights; set the second to fp32, or the first to null"),
    # without checkpointing a layer keeps its weights too, which must not be copied for every pass
    Rule("model.enable_activation_offload, model.enable_gradient_checkpointing",
         lambda v: v.model.enable_activation_offload and not v.model.enable_gradient_checkpointing, _OFFLOADED),
    Rule("critic.model.enable_activation_offload, critic.model.enable_gradient_checkpointing",
         lambda v: v.config.needs_critic and v.critic.model.enable_activation_offload
         and not v.critic.model.enable_gradient_checkpointing, _OFFLOADED),
    Rule(f"{_BACKEND}, trainer.n_gpus_per_node", lambda v: v.backend == "broadcast" and v.place.shares_gpu,
         "NCCL does not allow two processes on one GPU, but roles share GPUs; set it to null, ipc or object_store"),
    Rule(f"{_BACKEND}, trainer.n_gpus_per_node", lambda v: v.backend == "ipc" and v.on_gpus and not v.place.shares_gpu,
         "it needs an actor rank on each engine's GPU, but these roles do not share GPUs; set it to null"),
    Rule(_BACKEND, lambda v: v.backend == "ipc" and v.on_gpus and is_wsl(),
         "it needs CUDA IPC, which Linux under Windows (WSL) has not; set it to null or object_store"),
    Rule(f"{_BACKEND}, trainer.nnodes", lambda v: v.backend == "ipc" and not v.on_gpus and v.trainer.nnodes > 1,
         "it needs an actor rank on each engine's machine, and several machines may lack one; set it to null"),
    Rule(f"cluster.max_rollout_world_size, {_BACKEND}", lambda v: v.place.extra_engines and v.backend == "ipc",
         "weights do not get to other machines by ipc; set the second to null"),
    Rule(f"rollout.checkpoint_engine.changes_only, {_BACKEND}",
         lambda v: v.changes_only and weight_transport(v.config, shares_gpu=v.place.shares_gpu) != "object_store",
         "only object_store sends changes, and this run would use another way; set the second to object_store"),
    Rule("rollout.checkpoint_engine.changes_only, rollout.name",
         lambda v: v.changes_only and DIFFERENCES not in rollout_backend(v.rollout.name).capabilities,
         "the engine takes whole weights alone; set the first to false"),
    Rule("rollout.free_cache_engine, trainer.max_staleness", lambda v: v.place.engines_sleep and v.staleness,
         "engines that sample during the update need their memory then; set the first to false, or the second to 0"),
)
_PROMPTS = (  # prompts, samples and their lengths
    Rule("data.prompt_template, data.prompt_key", lambda v: v.data.prompt_template and v.data.prompt_key != "prompt",
         "both say what the prompt is; set the first to null, or leave out the second"),
    Rule(f"data.image_key, {_LOOP}", lambda v: v.data.image_key and not v.single_turn,
         "rows with images get one answer; set the second to single_turn_agent, or the first to null"),
    Rule("data.image_key, critic.enable, reward_model.enable, reward_model.process.enable",
         lambda v: v.data.image_key and (v.config.needs_critic or v.scorer.enable or v.process.enable),
         "critics and reward models read text alone; leave them out, or set the first to null"),
    Rule("actor.freeze_vision_tower, model.lora_rank, ref.ref_model_sync_steps",
         lambda v: v.config.trains_vision and (v.model.trains_factors or v.moves),
         "LoRA trains the language part alone, and a reference that moves has that alone; set the first to true"),
    Rule(f"data.image_key, ref.model.path, {_ENDPOINT}.base_url, {_TEACHES}.enable",
         lambda v: v.data.image_key and (v.config.has_teacher or v.elsewhere or v.teaches_itself),
         "teachers get no images; leave them out, or set the first to null"),
    Rule("rollout.agent.endpoint_host, rollout.agent.endpoint_advertised_host",
         lambda v: v.rollout.agent.endpoint_host in ALL_INTERFACES and not v.rollout.agent.endpoint_advertised_host,
         "no agent finds it at that address; set the second to a name or address of the machine, or the first to auto"),
    Rule(f"data.apply_chat_template, {_LOOP}", lambda v: not (v.data.apply_chat_template or v.single_turn),
         "this agent loop writes its turns by the chat template; set the first to true, or leave out the second"),
    Rule("data.gen_batch_size, data.train_batch_size",
         lambda v: v.data.gen_batch_size not in (None, v.data.train_batch_size) and not v.dynamic,
         "without algorithm.filter_groups.enable=true a step samples the prompts that it trains on; set it to null"),
    Rule("rollout.over_sample_rate, algorithm.filter_groups.enable", lambda v: v.rollout.over_sample_rate and v.dynamic,
         "dynamic sampling has data.gen_batch_size for that; set the rate to 0"),
    Rule("reward.overlong_buffer.len, data.max_response_length",
         lambda v: v.overlong and v.config.overlong_buffer_len > v.data.max_response_length,
         "the buffer is part of the longest response"),
    Rule("rollout.min_tokens, data.max_response_length", lambda v: v.rollout.min_tokens > v.data.max_response_length,
         "no response can be that long"),
    Rule("rollout.val_kwargs.do_sample, rollout.val_kwargs.temperature",
         lambda v: v.rollout.val_kwargs.do_sample and v.rollout.val_kwargs.temperature == 0,
         "sampling needs a positive temperature; for greedy set do_sample=false"),
    Rule("data.sampler.class_path, data.sampler.class_name",
         lambda v: v.sampler.class_name is not None if v.code is None else not v.code.attribute,
         "set both or none, or write the first as file.py:Class"),
    Rule("data.sampler.class_path, data.sampler.class_name",
         lambda v: v.code and v.code.attribute and v.sampler.class_name not in (None, v.code.attribute),
         "two names of a class; set the second to null"),
    Rule("data.sampler.class_path, data.curriculum.enable", lambda v: v.code and v.data.curriculum.enable,
         "two orders of the prompts; set the first to null, or the second to false"),
)
_REFERENCE = (  # which may be a teacher, or the policy that teaches itself
    Rule("trainer.max_staleness, ref.ref_model_sync_steps",
         lambda v: v.moves and v.staleness and v.config.needs_reference and not v.teaches_itself,
         "groups sampled ahead would be compared with different references; set one of the two to its default"),
    Rule("ref.ref_model_sync_steps, ref.model.path", lambda v: v.moves and v.config.has_teacher,
         "a teacher does not move towards the policy; set the first to -1, or leave the path out"),
    Rule("ref.ref_model_sync_steps, model.lora_rank",
         lambda v: v.moves and not v.config.has_teacher and v.model.trains_factors,
         "with LoRA the reference is the model without its factors and cannot move; set it to -1"),
    Rule("ref.model.path, algorithm.adv_estimator",
         lambda v: v.ref.model.path is None and not (v.config.trains_on_scores or v.teaches_itself or v.elsewhere),
         "the KL to a teacher is all that trains the policy; name the teacher: a folder, or a model of the hub"),
    Rule("ref.model.path, actor.kl_loss_type", lambda v: v.config.teachers and v.actor.kl_loss_type == "full",
         "it knows one teacher's output layer; set the second to k2"),
    Rule("ref.model.path, actor.use_kl_loss, algorithm.use_kl_in_reward",
         lambda v: v.config.has_teacher and not v.config.needs_reference,
         "without a KL nothing is compared with the teacher; set one of the two to true, or leave the path out"),
    # a teacher behind an endpoint tells of its likeliest tokens alone
    Rule(f"{_ENDPOINT}.base_url",
         lambda v: not str(v.ref.model.endpoint.base_url or "http://").startswith(("http://", "https://")),
         "must be an address that begins with http:// or https:// and ends in /v1"),
    Rule(f"{_ENDPOINT}.model", lambda v: v.elsewhere and v.ref.model.endpoint.model is None,
         "name the model as the server does (GET base_url/models lists them)"),
    Rule(f"{_ENDPOINT}.base_url, {_KL_KEYS}", lambda v: v.elsewhere and (not v.exact_kl or v.kl_in_reward),
         "its tokens are compared in the loss; set the second to true, the third to full and the fourth to false"),
    Rule(f"{_ENDPOINT}.base_url, ref.model.path", lambda v: v.elsewhere and v.config.has_teacher,
         "the reference is one of the two; set the other to null"),
    Rule(f"{_ENDPOINT}.base_url, ref.ref_model_sync_steps", lambda v: v.elsewhere and v.moves,
         "it does not move towards the policy; set the second to -1"),
    Rule(f"{_ENDPOINT}.base_url, {_TEACHES}.enable", lambda v: v.elsewhere and v.teaches_itself,
         "a server is asked about the policy's own prompts; use one of the two"),
    Rule(f"{_ENDPOINT}.base_url, {_LOOP}", lambda v: v.elsewhere and v.loop not in AGENT_LOOPS[:2],
         f"its episodes may have branches, which a server cannot read; use {AGENT_LOOPS[1]}"),
    # a reference that is shown how a question is answered
    Rule(f"{_TEACHES}.enable, actor.use_kl_loss", lambda v: v.teaches_itself and not v.actor.use_kl_loss,
         "the KL in the loss is what teaches; set the second to true"),
    Rule(f"{_TEACHES}.enable, algorithm.use_kl_in_reward", lambda v: v.teaches_itself and v.kl_in_reward,
         "it is the loss that teaches; set the second to false"),
    Rule(f"{_TEACHES}.enable, actor.router_replay.mode", lambda v: v.teaches_itself and v.config.replays_routes,
         "the experts are those of another prompt; use disabled"),
    Rule(f"{_TEACHES}.enable, {_LOOP}", lambda v: v.teaches_itself and v.loop not in AGENT_LOOPS[:2],
         f"its prompts may be its own; use {AGENT_LOOPS[1]}"),
    Rule(f"{_TEACHES}.feedback_name, {_TEACHES}.success_threshold, rollout.n",
         lambda v: v.teaches_itself and v.teaching.feedback_name is None
         and (v.teaching.success_threshold is None or v.rollout.n == 1),
         "there is nothing to show: name a text, or set a score and rollout.n=2 or more"),
    Rule(f"{_TEACHES}.success_template", lambda v: v.teaches_itself and TEXT not in v.teaching.success_template,
         f"it must have {TEXT}, in whose place the text is put"),
    Rule(f"{_TEACHES}.feedback_template", lambda v: v.teaches_itself and TEXT not in v.teaching.feedback_template,
         f"it must have {TEXT}, in whose place the text is put"),
)
_REWARD = (  # the reward model, which judges whole responses or steps, and may be retrained; reward functions
    Rule("reward_model.model.path, reward_model.enable", lambda v: v.scorer.enable and v.scorer.model.path is None,
         "name the reward model: a folder, or a model of the Hugging Face hub"),
    Rule(f"{PROCESS}.enable, reward_model.enable", lambda v: v.process.enable and not v.scorer.enable,
         "there is no reward model that could judge steps; set the second to true, or the first to false"),
    Rule(f"{PROCESS}.good, {PROCESS}.bad, {PROCESS}.enable",
         lambda v: (v.process.good, v.process.bad) != (None, None) and not v.process.enable,
         "they are for a model that judges steps; set the third to true, or the others to null"),
    Rule(f"{PROCESS}.good, {PROCESS}.bad", lambda v: (v.process.good is None) != (v.process.bad is None),
         "the model chooses between two tokens; name both or none"),
    Rule("reward_model.enable, custom_reward_function.path",
         lambda v: not v.scorer.enable and REWARD_MODEL_FUNCTION in v.config.reward_paths,
         f"{REWARD_MODEL_FUNCTION} returns the reward model's score; set enable to true, or leave the function out"),
    Rule(f"{RETRAIN}.freq, custom_reward_function.path", lambda v: v.scorer.is_retrained and v.custom.path is None,
         "the reward model's own score is no label for it; set the path to grpo_dist.rewards.weighted, with the rule "
         "among its functions, or to a function of yours that returns reward_model.retrain.label"),
    Rule(f"trainer.max_staleness, {RETRAIN}.freq", lambda v: v.scorer.is_retrained and v.staleness,
         "groups sampled ahead would be scored by different reward models; set one of the two to its default"),
    Rule(f"{RETRAIN}.freq, algorithm.adv_estimator",
         lambda v: v.scorer.is_retrained and v.process.enable and v.estimator != "grpo_process",
         "only grpo_process splits responses into steps, whose labels are needed; set the estimator to it"),
    Rule(f"{RETRAIN}.freq, algorithm.adv_estimator, {PROCESS}.enable",
         lambda v: v.scorer.is_retrained and not v.process.enable and v.estimator == "grpo_process",
         "a whole response has no labels of steps; set the last to true, or the first to -1"),
    Rule(f"{_FUNCTION}.path, {_FUNCTION}.name", lambda v: isinstance(v.custom.path, str)
         and v.custom.name not in ("compute_score", parse_code(v.custom.path).attribute or v.custom.name),
         "two names of a function; leave out the second"),
    Rule(f"{_FUNCTION}.weights, {_FUNCTION}.path", lambda v: v.listed is None and v.weights is not None,
         "weights are for a list of functions; write path=[...]"),
    Rule(f"{_FUNCTION}.name, {_FUNCTION}.path", lambda v: v.listed and v.custom.name != "compute_score",
         "write the name of each function behind its file, as file.py:function"),
    Rule(f"{_FUNCTION}.reward_kwargs, {_FUNCTION}.path", lambda v: v.listed and v.custom.reward_kwargs,
         "write the arguments of a function beside it, as [{path: file.py:function, reward_kwargs: {...}}]"),
    Rule(f"{_FUNCTION}.weights, {_FUNCTION}.path",
         lambda v: v.listed and v.weights is not None and len(v.listed) != len(v.weights),
         "write as many weights as there are functions"),
    Rule(f"{_FUNCTION}.weights, {_FUNCTION}.path", lambda v: v.listed and v.weights is not None
         and any(isinstance(entry, dict) and "weight" in entry for entry in v.custom.path or ()),
         "weights twice; write them in one of the two"),
)
_STOPPING = (  # health rules that are to stop the run, and whose metric this run does not compute
    Rule("trainer.health.kl.action, actor.use_kl_loss",
         lambda v: v.health.kl.action == "stop" and not v.config.needs_reference,
         "without a reference there is no KL to it; set the first to off, or actor_rollout_ref.actor.use_kl_loss=true"),
    Rule(f"trainer.health.rollout_mismatch.action, {CORRECTION}.bypass_mode",
         lambda v: v.health.rollout_mismatch.action == "stop" and v.correction.bypass_mode,
         "this mode computes no log-probs to compare the sampler's with; set the action to off"),
    Rule(f"trainer.health.entropy.action, {CORRECTION}.bypass_mode, actor.entropy_coeff",
         lambda v: v.health.entropy.action == "stop" and v.correction.bypass_mode and not v.actor.computes_entropy,
         "entropy is not known in this mode; set the action to off, or entropy_coeff above 0"),
)
between_values = rules_of(*_METHOD, *_SAMPLER, *_WEIGHTS, *_PROMPTS, *_REFERENCE, *_REWARD, *_STOPPING)
surprises = rules_of(
    Rule("actor.kl_loss_type", lambda v: v.actor.use_kl_loss and v.actor.kl_loss_type in ("k1", "kl"),
         "as a loss its gradient has mean zero, so it does not regularise; use k2 or k3 (low_var_kl)"),
    Rule(f"{_LOSS}, actor.loss_agg_mode",
         lambda v: v.loss in SEQUENCE_LOSSES and v.actor.loss_agg_mode != "seq-mean-token-mean"
         and (v.loss, v.actor.loss_agg_mode) != ("gspo", "seq-mean-token-sum"),  # which is luspo
         "the loss is published with seq-mean-token-mean; this one weighs long responses differently"),
    Rule("algorithm.adv_estimator, critic.enable", lambda v: v.estimator == "gae" and not v.config.needs_critic,
         "there is no critic, so all values are 0"),
    Rule("reward_model.model.path, reward_model.enable",
         lambda v: v.scorer.model.path is not None and not v.scorer.enable, "this reward model is not asked"),
    Rule(f"{CORRECTION}.rollout_is, {CORRECTION}.bypass_mode",
         lambda v: v.config.rollout_is is None and v.correction.rollout_is not in ("auto", None),
         "the ratio to the sampler's log-probs corrects already, so the first has no effect"),
    Rule(f"trainer.max_staleness, {CORRECTION}.rollout_is",
         lambda v: v.staleness and v.config.rollout_is is None and not v.correction.bypass_mode,
         "responses may be so many updates old, and nothing corrects for it; set the second to auto"),
    Rule("rollout.over_sample_rate", lambda v: v.rollout.over_sample_rate,
         "the slowest groups are aborted, so batches are biased towards short responses, and a run cannot be repeated "
         "exactly with the same seed"),
    Rule("rollout.gpu_memory_utilization, rollout.free_cache_engine",
         lambda v: v.place.shares_gpu and v.rollout.gpu_memory_utilization > 0.5 and not v.rollout.free_cache_engine,
         "the actor shares the GPU; set the first to 0.5 or less, or the second to true"),
    Rule("cluster.colocate, trainer.max_staleness",
         lambda v: v.on_gpus and not (v.place.shares_gpu or v.trainer.samples_during_updates),
         "this runs, but the engines' GPUs wait while the actor trains, and the actor's while the engines sample. All "
         "GPUs do both in turn, as in verl, with cluster.colocate=all "
         "actor_rollout_ref.rollout.free_cache_engine=true; or set trainer.max_staleness=1"),
)
# fmt: on


@between_keys
def truncated_samples(config: RunConfig) -> Iterator[str]:
    """Note filters of what is sampled."""
    if cut := [f"<rollout.{name}>" for name in config.filters]:
        yield (
            f"{', '.join(cut)}: responses are sampled from a truncated distribution, but the trainer's log-probs are "
            "of the full one; mismatch/filters shows the difference, algorithm.rollout_correction corrects for it"
        )


# --- keys that all commands have -------------------------------------------------------------------------------------
@between_keys
def job_rules(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong between keys that all commands have."""
    trainer, validates = config.trainer, bool(config.data.val_files)
    if trainer.val_only and not validates:
        yield "<trainer.val_only>: there is nothing to validate on; set data.val_files"
    if trainer.push_to_hub is not None and not trainer.export_hf_model:
        yield "<trainer.push_to_hub>, <trainer.export_hf_model>: there is nothing to push; set export_hf_model=true"
    for key in trainer.metrics_named:
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


# --- files, code and packages ----------------------------------------------------------------------------------------
_ROLLOUT = "actor_rollout_ref.rollout"
_CODE = (*UPDATE, f"{_ROLLOUT}.name", f"{_ROLLOUT}.agent.default_agent_loop", "data.sampler.class_path")
# Settings, by how they end -> the package that they need, and what to say without it.
_PACKAGES = {
    **{f"rollout.name={engine.name}": (engine.packages[0], engine.install) for engine in builtin_backends()},
    f".optimizer={EIGHT_BIT}": ("torchao", NEEDS_TORCHAO),
    ".model_dtype=bf16": ("torchao", f"for weights that train it {NEEDS_TORCHAO}"),
}


def _own_code(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield key, value, and file or module of each function and class that the config names."""
    custom = config.custom_reward_function
    functions = [custom.path] if custom.listed is None else [entry.get("path") for entry in custom.listed]
    named = [("custom_reward_function.path", path) for path in functions]
    for key, name in [*named, *((key, value_of(config, key)) for key in _CODE)]:
        if source := parse_code(str(name or "")).source:
            yield key, str(name), source


def custom_code_exists(config: RunConfig) -> Iterator[Problem]:
    """Python files named by the config are there."""
    for key, _, source in _own_code(config):
        if (source.endswith(".py") or "/" in source) and not is_file(source):
            missing = missing_path(key, source, "file")
            if key == "custom_reward_function.path" and not source.endswith((".py", ".pkl")):  # as TRL names a model
                remedy = f"; a reward model is named by reward_model.enable=true reward_model.model.path={source}"
                missing = replace(missing, text=missing.text + remedy)
            yield missing


def code_is_not_tried(config: RunConfig) -> Iterator[Problem]:
    """Note that a dry run of the config does not look into code."""
    own = [(key, name) for key, name, _ in _own_code(config) if ":" in name or name.endswith(".py")]
    if own and config.trainer.dry_run == "config":
        named = ", ".join(f"{key}={name}" for key, name in own)
        yield Problem(f"{named}: not read and not tried; trainer.dry_run=true does that", tuple(key for key, _ in own))


def packages_are_installed(config: JobConfig) -> Iterator[Problem]:
    """On this machine, unless the workers run on a cluster that is already there."""
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS") or "local"
    for key in leaf_keys(type(config)) if address == "local" else ():
        setting = f"{key}={shown(value_of(config, key))}"
        for end, (package, what) in _PACKAGES.items():
            if setting.endswith(end) and find_spec(package) is None:
                yield Problem(f"{setting}: {what}", (key,), missing_file=True)


# --- the engine ----------------------------------------------------------------------------------------------------
def engine_of(config: JobConfig) -> RolloutBackend:
    """Return what is known of the engine that samples; of a command that has none, what is so of every engine."""
    return rollout_backend(config.actor_rollout_ref.rollout.name if isinstance(config, RunConfig) else "")


def engine_takes_it(config: RunConfig) -> Iterator[Problem]:
    """Report what the engine cannot do, and its arguments that are not to be set."""
    yield from engine_of(config).problems(config, seeded=is_deterministic(config))


def other_type(config: RunConfig) -> str | None:
    """Return the type that shows what rounding does: float32, or the engines' if that is shorter; None: neither."""
    trainer = train_dtype(config, config.actor_rollout_ref.actor.fsdp_config)
    shorter = engine_dtype(config) if trainer == "fp32" else ""
    return None if shorter == "float32" else shorter or "float32"


def engine_notes(config: RunConfig) -> Iterator[Problem]:
    """Notes on arguments that change what is sampled."""
    engine = engine_of(config)
    for key, value in engine.inexact(config).items():
        why = (
            "responses are sampled from another distribution than the one that the trainer's log-probs are of; "
            "training/rollout_probs_diff_* shows the difference, algorithm.rollout_correction corrects for it"
        )
        yield Problem(f"{key}={shown(value)}: {why}", (key,))
    if drafted := engine.unseeded(config):
        why = "drafted tokens are of the same distribution, but not those that the same seeds give without"
        yield Problem(f"{drafted}: {why}", (drafted.partition("=")[0],))
