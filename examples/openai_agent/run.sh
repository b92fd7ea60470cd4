#!/usr/bin/env bash
# The main job, played by an agent that knows nothing of it. Arguments are appended: run.sh trainer.seed=2
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.rollout.agent.default_agent_loop=external \
  'actor_rollout_ref.rollout.agent.agent_kwargs={play: "examples/openai_agent/agent.py:play"}' \
  trainer.experiment_name=openai_agent \
  "$@"
