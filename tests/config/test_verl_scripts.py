"""Overrides as verl's example scripts for FSDP and vLLM write them pass a dry run with the module name changed."""

import pytest

from grpo_dist.plan.commands import load_config

# By script a table of overrides: a section, and what is set below it. "grpo" has the 37 most used keys, as a script on
# Qwen3-8B and GSM8K sets them; the others come behind these.
SCRIPTS = {
    "grpo": """
        algorithm adv_estimator=grpo use_kl_in_reward=False
        data train_files=/data/gsm8k/train.parquet val_files=/data/gsm8k/test.parquet train_batch_size=1024
        data max_prompt_length=512 max_response_length=1024 filter_overlong_prompts=True truncation='error'
        actor_rollout_ref.model path=Qwen/Qwen3-8B use_remove_padding=True enable_gradient_checkpointing=True
        actor_rollout_ref.actor optim.lr=1e-6 ppo_mini_batch_size=256 ppo_micro_batch_size_per_gpu=32 use_kl_loss=True
        actor_rollout_ref.actor kl_loss_coef=0.001 kl_loss_type=low_var_kl entropy_coeff=0
        actor_rollout_ref.actor.fsdp_config param_offload=False optimizer_offload=False
        actor_rollout_ref.rollout name=vllm n=5 tensor_model_parallel_size=2 gpu_memory_utilization=0.6
        actor_rollout_ref.rollout log_prob_micro_batch_size_per_gpu=32
        actor_rollout_ref.ref log_prob_micro_batch_size_per_gpu=32 fsdp_config.param_offload=True
        trainer critic_warmup=0 logger=["console","wandb"] n_gpus_per_node=8 nnodes=1 save_freq=20 test_freq=5
        trainer total_epochs=15 project_name='verl_grpo_example_gsm8k' experiment_name='qwen3_8b_function_rm'
    """,
    "rloo": """
        algorithm adv_estimator=rloo use_kl_in_reward=True kl_penalty=kl kl_ctrl.kl_coef=0.001
        actor_rollout_ref.actor use_kl_loss=False ppo_micro_batch_size=80
        actor_rollout_ref.rollout log_prob_micro_batch_size=160
        actor_rollout_ref.ref log_prob_micro_batch_size=160
        trainer balance_batch=True default_hdfs_dir=null
    """,
    "remax": """
        algorithm adv_estimator=remax use_kl_in_reward=True kl_penalty=kl kl_ctrl.kl_coef=0.001
        actor_rollout_ref.actor use_kl_loss=False use_dynamic_bsz=True ppo_max_token_len_per_gpu=30000
        actor_rollout_ref.rollout n=4 temperature=0.8
        +actor_rollout_ref.actor.profiler enable=False
    """,
    "reinforce_plus_plus": """
        algorithm adv_estimator=reinforce_plus_plus
        actor_rollout_ref.actor loss_agg_mode=token-mean kl_loss_type=mse
        actor_rollout_ref.rollout enforce_eager=False free_cache_engine=True load_format=safetensors
        actor_rollout_ref.rollout enable_chunked_prefill=False
    """,
    "gpg": """
        algorithm adv_estimator=gpg
        actor_rollout_ref.actor policy_loss.loss_mode=gpg strategy=fsdp2 use_torch_compile=False
        actor_rollout_ref.ref strategy=fsdp2
    """,
    "dapo": """
        data prompt_key=prompt truncation='left' max_prompt_length=2048 max_response_length=20480 gen_batch_size=1536
        data train_batch_size=512
        algorithm kl_ctrl.kl_coef=0.0
        algorithm.filter_groups enable=True max_num_gen_batches=10 metric=acc
        actor_rollout_ref.actor use_kl_loss=False kl_loss_coef=0.0 clip_ratio_low=0.2 clip_ratio_high=0.28
        actor_rollout_ref.actor clip_ratio_c=10.0 use_dynamic_bsz=True ppo_max_token_len_per_gpu=22528
        actor_rollout_ref.actor ppo_mini_batch_size=32 grad_clip=1.0 loss_agg_mode=token-mean
        actor_rollout_ref.actor ulysses_sequence_parallel_size=1 fsdp_config.fsdp_size=-1
        actor_rollout_ref.actor.optim lr_warmup_steps=10 weight_decay=0.1
        actor_rollout_ref.ref log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=22528
        +actor_rollout_ref.model.override_config attention_dropout=0. embd_pdrop=0. resid_pdrop=0.
        actor_rollout_ref.rollout n=16 log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=22528
        actor_rollout_ref.rollout enable_chunked_prefill=True max_num_batched_tokens=22528
        actor_rollout_ref.rollout temperature=1.0 top_p=1.0 top_k=-1
        actor_rollout_ref.rollout.val_kwargs temperature=1.0 top_p=0.7 top_k=-1 do_sample=True n=1
        reward_model reward_manager=dapo
        +reward_model.reward_kwargs.overlong_buffer_cfg enable=True len=4096 penalty_factor=1.0 log=False
        +reward_model.reward_kwargs max_resp_len=20480
        trainer val_before_train=True resume_mode=auto log_val_generations=10 total_training_steps=200
        trainer default_local_dir=/tmp/ckpts/DAPO
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_overrides_pass(name: str) -> None:
    table = (line.split() for text in dict.fromkeys(("grpo", name)) for line in SCRIPTS[text].strip().splitlines())
    overrides = [f"{section}.{each}" for section, *given in table for each in given]
    config, notes = load_config([*overrides, "trainer.dry_run=config"])
    assert config.algorithm.adv_estimator == ("grpo" if name == "dapo" else name)
    assert (config.data.train_files, config.num_gpus) == (("/data/gsm8k/train.parquet",), 8)
    if name == "dapo":
        assert (config.data.gen_batch_size, config.reward.overlong_buffer.len) == (1536, 4096)
        assert config.algorithm.filter_groups.enable
        assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28
        assert not config.needs_reference
        silent = [note for note in notes if note.startswith("no effect here")]
        assert len(silent) == 3, silent
