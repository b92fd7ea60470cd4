#!/usr/bin/env bash
# A run on the nodes of a Slurm job; the arguments are grpo_dist's. Submit it from the repository, on a disk that all nodes
# share:
#
#   sbatch --nodes=2 examples/cluster/slurm.sh model=qwen3_8b data=gsm8k \
#     data.train_files=/shared/gsm8k/train.parquet data.val_files=/shared/gsm8k/test.parquet \
#     trainer.default_local_dir=/shared/runs/qwen3_8b
#
# GRPO_DIST_PYTHON  the interpreter on all nodes                    default: .venv's
# HEAD_ADDRESS      where the other nodes find the first one        default: its first address (hostname -I)
# NODES_WITHIN_S    how long the nodes may take to come             default: 600
#
# Before its time is up, and when it is pre-empted, Slurm sends SIGTERM to this script (--signal=B:TERM@600, in seconds).
# The run then writes a checkpoint and ends with exit code 143, the job is queued again, and the same command goes on from
# the checkpoint. Any other end is the job's: its exit code is the run's, and nothing is queued.
#   - 600 seconds must do for an update, a checkpoint and 30 s of W&B. Preemption sends the signal where slurm.conf has
#     PreemptParameters=send_user_signal; where not, and when a node fails, the run goes on from its last checkpoint.
#   - To end a run for good, with a checkpoint:    scancel --batch --signal=INT JOB
#   - Ray takes calls only with a token that is made for this start; it travels in the environment. HF_TOKEN, WANDB_API_KEY
#     and the like are set where you submit.
#   - #SBATCH lines give way to options of sbatch: --gpus-per-node, --partition, --account, --time.
#SBATCH --job-name=grpo_dist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=grpo_dist-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" # the script itself is a copy elsewhere
# shellcheck source=examples/python.sh
source examples/python.sh

nodes=$SLURM_JOB_NUM_NODES
head=${HEAD_ADDRESS:-$(hostname -I | cut -d' ' -f1)}
port=$((20000 + SLURM_JOB_ID % 10000)) # jobs may share a node
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0

driver='' stop_for='' children=()
# Only the first signal goes to the run: a second one would end it without a checkpoint.
stop() {
  stop_for=$1
  trap '' TERM INT
  [[ -n $driver ]] || exit 143 # Ray is still starting: there is nothing to save
  kill -TERM "$driver" 2>/dev/null || true
}
# Ends Ray on all nodes (`srun` and `ray start --block` pass the signal on), and has Slurm start the job again.
finish() {
  code=$?
  trap '' TERM INT
  kill "${children[@]}" 2>/dev/null || true
  wait
  if [[ $stop_for == requeue && $code == 143 ]]; then
    echo "stopped by Slurm: job $SLURM_JOB_ID is queued again, and goes on from its checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
# The exit code of a child. A signal ends `wait` before the child has ended.
result_of() {
  local before code
  while true; do
    before=$stop_for code=0
    wait "$1" || code=$?
    [[ $stop_for != "$before" ]] || return "$code"
  done
}
trap 'stop requeue' TERM
trap 'stop end' INT
trap finish EXIT

ray=("$python" -m ray.scripts.scripts start --block)
"${ray[@]}" --head --node-ip-address="$head" --port="$port" --include-dashboard=false &
children+=($!)
if ((nodes > 1)); then
  until (: <"/dev/tcp/$head/$port") 2>/dev/null; do
    kill -0 "${children[0]}" 2>/dev/null || { echo "Ray does not start at $head:$port" >&2; exit 1; }
    sleep 0.2
  done
  srun --relative=1 --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --ntasks-per-node=1 --cpu-bind=none \
    "${ray[@]}" --address="$head:$port" &
  children+=($!)
fi
"$python" examples/cluster/wait_for_nodes.py "$head:$port" "$nodes" "${NODES_WITHIN_S:-600}" &
children+=($!)
result_of $! || { echo "not all of the $nodes nodes came within ${NODES_WITHIN_S:-600} s" >&2; exit 1; }

[[ " $*" == *" cluster="* ]] || set -- cluster=multi_node trainer.nnodes="$nodes" "$@"
"$python" -m grpo_dist.main ray_kwargs.ray_init.address="$head:$port" "$@" &
driver=$!
result_of "$driver"
