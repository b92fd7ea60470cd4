#!/usr/bin/env bash
# A real model learns on CPU: SmolLM2-135M-Instruct, to follow instructions on the form of an answer. See README.md here.
#
#   bash examples/instructions/run.sh [key=value ...]        the same command goes on with a run that was stopped
#
# SMOLLM2_DIR   where the model is, or is made (scripts/make_smollm2.py)    default: models/smollm2-135m-instruct
# DATA_DIR      where the questions are, or are written                     default: data/instructions
# Relative paths start at the repository root.
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/smollm2.sh
source "$(dirname "${BASH_SOURCE[0]}")/../smollm2.sh"

data=${DATA_DIR:-data/instructions}
[[ -f $data/validation.jsonl ]] || "$python" examples/instructions/instructions.py "$data"

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  model=smollm2_135m \
  cluster=cpu \
  actor_rollout_ref.model.path="$model" \
  data.train_files="$data/train.jsonl" \
  data.val_files="$data/validation.jsonl" \
  data.train_batch_size=8 \
  data.max_prompt_length=96 \
  data.max_response_length=64 \
  custom_reward_function.path=examples/instructions/instructions.py \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.actor.optim.lr=3e-5 \
  actor_rollout_ref.rollout.n=8 \
  trainer.total_training_steps=160 \
  trainer.test_freq=20 \
  trainer.save_freq=20 \
  trainer.experiment_name=instructions \
  "$@"
