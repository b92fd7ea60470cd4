#!/usr/bin/env bash
# The built-in model is trained in an environment of verifiers 0.4, which has an interpreter of its own. See README.md here.
#
#   bash examples/verifiers/run.sh [key=value ...]           the same command goes on with a run that was stopped
#
# VERIFIERS_PYTHON   an interpreter with the environment in it    default: .venv-verifiers, which is made
# DATA_DIR           where the rows are, or are written           default: data/additions
# Relative paths start at the repository root.
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"

other=${VERIFIERS_PYTHON:-.venv-verifiers/bin/python}
data=${DATA_DIR:-data/additions}
if [[ -z ${VERIFIERS_PYTHON:-} && ! -f .venv-verifiers/.ready ]]; then
  "$python" -m venv --clear .venv-verifiers
  "$other" -m pip install --quiet --disable-pip-version-check uv ./examples/verifiers
  touch .venv-verifiers/.ready
fi
if [[ ! -f $data/validation.jsonl ]]; then
  mkdir -p "$data"
  "$other" grpo_dist/agents/verifiers_worker.py additions "$data/all.jsonl"
  tail -n 200 "$data/all.jsonl" > "$data/validation.jsonl"
  head -n -200 "$data/all.jsonl" > "$data/train.jsonl"
fi

other=$(cd "$(dirname "$other")" && pwd)/$(basename "$other")
play="{play: \"grpo_dist.agents.verifiers_worker:play\", python: \"$other\"}"
"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.rollout.agent.default_agent_loop=external \
  "actor_rollout_ref.rollout.agent.agent_kwargs=$play" \
  data.train_files="$data/train.jsonl" \
  data.val_files="$data/validation.jsonl" \
  data.max_prompt_length=64 \
  data.max_response_length=64 \
  trainer.total_training_steps=10 \
  trainer.experiment_name=verifiers \
  "$@"
