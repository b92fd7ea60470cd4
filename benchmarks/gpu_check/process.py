"""One part in a process of its own: a CUDA error or a memory that is full in one part does not reach the next."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import runpy
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.gpu import used_gib
from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.results import Findings, Result, Status, write_result
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a part and write what it has found, whatever comes of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--setup", type=json.loads, required=True)
    asked = parser.parse_args(arguments)
    part = next(part for part in PARTS if part.name == asked.part)
    write_result(asked.folder, run_part(part, asked.folder, asked.setup))


def run_part(part: Part, folder: Path, setup: dict[str, Any]) -> Result:
    """The result of a part."""
    started = time.monotonic()
    device, scale = setup["device"], setup["scale"]
    findings = Findings(holds=device == "cuda" and scale == "full")
    work = Work(device, SCALES[scale], folder, findings, used_gib() if device == "cuda" else None)
    status, reason = _run(part, work)
    return Result(part.name, status, setup, reason, time.monotonic() - started, tuple(work.found.figures))


def _run(part: Part, work: Work) -> tuple[Status, str]:
    if reason := why_not(part, work.device):
        return "skipped", reason
    module, _, function = part.function.partition(":")
    try:
        getattr(importlib.import_module(f"benchmarks.gpu_check.{module}"), function)(work)
    except Exception as error:  # noqa: BLE001 - the others are to run whatever this one meets
        traceback.print_exc()
        return ("out of memory" if _is_full(error) else "failed"), f"{type(error).__name__}: {error}"
    return "done", ""


def _is_full(error: Exception) -> bool:
    """Whether the GPU's memory was not enough, which is a result too."""
    from torch import OutOfMemoryError  # not before the part: vLLM's environment on CPU comes before torch

    from grpo_dist.errors import OutOfMemory

    return isinstance(error, OutOfMemoryError | OutOfMemory)


def why_not(part: Part, device: str) -> str:
    """Why a part cannot run here; "" if it can."""
    if missing := part.not_installed():
        remedy = "`make setup DEVICE=gpu` installs it" if part.layer != "engine" else "pip installs it"
        return f"{', '.join(missing)} not installed in {sys.prefix}; {remedy}"
    if device == "cpu":
        return "it asks about a GPU" if part.asks_gpu or part.gpus > 1 else ""
    if torch_is_for_cpu():
        return f"torch in {sys.prefix} is the build for CPU; take another Python, or --device cpu --scale small"
    import torch

    from grpo_dist.engines.base import compiler_problem

    if problem := compiler_problem():
        return problem
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; look at what nvidia-smi says"
    there = torch.cuda.device_count()
    return f"it needs {part.gpus} GPUs, and {there} is visible" if there < part.gpus else ""


def torch_is_for_cpu() -> bool:
    """Whether the installed torch was built without CUDA, read without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is None


if __name__ == "__main__":
    main()
