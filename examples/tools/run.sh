#!/usr/bin/env bash
# Tools: a calculator, a search over documents, or the agents of the planner. See README.md here.
#
#   bash examples/tools/run.sh [calculator|search|agents] [key=value ...]
#
# TOOLS_MODEL   folder of a model whose chat template has tools    default: SmolLM2-135M-Instruct with a template that does
# TOOL_PARSER   vLLM's parser for that model                       default: hermes
# SMOLLM2_DIR   where SmolLM2 is, or is made                       default: models/smollm2-135m-instruct
# DATA_DIR      where the rows are, or are written                 default: data/tools/TASK
# Relative paths start at the repository root.
set -euo pipefail
task=calculator
case ${1:-} in calculator | search | agents) task=$1 && shift ;; esac
export DEVICE=${DEVICE:-cpu}
if [[ -n ${TOOLS_MODEL:-} ]]; then
  # shellcheck source=examples/python.sh
  source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"
  model=$TOOLS_MODEL
else
  # shellcheck source=examples/smollm2.sh
  source "$(dirname "${BASH_SOURCE[0]}")/../smollm2.sh"
  with_tools=$model-tools
  [[ -d $with_tools ]] || cp -r "$model" "$with_tools"
  cp examples/tools/chat_template.jinja "$with_tools"
  model=$with_tools
fi

declare -A tools=([calculator]=tools.py:calculator [search]=tools.py:search [agents]=agents.py:ask)
file=examples/tools/${tools[$task]%:*}
data=${DATA_DIR:-data/tools/$task}
[[ -f $data/validation.jsonl ]] || "$python" "$file" "$task" "$data"

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  model=smollm2_135m \
  cluster=cpu \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
  "actor_rollout_ref.rollout.agent.agent_kwargs={tools: ['examples/tools/${tools[$task]}'], tool_parser: ${TOOL_PARSER:-hermes}}" \
  actor_rollout_ref.rollout.agent.max_assistant_turns=8 \
  data.train_files="$data/train.jsonl" \
  data.val_files="$data/validation.jsonl" \
  data.train_batch_size=8 \
  data.max_prompt_length=640 \
  data.max_response_length=256 \
  custom_reward_function.path="$file" \
  actor_rollout_ref.actor.ppo_mini_batch_size=8 \
  actor_rollout_ref.rollout.n=8 \
  trainer.total_training_steps=40 \
  trainer.test_freq=10 \
  trainer.experiment_name="tools_$task" \
  "$@"
