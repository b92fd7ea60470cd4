"""Overrides as verl's example scripts for FSDP and vLLM write them pass a dry run with the module name changed."""

import pytest

from grpo_dist.plan.commands import load_config

# The 37 most used keys, as a GRPO script on Qwen3-8B and GSM8K sets them.
GRPO = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=/data/gsm8k/train.parquet",
    "data.val_files=/data/gsm8k/test.parquet",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation='error'",
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    'trainer.logger=["console","wandb"]',
    "trainer.project_name='verl_grpo_example_gsm8k'",
    "trainer.experiment_name='qwen3_8b_function_rm'",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=20",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]
RLOO = [
    *GRPO,
    "algorithm.adv_estimator=rloo",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_penalty=kl",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "actor_rollout_ref.actor.ppo_micro_batch_size=80",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size=160",
    "actor_rollout_ref.ref.log_prob_micro_batch_size=160",
    "trainer.balance_batch=True",
    "trainer.default_hdfs_dir=null",
]
REMAX = [
    *GRPO,
    "algorithm.adv_estimator=remax",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_penalty=kl",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30000",
    "actor_rollout_ref.rollout.temperature=0.8",
    "+actor_rollout_ref.actor.profiler.enable=False",
]
REINFORCE_PLUS_PLUS = [
    *GRPO,
    "algorithm.adv_estimator=reinforce_plus_plus",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "actor_rollout_ref.actor.kl_loss_type=mse",
    "actor_rollout_ref.rollout.enforce_eager=False",
    "actor_rollout_ref.rollout.free_cache_engine=True",
    "actor_rollout_ref.rollout.load_format=safetensors",
    "actor_rollout_ref.rollout.enable_chunked_prefill=False",
]
GPG = [
    *GRPO,
    "algorithm.adv_estimator=gpg",
    "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.ref.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
]
DAPO = [
    *GRPO,
    "data.prompt_key=prompt",
    "data.truncation='left'",
    "data.max_prompt_length=2048",
    "data.max_response_length=20480",
    "data.gen_batch_size=1536",
    "data.train_batch_size=512",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.kl_loss_coef=0.0",
    "algorithm.kl_ctrl.kl_coef=0.0",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.clip_ratio_c=10.0",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.max_num_gen_batches=10",
    "algorithm.filter_groups.metric=acc",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=22528",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=22528",
    "+actor_rollout_ref.model.override_config.attention_dropout=0.",
    "+actor_rollout_ref.model.override_config.embd_pdrop=0.",
    "+actor_rollout_ref.model.override_config.resid_pdrop=0.",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
    "actor_rollout_ref.actor.optim.weight_decay=0.1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.grad_clip=1.0",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
    "actor_rollout_ref.rollout.enable_chunked_prefill=True",
    "actor_rollout_ref.rollout.max_num_batched_tokens=22528",
    "actor_rollout_ref.rollout.temperature=1.0",
    "actor_rollout_ref.rollout.top_p=1.0",
    "actor_rollout_ref.rollout.top_k=-1",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
    "actor_rollout_ref.rollout.val_kwargs.top_k=-1",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "reward_model.reward_manager=dapo",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False",
    "+reward_model.reward_kwargs.max_resp_len=20480",
    "trainer.val_before_train=True",
    "trainer.resume_mode=auto",
    "trainer.log_val_generations=10",
    "trainer.total_training_steps=200",
    "trainer.default_local_dir=/tmp/ckpts/DAPO",
]
SCRIPTS = {
    "grpo": GRPO,
    "rloo": RLOO,
    "remax": REMAX,
    "reinforce_plus_plus": REINFORCE_PLUS_PLUS,
    "gpg": GPG,
    "dapo": DAPO,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_overrides_pass(name: str) -> None:
    config, _ = load_config([*SCRIPTS[name], "trainer.dry_run=config"])
    assert config.algorithm.adv_estimator == ("grpo" if name == "dapo" else name)
    assert config.data.train_files == ("/data/gsm8k/train.parquet",)
    assert config.num_gpus == 8


def test_what_dapo_asks_for_arrives() -> None:
    config, notes = load_config([*DAPO, "trainer.dry_run=config"])
    assert config.algorithm.filter_groups.enable
    assert config.data.gen_batch_size == 1536
    assert config.reward.overlong_buffer.len == 4096
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28
    assert not config.needs_reference
    silent = [note for note in notes if note.startswith("no effect here")]
    assert len(silent) == 3, silent
