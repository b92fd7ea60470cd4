#!/usr/bin/env bash
# Plans for a team of agents on a laptop: the built-in model learns their form by supervised fine-tuning, then GRPO puts
# their steps in order. See README.md here; run_qwen3-0.6b.sh is the same for a real model.
#
#   bash examples/planner/run.sh [key=value ...]             the arguments go to GRPO
#
# PLANNER_DATA   where the generated rows are, or are written     default: data/planner_small
# PLANNER_START  where the fine-tuned model is, or is made        default: outputs/grpo_dist/planner_sft/huggingface
# Relative paths start at the repository root.
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"

data=${PLANNER_DATA:-data/planner_small}
start=${PLANNER_START:-outputs/grpo_dist/planner_sft/huggingface}

# Seven of ten answers name the steps in the order of the request, which is wrong for two of its four forms. To copy what a
# request says takes the model most of the 1,500 steps; the habit of the wrong order is what GRPO is for.
if [[ ! -f $data/test.parquet ]]; then
  "$python" examples/planner/planner_rows.py --size small --sft_size 5600 --hasty_share 0.7 --local_save_dir "$data"
fi
if [[ ! -f $start/config.json ]]; then
  "$python" -m grpo_dist sft model=tiny data.train_files="$data/sft.parquet" data.val_files=null \
    data.train_batch_size=32 data.max_length=256 optim.lr=2e-3 trainer.total_epochs=9 trainer.total_training_steps=1500 \
    cluster.num_threads_per_worker=1 trainer.default_local_dir="$(dirname "$start")"
fi

plan='{path: examples/planner/planner.py, label: plan, weight: 0.9, reward_kwargs: {tag: plan}}'
form='{path: grpo_dist.rewards.format, label: form, weight: 0.1, reward_kwargs: {tags: [plan], format_score: 1.0}}'

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  model=tiny \
  actor_rollout_ref.model.path="$start" \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=32 \
  data.max_prompt_length=96 \
  data.max_response_length=104 \
  custom_reward_function.path=grpo_dist.rewards.weighted \
  "custom_reward_function.reward_kwargs={functions: [$plan, $form]}" \
  trainer.total_training_steps=40 \
  trainer.test_freq=4 \
  trainer.experiment_name=planner \
  cluster.num_threads_per_worker=1 \
  "$@"
