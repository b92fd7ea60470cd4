#!/usr/bin/env bash
# A class as the environment of the built-in model. Arguments are appended: bash examples/environment/run.sh trainer.seed=2
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"
model=${MODEL_DIR:-models/tiny-qwen3-tools} data=${DATA_DIR:-data/auction}
mkdir -p "$model"
cp grpo_dist/assets/tiny-qwen3/* "$model"
cp examples/environment/chat_template.jinja "$model"
[[ -f $data/validation.jsonl ]] || "$python" examples/environment/auction.py "$data"

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  model=tiny \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
  'actor_rollout_ref.rollout.agent.agent_kwargs={environment: "examples/environment/auction.py:Auction", tool_parser: "examples/environment/auction.py:calls"}' \
  actor_rollout_ref.rollout.agent.max_assistant_turns=3 \
  data.train_files="$data/train.jsonl" \
  data.val_files="$data/validation.jsonl" \
  data.max_prompt_length=64 \
  data.max_response_length=300 \
  trainer.total_training_steps=16 \
  trainer.test_freq=4 \
  trainer.experiment_name=environment \
  "$@"
