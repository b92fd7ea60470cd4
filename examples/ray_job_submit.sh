#!/usr/bin/env bash
# Run a job on a Ray cluster that is already there; the arguments are grpo_dist's.
#
#   bash examples/ray_job_submit.sh [key=value ...]
#
# RAY_API_SERVER_ADDRESS  the cluster's dashboard                     default: http://127.0.0.1:8265
# JOB_PYTHON              the interpreter on the cluster's nodes      default: python
#
# One machine:        ray start --head
# Several machines:   head$  ray start --head --port=6379 --dashboard-host=0.0.0.0
#                     other$ ray start --address=HEAD:6379
#                     bash examples/ray_job_submit.sh cluster=multi_node trainer.nnodes=2 model=qwen3_8b data=gsm8k \
#                       data.train_files=/shared/gsm8k/train.parquet data.val_files=/shared/gsm8k/test.parquet \
#                       trainer.default_local_dir=/shared/runs/qwen3_8b
#   - The dashboard runs any code it is sent: keep its port inside your own network, and protect the cluster with Ray's
#     token (RAY_AUTH_MODE=token for `ray start` on every node and for this script; `ray get-auth-token --generate`).
#   - "Missing authentication token": `ray start` turns token authentication on by itself where a token is there
#     (~/.ray/auth_token, which any earlier local run has made), this command does not. Run it with RAY_AUTH_MODE=token.
#   - Every node has the same Python, Ray and grpo_dist's packages (make setup DEVICE=gpu, or the Docker image).
#   - --working-dir sends this folder to all nodes, except what .gitignore names and the folders of runs, which are listed:
#     Ray takes 512 MiB. The job runs in a copy that is deleted afterwards, so data, models and
#     trainer.default_local_dir are absolute paths on a shared disk (or hub names); a relative trainer.default_local_dir
#     lies in the home folder of the head. Your own reward or estimator in this folder is sent along.
#   - HF_TOKEN, HF_ENDPOINT, WANDB_*, proxies, NCCL_*, TORCH_NCCL_* and GLOO_SOCKET_IFNAME that are set where the run starts
#     reach its workers on all nodes (a job runs on the head: set them for `ray start` there). What names a folder, such as
#     HF_HOME, each node sets for itself. Each node downloads a model of the hub once; one that cannot get it, or lacks a
#     folder, is named.
#   - Follow a job: ray job logs -f ID. End it: ray job stop ID; its workers end with it. It has 3 seconds after SIGTERM, too
#     few for a checkpoint: set RAY_JOB_STOP_WAIT_TIME_S=600 for `ray start` on the head.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ray=ray
[[ -x .venv/bin/ray && -z $(command -v ray) ]] && ray=.venv/bin/ray

address=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}
if ! answer=$("$ray" job list --address "$address" 2>&1); then
  echo "RAY_API_SERVER_ADDRESS=$address: no cluster takes jobs there: $(tail -n 1 <<<"$answer")" >&2
  echo "start one with: ray start --head; or set the address of its dashboard" >&2
  exit 2
fi

# By their checkpoints or metrics, as patterns of .gitignore; those at the top of this folder one by one.
runs=$(find . \( -name .git -o -name '.venv*' \) -prune -o \
  \( -name 'global_step_*' -o -name latest_checkpointed_iteration.txt -o -name metrics.jsonl \) -prune -print |
  sed -E -e 's|^\./([^/]+)$|/\1|' -e t -e 's|^\.(.*)/[^/]+$|\1|' | sort -u)
[[ -z $runs ]] || sed 's/^/not sent along: /' <<<"$runs" >&2
excludes=$(sed -E -e '/^$/d' -e 's/[][*?!\ ]/\\&/g' -e 's/["\]/\\&/g' -e 's/.*/"&"/' <<<"$runs" | paste -s -d , -)

exec "$ray" job submit \
  --address "$address" \
  --working-dir . \
  --runtime-env-json "{\"excludes\": [$excludes]}" \
  -- "${JOB_PYTHON:-python}" -m grpo_dist.main "$@"
