#!/usr/bin/env bash
# GRPO on a real model without a GPU: a few steps of SmolLM2-135M-Instruct on GSM8K and on the built-in arithmetic task.
#
#   bash examples/run_smollm2_cpu.sh [key=value ...]         the arguments go to both runs
#
# SMOLLM2_DIR  where the model is, or is made (scripts/make_smollm2.py)       default: models/smollm2-135m-instruct
# GSM8K_DIR    GSM8K's train.jsonl and test.jsonl, original release            default: the Hugging Face hub
# DATA_DIR     where the parquet files of GSM8K are, or are written            default: data/gsm8k
# Relative paths start at the repository root.
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/smollm2.sh
source "$(dirname "${BASH_SOURCE[0]}")/smollm2.sh"

data=${DATA_DIR:-data/gsm8k}
prepare=("$python" -m grpo_dist data gsm8k --local_save_dir "$data")
[[ -z ${GSM8K_DIR:-} ]] || prepare+=(--local_dataset_path "$GSM8K_DIR")
have_gsm8k=true
if [[ ! -f $data/train.parquet || ! -f $data/test.parquet ]]; then
  "${prepare[@]}" || have_gsm8k=false
fi

# 8 prompts x 8 responses a step: two to three minutes on two AVX2 cores without bf16. The learning rate is model/smollm2_135m.yaml's.
common=(
  model=smollm2_135m
  cluster=cpu
  actor_rollout_ref.model.path="$model"
  data.train_batch_size=8
  data.val_max_samples=16
  actor_rollout_ref.actor.ppo_mini_batch_size=8
  actor_rollout_ref.rollout.n=8
  trainer.total_training_steps=3
  trainer.test_freq=3
  trainer.save_freq=-1
  trainer.project_name=smollm2
)

# The strict scorer, 64 tokens a response: next to nothing is solved in so few steps. This shows the way, not a result.
if [[ $have_gsm8k == true ]]; then
  "$python" -m grpo_dist.main "${common[@]}" \
    data=gsm8k \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.max_prompt_length=192 \
    data.max_response_length=64 \
    trainer.experiment_name=gsm8k \
    "$@"
else
  echo "GSM8K is skipped: put its train.jsonl and test.jsonl (huggingface.co/datasets/openai/gsm8k, or" \
    "github.com/openai/grade-school-math) into a folder and run again with GSM8K_DIR=FOLDER" >&2
fi

# The model cannot add three-digit numbers, so the strict scorer would give every response 0 and teach it nothing; the
# graded reward tells a near miss from a wild one.
"$python" -m grpo_dist.main "${common[@]}" \
  data=arithmetic \
  custom_reward_function.path=examples/custom_reward/reward.py \
  trainer.experiment_name=arithmetic \
  "$@"
