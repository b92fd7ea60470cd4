#!/usr/bin/env bash
# GRPO on Qwen3-8B with GSM8K on one machine with 8 GPUs of 80 GB.
#
#   make setup DEVICE=gpu && .venv/bin/uv pip install --python .venv/bin/python datasets
#   .venv/bin/grpo-dist data gsm8k --local_save_dir data/gsm8k
#   bash examples/run_qwen3-8b.sh [key=value ...]
#
# `bash examples/run_qwen3-8b.sh trainer.dry_run=config` shows the batch arithmetic, the placement and the
# memory; the end of a run says which role waited.
set -euo pipefail
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"

ALGORITHM=(
  algorithm.adv_estimator=grpo
)

DATA=(
  data=gsm8k
  data.train_batch_size=960
  data.max_prompt_length=512
  data.max_response_length=1024
  data.filter_overlong_prompts=true
  data.truncation=error
  'data.apply_chat_template_kwargs={enable_thinking: false}'
)

MODEL=(
  model=qwen3_8b
  actor_rollout_ref.model.path="${MODEL_PATH:-Qwen/Qwen3-8B}"
  actor_rollout_ref.model.enable_gradient_checkpointing=true
)

ACTOR=(
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=240
  actor_rollout_ref.actor.use_dynamic_bsz=true
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  actor_rollout_ref.actor.use_kl_loss=true
  actor_rollout_ref.actor.kl_loss_coef=0.001
  actor_rollout_ref.actor.kl_loss_type=low_var_kl
  actor_rollout_ref.actor.entropy_coeff=0
)

ROLLOUT=(
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.65
  actor_rollout_ref.rollout.max_num_seqs=512
)

# All GPUs generate, then all train: none waits for another, and each sequence is of the present weights. Engines give their
# memory back meanwhile. The same in two parts, side by side and a step ahead, is 8 % slower by docs/performance.md:
#   cluster.colocate=actor_ref cluster.actor_world_size=6 cluster.rollout_world_size=2 trainer.max_staleness=1 \
#   actor_rollout_ref.rollout.gpu_memory_utilization=0.85
CLUSTER=(
  cluster=node8
  cluster.colocate=all
  actor_rollout_ref.rollout.free_cache_engine=true
)

TRAINER=(
  'trainer.logger=[console,tensorboard]'
  trainer.project_name=grpo_gsm8k
  trainer.experiment_name=qwen3_8b
  trainer.total_epochs=15
  trainer.test_freq=5
  trainer.save_freq=20
  reward.num_workers=4
)

"$python" -m grpo_dist.main \
  "${ALGORITHM[@]}" "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${CLUSTER[@]}" "${TRAINER[@]}" \
  "$@"
