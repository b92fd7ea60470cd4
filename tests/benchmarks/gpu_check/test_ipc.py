"""Weights from process to process: what the two sides find over files, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import ipc
from benchmarks.gpu_check.results import Figure, Findings
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work
from grpo_dist.engines.weights.broadcast import Receipt
from grpo_dist.errors import WeightSyncError
from tests.messages import refuses, says

SENDER = {"refused": "", "place": "GPU 1f2e", "bytes": 2e9, "seconds": 0.1, "busy": True}
RECEIVER = {"refused": "", "place": "GPU 1f2e", "tensors": 24, "others": 0, "early": 0}


def work_on_cpu(tmp_path: Path) -> Work:
    return Work("cpu", SCALES["small"], tmp_path, Findings(holds=False))


def noted(tmp_path: Path, name: str, sender: dict[str, Any], receiver: dict[str, Any]) -> dict[str, Figure]:
    ipc.note_pair(work := work_on_cpu(tmp_path), name, SENDER | sender, RECEIVER | receiver)
    return {figure.what.removeprefix(f"{name}: "): figure for figure in work.found.figures}


@pytest.mark.deep
def test_two_pairs_of_processes_hand_weights_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four real processes; on CPU the memory that they share is in files. Four versions of six tensors each."""
    monkeypatch.setattr(ipc, "is_wsl", lambda: False)
    ipc.ipc(work := work_on_cpu(tmp_path))
    found = {figure.what: figure for figure in work.found.figures}
    for name in ipc.SETTINGS:
        assert found[f"{name}: of 24 tensors arrived as others"].met
        assert found[f"{name}: bytes read before they were written"].met
        assert found[f"{name}: packed, checked and copied"].value
    assert len(found) == 10


def test_both_processes_of_a_pair_have_the_setting_of_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run_ranks(function: str, environments: Any, arguments: Any, limit_s: float) -> list[dict[str, Any]]:
        asked.extend(environments)
        json.dumps(arguments)
        return [SENDER, RECEIVER] * 2

    monkeypatch.setattr(ipc, "run_ranks", run_ranks)
    monkeypatch.setattr(ipc, "is_wsl", lambda: False)
    ipc.ipc(work_on_cpu(tmp_path))
    expandable = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
    assert asked == [dict.fromkeys(expandable, "")] * 2 + [expandable] * 2


def test_linux_under_windows_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "is_wsl", lambda: True)
    ipc.ipc(work := work_on_cpu(tmp_path))
    (figure,) = work.found.figures
    assert (figure.value, figure.met) == (None, None)
    says(figure.note, "WSL", "object_store")


@pytest.mark.parametrize("name", ipc.SETTINGS)
def test_neither_setting_may_be_refused(name: str, tmp_path: Path) -> None:
    """And a refusal is told with its message."""
    found = noted(tmp_path, name, {"refused": "rank 1 is gone"}, {"refused": "pidfd_getfd: Operation not permitted"})
    assert (found["refused"].value, found["refused"].met) == (1.0, False)
    says(found["refused"].note, "pidfd_getfd", "rank 1")
    assert len(found) == 2, "and of the weights nothing is said"


@pytest.mark.parametrize("name", ipc.SETTINGS)
@pytest.mark.parametrize(
    ("wrong", "figure"),
    [
        ({"others": 1}, "of 24 tensors arrived as others"),
        ({"early": 5}, "bytes read before they were written"),
        ({"place": "GPU 3d4c"}, "GPUs of the two by UUID that differ"),
    ],
)
def test_what_is_wrong_is_wrong_with_either_setting(
    name: str, wrong: dict[str, Any], figure: str, tmp_path: Path
) -> None:
    found = noted(tmp_path, name, {}, wrong)
    assert [what for what, each in found.items() if each.met is False] == [figure]


def test_the_rate_and_whether_the_gpu_was_busy(tmp_path: Path) -> None:
    found = noted(tmp_path, "default allocator", {"busy": False}, {})
    assert found["packed, checked and copied"].value == pytest.approx(20.0)
    says(found["bytes read before they were written"].note, "idle")


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


def test_a_sync_that_fails_on_the_way_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "receive", lambda group, **options: Receipt(0, "RuntimeError: cannot be opened"))
    group: Any = SimpleNamespace(device=torch.device("cpu"))
    with refuses(WeightSyncError, "opened"):
        ipc._received(group, SimpleNamespace(set=lambda key, value: None), lambda version: [])
