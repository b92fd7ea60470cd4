#!/usr/bin/env bash
# GRPO on Mistral-Nemo-Instruct (12B) with the scores of a reward model, Skywork-Reward-Llama-3.1-8B, on dialogues of
# HH-RLHF, on one machine with 8 GPUs of 80 GB. The keys are those of verl's script of this name.
#
#   make setup DEVICE=gpu
#   TRAIN_FILES=hh_rlhf.jsonl bash examples/run_mistral13b_skyworkrm_hhrlhf.sh [key=value ...]
#
# The model scores, so a row needs a prompt and no ground truth:
#
#   {"prompt": [{"role": "user", "content": "How do I remove a wine stain?"}]}
#
# Policy and reward model have different tokenizers: each conversation is rendered again in the reward model's own chat
# template (docs/reward_models.md).
set -euo pipefail
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"

POLICY=${MODEL_PATH:-mistralai/Mistral-Nemo-Instruct-2407}

DATA=(
  data.train_files="${TRAIN_FILES:-data/full_hh_rlhf/rl/train.parquet}"
  data.val_files=null
  data.train_batch_size=512
  data.prompt_key=prompt
  data.max_prompt_length=4096
  data.max_response_length=2048
  data.filter_overlong_prompts=true
  data.truncation=error
)

ACTOR=(
  actor_rollout_ref.model.path="$POLICY"
  actor_rollout_ref.model.enable_gradient_checkpointing=true
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=128
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10
  actor_rollout_ref.actor.use_kl_loss=false
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
)

ROLLOUT=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=5
  actor_rollout_ref.rollout.tensor_model_parallel_size=4
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=10
)

# The reward model lies on the actor's GPUs, and waits in CPU memory while the actor trains.
REWARD_MODEL=(
  reward_model.enable=true
  reward_model.model.path="${REWARD_MODEL_PATH:-Skywork/Skywork-Reward-Llama-3.1-8B}"
  reward_model.model.input_tokenizer="$POLICY"
  reward_model.model.fsdp_config.param_offload=true
  reward_model.micro_batch_size_per_gpu=4
)

TRAINER=(
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=false
  'trainer.logger=[console,tensorboard]'
  trainer.project_name=grpo_hh_rlhf
  trainer.experiment_name=mistral13b_skywork
  trainer.val_before_train=false
  trainer.n_gpus_per_node=8
  trainer.nnodes=1
  trainer.save_freq=10
  trainer.test_freq=-1
  trainer.total_epochs=5
)

"$python" -m grpo_dist.main \
  "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${REWARD_MODEL[@]}" "${TRAINER[@]}" "$@"
