#!/usr/bin/env bash
# The main job with a reward of your own. Arguments are appended: bash examples/custom_reward/run.sh trainer.seed=2
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  custom_reward_function.path=examples/custom_reward/reward.py \
  custom_reward_function.name=compute_score \
  'custom_reward_function.reward_kwargs={partial_credit: 0.5}' \
  trainer.experiment_name=custom_reward \
  "$@"
