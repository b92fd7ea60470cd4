"""Rules between the keys of the reference, which may be a teacher, or the policy that teaches itself."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.problems import between_keys
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_algorithm import TEXT
from grpo_dist.plugins.names import AGENT_LOOPS


@between_keys
def reference_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with a reference that moves, or is a teacher."""
    ref, moves = config.actor_rollout_ref.ref, config.actor_rollout_ref.ref.ref_model_sync_steps > 0
    in_rollout = config.needs_reference and not config.algorithm.self_distillation.enable
    if moves and config.trainer.max_staleness and in_rollout:
        why = "groups sampled ahead would be compared with different references; set one of the two to its default"
        yield f"<trainer.max_staleness>, <ref.ref_model_sync_steps>: {why}"
    if moves and config.has_teacher:
        why = "a teacher does not move towards the policy; set the first to -1, or leave the path out"
        yield f"<ref.ref_model_sync_steps>, <ref.model.path>: {why}"
    elif moves and config.actor_rollout_ref.model.lora_rank:
        why = "with LoRA the reference is the model without its factors and cannot move; set it to -1"
        yield f"<ref.ref_model_sync_steps>, <model.lora_rank>: {why}"
    taught = config.algorithm.self_distillation.enable or config.teacher_is_elsewhere
    if ref.model.path is None and not (config.trains_on_scores or taught):
        why = "the KL to a teacher is all that trains the policy; name the teacher: a folder, or a model of the hub"
        yield f"<ref.model.path>, <algorithm.adv_estimator>: {why}"
    if config.teachers and config.actor_rollout_ref.actor.kl_loss_type == "full":
        yield "<ref.model.path>, <actor.kl_loss_type>: it knows one teacher's output layer; set the second to k2"
    if config.has_teacher and not config.needs_reference:
        why = "without a KL nothing is compared with the teacher; set one of the two to true, or leave the path out"
        yield f"<ref.model.path>, <actor.use_kl_loss>, <algorithm.use_kl_in_reward>: {why}"


@between_keys
def endpoint_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with a teacher behind an endpoint, which tells of its likeliest tokens alone."""
    ref, actor, key = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor, "<ref.model.endpoint.base_url>"
    if not config.teacher_is_elsewhere:
        return
    if not str(ref.model.endpoint.base_url).startswith(("http://", "https://")):
        yield f"{key}: must be an address that begins with http:// or https:// and ends in /v1"
    if ref.model.endpoint.model is None:
        yield "<ref.model.endpoint.model>: name the model as the server does (GET base_url/models lists them)"
    if not (actor.use_kl_loss and actor.kl_loss_type == "full") or config.algorithm.use_kl_in_reward:
        why = "its tokens are compared in the loss; set the second to true, the third to full and the fourth to false"
        yield f"{key}, <actor.use_kl_loss>, <actor.kl_loss_type>, <algorithm.use_kl_in_reward>: {why}"
    if ref.model.path is not None:
        yield f"{key}, <ref.model.path>: the reference is one of the two; set the other to null"
    if ref.ref_model_sync_steps > 0:
        yield f"{key}, <ref.ref_model_sync_steps>: it does not move towards the policy; set the second to -1"
    if config.algorithm.self_distillation.enable:
        why = "a server is asked about the policy's own prompts; use one of the two"
        yield f"{key}, <algorithm.self_distillation.enable>: {why}"
    if config.actor_rollout_ref.rollout.agent.default_agent_loop not in AGENT_LOOPS[:2]:
        why = f"its episodes may have branches, which a server cannot read; use {AGENT_LOOPS[1]}"
        yield f"{key}, <rollout.agent.default_agent_loop>: {why}"


@between_keys
def self_distillation_rules(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with a reference that is shown how a question is answered."""
    section, roles, key = config.algorithm.self_distillation, config.actor_rollout_ref, "<algorithm.self_distillation"
    if not section.enable:
        return
    if not roles.actor.use_kl_loss:
        yield f"{key}.enable>, <actor.use_kl_loss>: the KL in the loss is what teaches; set the second to true"
    if config.algorithm.use_kl_in_reward:
        yield f"{key}.enable>, <algorithm.use_kl_in_reward>: it is the loss that teaches; set the second to false"
    if config.replays_routes:
        yield f"{key}.enable>, <actor.router_replay.mode>: the experts are those of another prompt; use disabled"
    if roles.rollout.agent.default_agent_loop not in AGENT_LOOPS[:2]:
        yield f"{key}.enable>, <rollout.agent.default_agent_loop>: its prompts may be its own; use {AGENT_LOOPS[1]}"
    if section.feedback_name is None and (section.success_threshold is None or roles.rollout.n == 1):
        why = "there is nothing to show: name a text, or set a score and rollout.n=2 or more"
        yield f"{key}.feedback_name>, {key}.success_threshold>, <rollout.n>: {why}"
    for name in ("success_template", "feedback_template"):
        if TEXT not in getattr(section, name):
            yield f"{key}.{name}>: it must have {TEXT}, in whose place the text is put"
