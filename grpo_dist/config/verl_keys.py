"""verl's keys that are not keys here: renamed ones, ones without a meaning, and those of back ends that are not here.

So that a verl script for FSDP and vLLM runs with only the module name changed. A pattern ending in `.*` covers a whole
section. docs/config.md lists all of this.
"""

from __future__ import annotations

from dataclasses import dataclass

# Same meaning, other name: today's or an earlier one of verl's.
RENAMED = {
    **{
        f"{section}.{name}": f"reward.overlong_buffer.{name}"
        for section in (
            "reward_model.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
        for name in ("enable", "len", "penalty_factor")
    },
    **{
        f"reward.custom_reward_function.{name}": f"custom_reward_function.{name}"
        for name in ("path", "name", "reward_kwargs")
    },
    "reward_model.num_workers": "reward.num_workers",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    ),
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "actor_rollout_ref.ref.fsdp_config.dtype",
    "actor_rollout_ref.model.torch_dtype": "actor_rollout_ref.actor.fsdp_config.model_dtype",
}


@dataclass(frozen=True)
class Foreign:
    """A key of verl's that does nothing here.

    Attributes:
        text: why it has no effect; for a refused one, what to use instead.
        only: values for which that is true; others are refused. (): any value.
        refused: whether the key is an error.
    """

    text: str
    only: tuple[str, ...] = ()
    refused: bool = False


_SEPARATE = "trainer and engine are separate processes"
_PER_GPU = "micro-batches are set per GPU, and never change the loss"
_NO_CRITIC = "no method here has a critic"
_FULL_FILES = "checkpoints always hold model, optimizer and random states"
_ONE = ("1",)
_OFF = ("false", "null")
_PROFILER = "there is no profiler; timing_s/* and memory are always logged"
_MEGATRON = "training is by FSDP2; use actor_rollout_ref.actor.strategy=fsdp2 and leave the megatron keys out"
_TEXT_ONLY = "models and data here are text only; leave it out"
_REWARD_MODEL = "there is no reward model worker; serve the model and use grpo_dist.rewards.http_reward"
_A, _R, _F, _M = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref", "model"))

FOREIGN: dict[str, Foreign] = {
    # what has no meaning here
    f"{_A}.strategy": Foreign("training is always FSDP2", ("fsdp", "fsdp2")),
    f"{_F}.strategy": Foreign("the reference is always FSDP2", ("fsdp", "fsdp2")),
    f"{_A}.ppo_micro_batch_size": Foreign(_PER_GPU),
    f"{_R}.log_prob_micro_batch_size": Foreign(_PER_GPU),
    f"{_F}.log_prob_micro_batch_size": Foreign(_PER_GPU),
    f"{_A}.ulysses_sequence_parallel_size": Foreign("sequences are not split over GPUs", _ONE),
    f"{_F}.ulysses_sequence_parallel_size": Foreign("sequences are not split over GPUs", _ONE),
    f"{_A}.use_torch_compile": Foreign("the compiler is used where it helps"),
    f"{_F}.use_torch_compile": Foreign("the compiler is used where it helps"),
    f"{_A}.entropy_checkpointing": Foreign("entropy never holds all logits"),
    f"{_F}.entropy_checkpointing": Foreign("entropy never holds all logits"),
    f"{_A}.entropy_from_logits_with_chunking": Foreign("entropy never holds all logits"),
    f"{_F}.entropy_from_logits_with_chunking": Foreign("entropy never holds all logits"),
    f"{_A}.calculate_sum_pi_squared": Foreign("it is a diagnostic of verl's"),
    f"{_A}.data_loader_seed": Foreign("actor.shuffle is seeded by trainer.seed"),
    f"{_A}.checkpoint.*": Foreign(_FULL_FILES),
    f"{_A}.fsdp_config.forward_prefetch": Foreign("FSDP2 prefetches by itself"),
    f"{_F}.fsdp_config.forward_prefetch": Foreign("FSDP2 prefetches by itself"),
    f"{_A}.fsdp_config.use_orig_params": Foreign("FSDP2 always keeps them"),
    f"{_A}.fsdp_config.wrap_policy.*": Foreign("every decoder layer is a unit of its own"),
    f"{_F}.fsdp_config.wrap_policy.*": Foreign("every decoder layer is a unit of its own"),
    f"{_A}.fsdp_config.mixed_precision.*": Foreign("gradients are always reduced in fp32"),
    f"{_F}.fsdp_config.mixed_precision.*": Foreign("gradients are always reduced in fp32"),
    f"{_M}.use_shm": Foreign("every role reads the model folder itself"),
    f"{_M}.use_fused_kernels": Foreign("the output layer is always computed in chunks"),
    f"{_M}.enable_activation_offload": Foreign("activations are recomputed, not offloaded", _OFF),
    f"{_M}.external_lib": Foreign("Python files are named where they are used", _OFF),
    f"{_R}.mode": Foreign("the engine is always driven request by request"),
    f"{_R}.load_format": Foreign("the engine gets its weights from the actor before the first step"),
    f"{_R}.layered_summon": Foreign("weights are always gathered tensor by tensor"),
    f"{_R}.calculate_log_probs": Foreign("the sampler's log-probs are always kept"),
    f"{_R}.checkpoint_engine.*": Foreign("there is nothing more to set for a transport of weights"),
    f"{_R}.disable_log_stats": Foreign("the engine's own log is off"),
    f"{_R}.enable_prefix_caching": Foreign("always on", ("true",)),
    f"{_R}.data_parallel_size": Foreign("engines are counted by cluster.rollout_world_size", _ONE),
    f"{_R}.expert_parallel_size": Foreign("experts are not split over GPUs", _ONE),
    f"{_R}.multi_turn.enable": Foreign(
        "several turns are an agent loop, named by rollout.agent.default_agent_loop", _OFF
    ),
    f"{_R}.multi_turn.*": Foreign("options of an agent loop are rollout.agent.agent_kwargs"),
    f"{_R}.agent.num_workers": Foreign("episodes run beside their engine, as many as it has prompts"),
    f"{_R}.agent.agent_loop_config_path": Foreign("rollout.agent.default_agent_loop names the class itself", _OFF),
    f"{_R}.agent.agent_loop_manager_class": Foreign("the engine is always driven request by request", _OFF),
    f"{_R}.agent.custom_async_server.*": Foreign("the engine is always driven request by request"),
    "actor_rollout_ref.hybrid_engine": Foreign(_SEPARATE),
    "data.val_batch_size": Foreign("the validation set is one batch"),
    "data.return_raw_chat": Foreign("the engine gets token ids"),
    "data.return_raw_input_ids": Foreign("the engine gets token ids"),
    "data.return_full_prompt": Foreign("the engine gets token ids"),
    "data.return_multi_modal_inputs": Foreign("data here are text only"),
    "data.min_response_length": Foreign("verl does not read it either"),
    "data.trust_remote_code": Foreign("actor_rollout_ref.model.trust_remote_code holds for the tokenizer too"),
    "data.filter_overlong_prompts_workers": Foreign("prompts are tokenized in one pass"),
    "data.dataloader_num_workers": Foreign("prompts are tokenized in one pass"),
    "data.validation_shuffle": Foreign("the order of validation rows changes nothing"),
    "data.tokenizer": Foreign("the tokenizer is the model's", _OFF),
    "reward_model.reward_manager": Foreign(
        "the buffer, a batch function and parallel scoring are settings of their own",
        ("naive", "dapo", "prime", "batch"),
    ),
    "reward.reward_manager.name": Foreign(
        "the buffer, a batch function and parallel scoring are settings of their own",
        ("naive", "dapo", "prime", "batch"),
    ),
    "reward.reward_manager.*": Foreign("the reward function is custom_reward_function.path"),
    "reward_model.reward_kwargs.max_resp_len": Foreign("data.max_response_length is"),
    "reward.reward_kwargs.max_resp_len": Foreign("data.max_response_length is"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": Foreign("the penalty is always logged"),
    "reward.reward_kwargs.overlong_buffer_cfg.log": Foreign("the penalty is always logged"),
    "reward_model.overlong_buffer.log": Foreign("the penalty is always logged"),
    "reward_model.launch_reward_fn_async": Foreign("scoring always overlaps with generation"),
    "reward_model.use_reward_loop": Foreign("scoring always overlaps with generation"),
    "critic.*": Foreign(_NO_CRITIC),
    "trainer.critic_warmup": Foreign(_NO_CRITIC),
    "trainer.max_critic_ckpt_to_keep": Foreign(_NO_CRITIC),
    "trainer.device": Foreign("trainer.n_gpus_per_node decides", ("cuda", "cpu", "null")),
    "trainer.balance_batch": Foreign("ranks always get rows of balanced length"),
    "trainer.use_legacy_worker_impl": Foreign("there is one implementation"),
    "trainer.rollout_data_dir": Foreign("samples are in rollouts/ of the run directory"),
    "trainer.validation_data_dir": Foreign("samples are in validation/ of the run directory"),
    "trainer.default_hdfs_dir": Foreign("checkpoints go to trainer.default_local_dir", _OFF),
    "trainer.del_local_ckpt_after_load": Foreign("trainer.max_actor_ckpt_to_keep is the rule", _OFF),
    "trainer.remove_previous_ckpt_in_save": Foreign("trainer.max_actor_ckpt_to_keep is the rule"),
    "trainer.ray_wait_register_center_timeout": Foreign("workers find each other through Ray"),
    "algorithm.norm_adv_by_std_in_gdpo": Foreign("each component is always divided by its deviation", ("true",)),
    "ray_kwargs.timeline_json_file": Foreign(_PROFILER, _OFF),
    "global_profiler.*": Foreign(_PROFILER),
    **{f"{role}.profiler.*": Foreign(_PROFILER) for role in (_A, _R, _F)},
    # what is not here
    f"{_M}.lora_adapter_path": Foreign("training starts from fresh factors", _OFF),
    "reward_model.enable": Foreign(_REWARD_MODEL, _OFF),
    "reward_model.model.*": Foreign(_REWARD_MODEL, refused=True),
    "reward_model.rollout.*": Foreign(_REWARD_MODEL, refused=True),
    **{f"{role}.megatron.*": Foreign(_MEGATRON, refused=True) for role in (_A, _F, "critic")},
    f"{_R}.engine_kwargs.sglang.*": Foreign("the engine is vLLM; use engine_kwargs.vllm", refused=True),
    f"{_R}.engine_kwargs.trtllm.*": Foreign("the engine is vLLM; use engine_kwargs.vllm", refused=True),
    "data.image_key": Foreign(_TEXT_ONLY, refused=True),
    "data.video_key": Foreign(_TEXT_ONLY, refused=True),
    "data.image_patch_size": Foreign(_TEXT_ONLY, refused=True),
    f"{_A}.freeze_vision_tower": Foreign(_TEXT_ONLY, refused=True),
    f"{_R}.engine_kwargs.vllm.disable_mm_preprocessor_cache": Foreign("text needs no such cache"),
    f"{_R}.engine_kwargs.vllm.mm_processor_cache_gb": Foreign("text needs no such cache"),
    "data.custom_cls.*": Foreign(
        "rows are read in verl's schema; write them with a script, as grpo_dist.tasks.prepare does", refused=True
    ),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": Foreign(
        "write both bounds as rollout_rs_threshold=lower_upper", refused=True
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": Foreign(
        "use rollout_rs=seq_max_k2 with rollout_rs_threshold", refused=True
    ),
    "async_training.staleness_threshold": Foreign("use trainer.max_staleness, in updates", refused=True),
    "async_training.partial_rollout": Foreign("use actor_rollout_ref.rollout.partial_rollout", refused=True),
    "async_training.*": Foreign("sampling ahead of the update is trainer.max_staleness"),
    "algorithm.rollout_is": Foreign("use algorithm.rollout_correction.rollout_is", refused=True),
    "algorithm.rollout_is_threshold": Foreign("use algorithm.rollout_correction.rollout_is_threshold", refused=True),
}
# Command-line flags of verl's scripts for other back ends.
FLAGS = {"--config-name": "there is one root config; leave it out", "--config-path": "there is one root config"}


def foreign_key(key: str) -> Foreign | None:
    """The entry for `key`: its own, or that of the longest section that holds it."""
    if key in FOREIGN:
        return FOREIGN[key]
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        found = FOREIGN.get(".".join(parts[:length]) + ".*")
        if found is not None:
            return found
    return None
