"""What each part says of what it has measured: on faked GPUs and numbers, and what runs on CPU for real."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu_check import gpu, hybrid, ipc, kernels, roles, runners, update
from benchmarks.gpu_check.gpu import gpu_facts, median_seconds, used_gib
from benchmarks.gpu_check.model import write_model
from benchmarks.gpu_check.results import Figure, Findings, Result, write_result
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work
from grpo_dist.engines.weights.broadcast import Receipt
from grpo_dist.errors import WeightSyncError
from grpo_dist.plan.plan import make_plan
from grpo_dist.supervisor import process_state
from tests.messages import refuses, says
from tests.programs import program

ROOT = Path(__file__).parents[3]
GIB = 2**30


def on_cpu(folder: Path) -> Work:
    return Work("cpu", SCALES["small"], folder, Findings(holds=False))


def by_name(work: Work) -> dict[str, Figure]:
    return {figure.what: figure for figure in work.found.figures}


def missed(work: Work) -> list[Figure]:
    return [figure for figure in work.found.figures if figure.met is False]


# --- the GPU's tool and clocks ---------------------------------------------------------------------------------------
def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """The only program of that name; it finds the shell's tools."""
    program(folder / "nvidia-smi", script)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_first_visible_gpu_is_asked_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'echo "$*" >> ' + str(tmp_path / "asked")
    script += '\n[[ $* == *memory.used* ]] && echo 1536 || echo "NVIDIA H100 80GB HBM3, 580.1, 81559"'
    nvidia_smi(tmp_path, monkeypatch, script)
    assert gpu_facts() == {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.1", "gpu_mib": "81559"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert used_gib() == 1.5
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["--id=0", "--id=3"]
    for script in ("echo no devices were found >&2; exit 6", "echo '[N/A]'", "true"):
        nvidia_smi(tmp_path, monkeypatch, script)
        assert used_gib() is None
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


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("stamp", "python"), [("gpu cuda13 abc", ".venv/bin/python"), ("cpu cuda13 abc", "other")])
def test_make_takes_the_environment_for_gpus_or_the_python_it_is_told(stamp: str, python: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (".venv/bin/python", "other"):
        program(tmp_path / name, f'echo {name} "$@"')
    (tmp_path / ".venv" / ".setup").write_text(f"{stamp}\n")
    command = ["make", "-s", "gpu-check", "PYTHON=./other", "CHECK=--layer engine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{python} -m benchmarks.gpu_check --layer engine\n"


def test_what_the_roles_are_started_with(tmp_path: Path) -> None:
    work = on_gpu(tmp_path)
    work.model.mkdir()
    (work.model / "config.json").write_text(json.dumps(SCALES["full"].model))
    shared, apart = make_plan(roles.run_config(work)).place, make_plan(roles.run_config(work, roles.TWO_GPUS))
    sizes = {"actor": 1, "rollout": 1, "ref": 1, "reward_model": 0, "critic": 0}
    assert (shared.world_sizes, shared.shares_gpu) == (sizes, True)
    assert (apart.place.world_sizes, apart.place.num_gpus("actor")) == (sizes | {"ref": 0}, 1.0)
    assert apart.transport == "broadcast"


def on_gpu(folder: Path, used_before: float | None = 1.0) -> Work:
    return Work("cuda", SCALES["full"], folder, Findings(holds=True), used_before)


def test_memory_against_the_plan_and_besides_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of 10 GiB, a peak of 10.5, 12 reserved, and 14.8 of which another process had 1 before."""
    monkeypatch.setattr(update, "planned_gib", lambda work, tokens: 10.0)
    for name, gib in (("max_memory_allocated", 10.5), ("max_memory_reserved", 12), ("memory_reserved", 12)):
        monkeypatch.setattr(torch.cuda, name, lambda gib=gib: gib * GIB)
    monkeypatch.setattr(update, "used_gib", lambda: 14.8)
    update._memory(work := on_gpu(tmp_path), 2048)
    found = by_name(work)
    assert (found["of the plan"].value, found["of the plan"].met) == (pytest.approx(1.05), True)
    besides = found["GPU memory besides tensors"]
    assert (besides.value, besides.expected, besides.met) == (pytest.approx(1.8), "<= 1.5", False)
    update._memory(unknown := on_gpu(tmp_path, None), 2048)
    assert by_name(unknown)["GPU memory besides tensors"].value is None


@pytest.mark.parametrize(("after", "met"), [pytest.param(10.0, True, marks=pytest.mark.deep), (30.0, False)])
def test_a_killed_engine_is_waited_for_and_its_memory_counted(after, met, tmp_path, monkeypatch) -> None:
    """A real process with a child; of 80 GiB the engine has 0.35, which is 28."""
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    engine = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout
    orphan, used = int(engine.stdout.readline()), iter([38.0])
    monkeypatch.setattr(roles, "used_gib", lambda: next(used, after))
    monkeypatch.setattr(roles, "gpu_facts", lambda: {"gpu_mib": str(80 * 1024)})
    monkeypatch.setattr(roles, "FREED_S", 1.0)
    config = mock.MagicMock(**{"actor_rollout_ref.rollout.gpu_memory_utilization": 0.35})
    started = mock.MagicMock(**{"rollout.workers.call.return_value.pid": engine.pid})
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


# --- hybrid sharding -------------------------------------------------------------------------------------------------
COPY = {"grad_norm": 3.0, "weights": "a", "axes": {"replicate": 2, "shard": 1}, "limits": [hybrid.TIMEOUT_S] * 2}


@pytest.mark.long
def test_two_copies_take_the_step_of_a_single_rank(tmp_path: Path) -> None:
    write_model(on_cpu(tmp_path))
    hybrid.hybrid_sharding(work := on_cpu(tmp_path))
    assert [figure.met for figure in work.found.figures] == [True] * 6
    loss, norm, *_, axes, limits = work.found.figures
    says([loss.note, norm.note, axes.note], "single rank")
    says(axes.note, "replicate 2", "shard 1")
    says(limits.note, "345", "nccl_timeout=345")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({}, None),  # the losses of the copies, 0.2 and 0.3, are added up
        ({"loss": 0.4}, "loss"),
        ({"grad_norm": 6.0}, "gradient norm of rank 1"),
        ({"grad_norm": float("nan")}, "gradient norm of rank 1"),
        ({"weights": "b"}, "copies"),
        ({"limits": [600.0, hybrid.TIMEOUT_S]}, "nccl_timeout"),
        ({"axes": {"shard": 2}}, "shard"),
    ],
)
def test_copies_that_do_not_agree(wrong, told, tmp_path, monkeypatch) -> None:
    one = COPY | {"loss": 0.2} | {key: wrong[key] for key in ("axes",) if key in wrong}
    answers = iter([[COPY | {"loss": 0.5}], [one, COPY | {"loss": 0.3} | wrong]])
    monkeypatch.setattr(hybrid, "_updates", lambda work, ranks: next(answers))
    hybrid.hybrid_sharding(work := on_cpu(tmp_path))
    assert len(missed(work)) == (told is not None)
    assert all(told is None or told in figure.what + figure.note for figure in missed(work))


# --- weights from process to process ---------------------------------------------------------------------------------
SENDER = {"refused": "", "place": "GPU 1f2e", "bytes": 2e9, "seconds": 0.1, "busy": True}
RECEIVER = {"refused": "", "place": "GPU 1f2e", "tensors": 24, "others": 0, "early": 0}


def noted(tmp_path: Path, name: str, sender: dict[str, Any], receiver: dict[str, Any]) -> dict[str, Figure]:
    ipc.note_pair(work := on_cpu(tmp_path), name, SENDER | sender, RECEIVER | receiver)
    return {what.removeprefix(f"{name}: "): figure for what, figure in by_name(work).items()}


@pytest.mark.deep
def test_two_pairs_of_processes_hand_weights_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four real processes; on CPU the memory that they share is in files. Four versions of six tensors each."""
    monkeypatch.setattr(ipc, "is_wsl", lambda: False)
    ipc.ipc(work := on_cpu(tmp_path))
    found = by_name(work)
    for name in ipc.SETTINGS:
        assert found[f"{name}: of 24 tensors arrived as others"].met
        assert found[f"{name}: bytes read before they were written"].met
        assert found[f"{name}: packed, checked and copied"].value
    assert len(found) == 10


def test_a_pair_has_the_setting_of_the_allocator_but_in_linux_under_windows(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[Any] = []

    def run_ranks(function: str, environments: Any, arguments: Any, limit_s: float) -> list[dict[str, Any]]:
        asked.extend(environments)
        return [SENDER, RECEIVER] * 2

    monkeypatch.setattr(ipc, "run_ranks", run_ranks)
    for wsl in (False, True):
        monkeypatch.setattr(ipc, "is_wsl", lambda wsl=wsl: wsl)
        ipc.ipc(work := on_cpu(tmp_path))
    expandable = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
    assert asked == [dict.fromkeys(expandable, "")] * 2 + [expandable] * 2
    (figure,) = work.found.figures
    assert figure.value is figure.met is None
    says(figure.note, "WSL", "object_store")


@pytest.mark.parametrize("name", ipc.SETTINGS)
def test_what_is_wrong_is_wrong_with_either_setting(name: str, tmp_path: Path) -> None:
    for wrong, figure in (
        ({"others": 1}, "of 24 tensors arrived as others"),
        ({"early": 5}, "bytes read before they were written"),
        ({"place": "GPU 3d4c"}, "GPUs of the two by UUID that differ"),
    ):
        assert [what for what, each in noted(tmp_path, name, {}, wrong).items() if each.met is False] == [figure]
    found = noted(tmp_path, name, {"refused": "rank 1 is gone"}, {"refused": "pidfd_getfd: Operation not permitted"})
    assert (found["refused"].value, found["refused"].met, len(found)) == (1.0, False, 2)
    says(found["refused"].note, "pidfd_getfd", "rank 1")
    idle = noted(tmp_path, name, {"busy": False}, {})
    assert idle["packed, checked and copied"].value == pytest.approx(20.0)  # 2 GB in 0.1 s
    says(idle["bytes read before they were written"].note, "idle")


def test_bytes_and_tensors_that_arrive_as_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four versions comes with another tensor, and three bytes are read before they are written."""
    weights = {"a": torch.ones(2), "b": torch.ones(3)}

    def receive(group: Any, *, version: int, load: Any) -> Receipt:
        load([("a", weights["a"]), ("b", weights["b"] + (version == 1))])
        return Receipt(1)

    group: Any = SimpleNamespace(device=torch.device("cpu"), wait=lambda under_way: None)
    group.broadcast = lambda data: data.fill_(ipc.WRITTEN)[:3].zero_()
    monkeypatch.setattr(ipc, "receive", receive)
    signals = SimpleNamespace(set=lambda key, value: None)
    found = ipc._received(group, signals, lambda version: list(weights.items()))
    assert found == {"tensors": 8, "others": 1, "early": 3}
    monkeypatch.setattr(ipc, "receive", lambda group, **options: Receipt(0, "RuntimeError: cannot be opened"))
    with refuses(WeightSyncError, "opened"):
        ipc._received(group, signals, lambda version: [])


# --- kernels, and vLLM's two model runners ---------------------------------------------------------------------------
@pytest.mark.parametrize("rows", kernels.ROWS_OF_TWO)
def test_wrong_rows_of_two_tokens_are_seen(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel under which the first token sees the second one."""
    sees_all = kernels._sdpa(torch.ones(1, 1, 2, 2, dtype=torch.bool))
    monkeypatch.setattr(kernels, "_flex", lambda segments: sees_all)
    kernels._rows_of_two(work := on_cpu(tmp_path), rows)
    assert [figure.met for figure in work.found.figures] == [False, None]


def test_responses_count_up_to_their_first_other_token() -> None:
    """The second response differs from its second token on; the third is the same."""
    one = [[[1, 2], [-1.0, -1.0]], [[1, 2, 3], [-1.0, -1.0, -1.0]], [[4], [-0.5]]]
    other = [[[1, 2], [-1.0, -1.5]], [[1, 9, 3], [-0.75, -5.0, -9.0]], [[4], [-0.5]]]
    assert runners.agreement(one, other) == (4, 0.5)
    assert runners.agreement(one, one) == (6, 0.0)
    assert runners.agreement([[[1], [-1.0]]], [[[2], [-1.0]]]) == (0, 0.0)
    with pytest.raises(ValueError, match="shorter"):
        runners.agreement([[[1, 2], [-1.0, -1.0]]], [[[1], [-1.0]]])


def test_a_user_can_choose_between_the_two_runners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"runner": "V2", "rate": 300.0, "sampled": [[[5, 6, 7], [-1.0, -2.0, -3.0]]]}
    other = {"runner": "V1", "rate": 200.0, "sampled": [[[5, 6, 9], [-1.0, -2.25, -9.0]]]}
    runners.note_runners(work := on_cpu(tmp_path), own | {"runner": "V1"}, {"runner": "V2", "refused": "no Triton"})
    assert len(work.found.figures) == 3
    says(by_name(work)["vLLM alone, model runner V2: tokens"].note, "Triton")
    write_result(tmp_path, Result("roles", "done", {}, figures=(Figure(roles.OURS, 150.0),)))
    runners.note_runners(work := on_cpu(tmp_path), own, other)
    values = [("vLLM alone: tokens", 300.0), ("our rollout group, of vLLM alone", 0.5)]
    values += [("vLLM alone, model runner V1: tokens", 200.0)]
    values += [("greedy tokens before V1 and V2 differ", pytest.approx(2 / 3))]
    values += [("largest difference of their log-probs", 0.25)]
    assert [(figure.what, figure.value) for figure in work.found.figures] == values
    says(by_name(work)["vLLM alone, model runner V1: tokens"].note, "VLLM_USE_V2_MODEL_RUNNER=0")
    read = pytest.importorskip("vllm.envs").environment_variables[runners.VARIABLE]
    monkeypatch.delenv(runners.VARIABLE, raising=False)
    assert read() is None
    for value in ("0", "1"):
        monkeypatch.setenv(runners.VARIABLE, value)
        assert read() is (value == "1")
