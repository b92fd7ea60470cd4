#!/usr/bin/env bash
# Build the wheel and the source distribution. Usage: scripts/dist.sh [FOLDER]      default: dist
# From what git knows of this commit, so that nothing else gets into them; in a copy, so that nothing is left here.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root/dist}
uv=${UV:-$root/.venv/bin/uv} python=${PYTHON:-$root/.venv/bin/python}
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git -C "$root" ls-files -z -- grpo_dist pyproject.toml README.md LICENSE |
  (cd "$root" && xargs -0 cp --parents -t "$copy")
mkdir -p "$out"
# The environment has the setuptools that pyproject.toml asks for: nothing is downloaded.
"$uv" build --quiet --no-build-isolation --python "$python" --out-dir "$out" "$copy"
ls -1 "$out"/grpo_dist-*
