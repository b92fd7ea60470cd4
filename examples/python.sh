# shellcheck shell=bash
# Sourced by the examples: goes to the repository root and sets `python`, the interpreter with grpo_dist in it:
# $GRPO_DIST_PYTHON, else .venv's, else the active environment's, else that of a new .venv (scripts/setup.sh, for $DEVICE;
# where that is empty, for the GPUs of this machine if there are any). A build that cannot do what an example asks for is
# refused before Ray starts, with what to do.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${GRPO_DIST_PYTHON:-}
if [[ -z $python && -x .venv/bin/python ]]; then
  python=.venv/bin/python
elif [[ -z $python ]] && python3 -c 'import hydra, ray, vllm.version' 2>/dev/null; then
  python=python3
elif [[ -z $python ]]; then
  bash scripts/setup.sh || exit
  python=.venv/bin/python
fi
