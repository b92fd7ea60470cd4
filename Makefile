# make quickstart   set up .venv and train the built-in model on the built-in task (a few minutes, no download of models)
# make test         set up and run the first tier of tests: every door, role and formula (10 minutes on two cores)
# make test-deep    the second tier: products of parameters, faults, whole runs (30 minutes)
# make test-long    what takes too long for both, but for the next two
# make chaos        kill and stop every role at every moment of a run; resume on other ranks (40 minutes)
# make test-browser the run report in Chromium, which it installs (Debian or Ubuntu, as root)
# make cluster      train on 2 and 3 machines, emulated on this one (Linux, root)
# make smollm2      train SmolLM2-135M-Instruct for a few steps on GSM8K and on arithmetic
# make gpu-check    what a machine with one NVIDIA GPU shows: kernels, updates, memory, the main job (under 10 minutes; what
#                   was cut off goes on). CHECK='--layer engine' and other arguments: docs/performance.md
# make bench        has something become slower? Counts of what updates ask of a GPU against benchmarks/gpu_counts.json,
#                   short benchmarks against benchmarks/baseline.json (a few minutes, on a quiet machine);
#                   make bench-baseline makes the figures the baseline, of ratios this kind of processor's
# make docs         the docs site, in site/: fails on a broken link
# make dist         the wheel and the source distribution, in dist/ (docs/releasing.md)
# make check        what every change must pass: format, lint, types, layers, fast tests
# make format       let ruff format and fix; make clean removes caches and builds
#
# DEVICE=cpu or gpu says what is set up; without it, gpu where nvidia-smi finds a GPU. The tests run on CPU: DEVICE=cpu for
# them on a machine with GPUs. CUDA=12 is for NVIDIA drivers before 580 (the default where one is found). PYTHON names the
# interpreter that .venv is made with (3.11 or 3.12), and that runs gpu-check where .venv is not for GPUs.
# `make constraints` writes constraints/*.txt, the versions of all packages, anew.

BIN := .venv/bin
# Read when it is used, which is after the set-up.
ONE_MACHINE = $(shell grep -q '^gpu' .venv/.setup && echo single_gpu || echo cpu)
CODE := $(wildcard grpo_dist tests scripts benchmarks examples conformance)

export PYTHON DEVICE CUDA

.PHONY: help constraints setup quickstart smollm2 test test-deep test-long test-browser chaos cluster gpu-check bench bench-baseline
.PHONY: docs dist check format clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

setup:
	@bash scripts/setup.sh

constraints: setup
	@bash scripts/constraints.sh

quickstart: setup
	$(BIN)/python -m grpo_dist.main algorithm.adv_estimator=grpo cluster=$(ONE_MACHINE)

smollm2: setup
	bash examples/run_smollm2_cpu.sh

# Tests that start a cluster or time something run alone.
test: setup
	$(BIN)/python -m pytest -n 2 -m "not ray and not slow and not long and not deep"
	$(BIN)/python -m pytest -m "(ray or slow) and not long and not deep"

test-deep: setup
	$(BIN)/python -m pytest -n 2 -m "(deep or hypothesis) and not ray and not slow and not long" --hypothesis-profile=deep
	$(BIN)/python -m pytest -m "deep and (ray or slow) and not long"

test-long: setup
	$(BIN)/python -m pytest -m long --ignore=tests/chaos --ignore=tests/cluster

test-browser: setup
	command -v chromium > /dev/null || (apt-get update -qq && apt-get install -y -qq chromium)
	.venv/bin/uv pip install --quiet --python $(BIN)/python playwright
	$(BIN)/python -m pytest tests/browser

chaos: setup
	$(BIN)/python -m pytest -m long tests/chaos -s

# All of them, also those of `make test-deep`. -rs: why a machine cannot do it.
cluster: setup
	$(BIN)/python -m pytest -m "long or not long" tests/cluster -rs

# Sets nothing up: a part that lacks something says so.
gpu-check:
	$$(grep -qs '^gpu' .venv/.setup && echo $(BIN)/python || echo $(or $(PYTHON),python3)) -m benchmarks.gpu_check $(CHECK)

bench: setup
	$(BIN)/python -m benchmarks.gpu_counts
	$(BIN)/python -m benchmarks.regressions

bench-baseline: setup
	$(BIN)/python -m benchmarks.gpu_counts --write
	$(BIN)/python -m benchmarks.regressions --write

check: setup
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -m "not ray and not slow and not long and not deep"

# mkdocs-material advertises on every build, but for this variable.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: setup
	bash scripts/dist.sh

format: setup
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# Caches and builds. Runs (outputs/), models/, data/ and .venv stay.
clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
