"""Hybrid sharding: two copies on CPU, and what is said of copies that do not agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import hybrid
from benchmarks.gpu_check.model import write_model
from benchmarks.gpu_check.results import Figure, Findings
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work
from tests.messages import says

COPY = {"grad_norm": 3.0, "weights": "a", "axes": {"replicate": 2, "shard": 1}, "limits": [hybrid.TIMEOUT_S] * 2}
ALONE = COPY | {"loss": 0.5}


def work_on(device: str, folder: Path) -> Work:
    return Work(device, SCALES["small"], folder, Findings(holds=False))


@pytest.mark.deep
def test_two_copies_take_the_step_of_a_single_rank(tmp_path: Path) -> None:
    """Real processes over gloo, each with every second group of the mini-batch."""
    write_model(work_on("cpu", tmp_path))
    hybrid.hybrid_sharding(work := work_on("cpu", tmp_path))
    assert [figure.met for figure in work.found.figures] == [True] * 6
    loss, norm, *_, axes, limits = work.found.figures
    says([loss.note, norm.note, axes.note], "single rank")
    says(axes.note, "replicate 2", "shard 1")
    says(limits.note, "345", "nccl_timeout=345")


def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *copies: dict[str, Any]) -> list[Figure]:
    answers = iter([[ALONE], [COPY | copy for copy in copies]])
    monkeypatch.setattr(hybrid, "_updates", lambda work, ranks: next(answers))
    hybrid.hybrid_sharding(work := work_on("cpu", tmp_path))
    return [figure for figure in work.found.figures if not figure.met]


def test_losses_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert noted(tmp_path, monkeypatch, {"loss": 0.2}, {"loss": 0.3}) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"loss": 0.4}, "loss"),
        ({"grad_norm": 6.0}, "gradient norm of rank 1"),
        ({"grad_norm": float("nan")}, "gradient norm of rank 1"),
        ({"weights": "b"}, "copies"),
        ({"limits": [600.0, hybrid.TIMEOUT_S]}, "nccl_timeout"),
    ],
)
def test_copies_that_do_not_agree(
    wrong: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (figure,) = noted(tmp_path, monkeypatch, {"loss": 0.2}, {"loss": 0.3} | wrong)
    assert told in figure.what


def test_a_model_that_is_sharded_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"axes": {"shard": 2}}
    (figure,) = noted(tmp_path, monkeypatch, {"loss": 0.2} | axes, {"loss": 0.3} | axes)
    says(figure.note, "shard 2")


@pytest.mark.parametrize(("visible", "gpus"), [("", ["0", "1"]), ("3,5,7", ["3", "5"])])
def test_each_rank_has_a_gpu_of_its_own(
    visible: str, gpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray gives the ranks of a role theirs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(hybrid, "run_ranks", lambda function, environments, arguments, limit_s: environments)
    found: Any = hybrid._updates(work_on("cuda", tmp_path), 2)
    assert found == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
