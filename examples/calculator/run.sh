#!/usr/bin/env bash
# The main job with a calculator. Arguments are appended: bash examples/calculator/run.sh trainer.seed=2
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.rollout.agent.default_agent_loop=examples/calculator/calculator.py:Calculator \
  'actor_rollout_ref.rollout.agent.agent_kwargs={max_calls: 8}' \
  trainer.experiment_name=calculator \
  "$@"
