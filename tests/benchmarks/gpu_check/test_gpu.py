"""What is asked of nvidia-smi, here a script, and how memory that belongs to no tensor is counted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import gpu, roles, update
from benchmarks.gpu_check.gpu import forget_host_peak, gpu_facts, host_gib, median_seconds, used_gib
from benchmarks.gpu_check.results import Figure, Findings
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work
from grpo_dist.supervisor import process_state

ROOT = Path(__file__).parents[3]
GIB = 2**30


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The only program of that name; it finds the shell's tools."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_first_visible_gpu_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'echo "$*" >> ' + str(tmp_path / "asked")
    script += '\n[[ $* == *memory.used* ]] && echo 1536 || echo "NVIDIA H100 80GB HBM3, 580.1, 81559"'
    nvidia_smi(tmp_path, monkeypatch, script)
    assert gpu_facts() == {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.1", "gpu_mib": "81559"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert used_gib() == 1.5
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["--id=0", "--id=3"]


@pytest.mark.parametrize("script", ["echo no devices were found >&2; exit 6", "echo '[N/A]'", "true"])
def test_a_tool_without_a_gpu_knows_nothing(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, script)
    assert used_gib() is None


def test_no_tool_and_no_visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "echo 5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert used_gib() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert gpu_facts() == {}


def test_the_median_of_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 9.0, 10.0, 11.0, 20.0, 24.0])  # rounds of 9, 1 and 4 seconds
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: next(times))
    calls: list[int] = []
    assert median_seconds(lambda: calls.append(1), "cpu", rounds=3, warm_ups=2) == 4.0
    assert len(calls) == 5


def test_the_peak_of_cpu_memory_begins_anew() -> None:
    held = bytearray(200 << 20)
    high = host_gib("VmHWM")
    del held
    if not forget_host_peak():
        pytest.skip("this kernel does not let us")
    assert host_gib("VmHWM") < high - 0.1


def on_gpu(tmp_path: Path, used_before: float | None = 1.0) -> Work:
    return Work("cuda", SCALES["full"], tmp_path, Findings(holds=True), used_before)


def by_name(work: Work) -> dict[str, Figure]:
    return {figure.what: figure for figure in work.found.figures}


def test_memory_against_the_plan_and_besides_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of 10 GiB, a peak of 10.5, 12 reserved, and 14.8 of which another process had 1 before."""
    monkeypatch.setattr(update, "planned_gib", lambda work, tokens: 10.0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10.5 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 12 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 12 * GIB)
    monkeypatch.setattr(update, "used_gib", lambda: 14.8)
    update._memory(work := on_gpu(tmp_path), 2048)
    found = by_name(work)
    assert (found["of the plan"].value, found["of the plan"].met) == (pytest.approx(1.05), True)
    besides = found["GPU memory besides tensors"]
    assert (besides.value, besides.expected, besides.met) == (pytest.approx(1.8), "<= 1.5", False)
    update._memory(unknown := on_gpu(tmp_path, None), 2048)
    assert by_name(unknown)["GPU memory besides tensors"].value is None


@pytest.mark.parametrize(("after", "met"), [(10.0, True), (30.0, False)])
def test_a_killed_engine_is_waited_for_and_its_memory_counted(
    after: float, met: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process with a child; of 80 GiB the engine has 0.35, which is 28."""
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    engine = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout
    orphan = int(engine.stdout.readline())
    used = iter([38.0])
    monkeypatch.setattr(roles, "used_gib", lambda: next(used, after))
    monkeypatch.setattr(roles, "gpu_facts", lambda: {"gpu_mib": str(80 * 1024)})
    monkeypatch.setattr(roles, "FREED_S", 1.0)
    rollout = SimpleNamespace(gpu_memory_utilization=0.35)
    config: Any = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    address = SimpleNamespace(pid=engine.pid)
    workers = SimpleNamespace(call=lambda rank, stage, method: address)
    started: Any = SimpleNamespace(rollout=SimpleNamespace(workers=workers))
    try:
        roles._kill_engine(work := on_gpu(tmp_path), config, started)
    finally:
        os.kill(orphan, signal.SIGKILL)
    found = by_name(work)
    assert process_state(engine.pid) == "gone"
    left = found["of 2 processes of a killed engine still there"]
    assert (left.value, left.met) == (1.0, False), "the child outlives its parent, and is seen"
    freed = found["GPU memory freed, of the engine's share"]
    assert (freed.value, freed.met) == (pytest.approx((38 - after) / 28), met)


def test_what_the_roles_are_started_with(tmp_path: Path) -> None:
    """One GPU for all, or one each: then the weights go by NCCL."""

    from grpo_dist.plan.plan import make_plan

    work = on_gpu(tmp_path)
    work.model.mkdir()
    (work.model / "config.json").write_text(json.dumps(SCALES["full"].model))
    shared = make_plan(roles.run_config(work)).place
    sizes = {"actor": 1, "rollout": 1, "ref": 1, "reward_model": 0, "critic": 0}
    assert (shared.world_sizes, shared.shares_gpu) == (sizes, True)
    plan = make_plan(roles.run_config(work, roles.TWO_GPUS))
    apart = plan.place
    assert (apart.world_sizes, apart.num_gpus("actor")) == (sizes | {"ref": 0}, 1.0)
    assert plan.transport == "broadcast"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("stamp", "python"), [("gpu cuda13 abc", ".venv/bin/python"), ("cpu cuda13 abc", "other")])
def test_make_takes_the_environment_for_gpus_or_the_python_it_is_told(stamp: str, python: str, tmp_path: Path) -> None:
    """And sets nothing up: the build for CPU would be of no use."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / ".setup").write_text(f"{stamp}\n")
    for name in (".venv/bin/python", "other"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    command = ["make", "-s", "gpu-check", "PYTHON=./other", "CHECK=--layer engine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{python} -m benchmarks.gpu_check --layer engine\n"
