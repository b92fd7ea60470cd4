# shellcheck shell=bash
# Sourced by the examples in place of python.sh: sets `model` too, the folder of SmolLM2-135M-Instruct. It is made where it
# is missing (scripts/make_smollm2.py, which needs accelerate and gguf).
# shellcheck source=examples/python.sh
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"
model=${SMOLLM2_DIR:-models/smollm2-135m-instruct}

if [[ ! -f $model/model.safetensors ]]; then
  if ! "$python" -c 'import accelerate, gguf' 2>/dev/null; then
    if [[ -x .venv/bin/uv && $python == .venv/bin/python ]]; then
      .venv/bin/uv pip install --quiet --python "$python" accelerate gguf
    else
      "$python" -m pip install --quiet accelerate gguf
    fi
  fi
  "$python" scripts/make_smollm2.py "$model"
fi
