#!/usr/bin/env bash
# Programs scored by tests: the built-in model is warm-started on them, then trained. Arguments are appended to the second.
set -euo pipefail
export DEVICE=${DEVICE:-cpu}
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/../python.sh"
data=${DATA_DIR:-data/code} start=${START_DIR:-outputs/grpo_dist/code_start}
[[ -f $data/validation.jsonl ]] || "$python" examples/code/programs.py "$data"

if [[ ! -d $start/huggingface ]]; then
  "$python" -m grpo_dist sft model=tiny data.train_files="$data/answers.jsonl" optim.lr=3e-3 \
    trainer.total_training_steps=300 trainer.val_before_train=false trainer.test_freq=-1 \
    trainer.default_local_dir="$start"
fi

"$python" -m grpo_dist.main \
  algorithm.adv_estimator=grpo \
  model=tiny \
  data=code \
  actor_rollout_ref.model.path="$start/huggingface" \
  data.train_files="$data/train.jsonl" \
  data.val_files="$data/validation.jsonl" \
  data.max_prompt_length=64 \
  data.max_response_length=96 \
  data.train_batch_size=16 \
  reward.num_workers=2 \
  trainer.total_training_steps=20 \
  trainer.test_freq=5 \
  trainer.experiment_name=code \
  "$@"
