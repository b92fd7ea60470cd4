#!/usr/bin/env bash
# GRPO on plans for a team of agents with Qwen3-0.6B on one GPU. Another model: actor_rollout_ref.model.path=... behind it.
#
#   bash examples/planner/run_qwen3-0.6b.sh [key=value ...]
#
# PLANNER_DATA  where the generated rows are, or are written      default: data/planner, from the repository root
set -euo pipefail
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"

data=${PLANNER_DATA:-data/planner}

if [[ ! -f $data/train.parquet ]]; then
  "$python" examples/planner/planner_rows.py --local_save_dir "$data"
fi

plan='{path: examples/planner/planner.py, label: plan, weight: 0.9, reward_kwargs: {tag: plan}}'
form='{path: grpo_dist.rewards.format, label: form, weight: 0.1, reward_kwargs: {tags: [plan], format_score: 1.0}}'

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  model=qwen3_0_6b \
  cluster=single_gpu \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=64 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  data.max_prompt_length=384 \
  data.max_response_length=256 \
  'data.apply_chat_template_kwargs={enable_thinking: false}' \
  custom_reward_function.path=grpo_dist.rewards.weighted \
  "custom_reward_function.reward_kwargs={functions: [$plan, $form]}" \
  trainer.total_training_steps=100 \
  trainer.test_freq=10 \
  trainer.experiment_name=planner_qwen3_0_6b \
  "$@"
