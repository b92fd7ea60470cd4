"""Which losses a run is started again after, and from where. The rest of a run: tests/e2e/test_main_job.py."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import Terminated, WorkerLost
from grpo_dist.trainer import run
from grpo_dist.trainer.preemption import Preemption

LOST = WorkerLost("its process died", "actor", 0)


def fail(error: Exception) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


def trainer(fit: Callable[[], None], last: Path | None = None) -> Any:
    closed = SimpleNamespace(close=lambda: None)
    roles = SimpleNamespace(holds_state=lambda role: role == "actor")
    return SimpleNamespace(
        fit=fit, roles=roles, step=0, saver=SimpleNamespace(last=last), trackers=closed, progress=closed
    )


def train(monkeypatch: pytest.MonkeyPatch, starts: list[Any], *overrides: str) -> list[RunConfig]:
    """Train with what each start gives, a trainer or an error; returns the config of each start."""
    seen: list[RunConfig] = []

    def build(config: RunConfig, *args: Any) -> Any:
        seen.append(config)
        start = starts[len(seen) - 1]
        if isinstance(start, Exception):
            raise start
        return start, SimpleNamespace(peak_memory=dict)

    monkeypatch.setattr(run, "_build", build)
    run._train(load_config(list(overrides))[0], Path(), Preemption())
    return seen


def test_one_that_is_lost_at_the_first_start_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerLost):
        train(monkeypatch, [LOST, trainer(lambda: None)])


def test_one_that_is_lost_in_a_restart_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    last = tmp_path / "elsewhere/global_step_3"
    seen = train(monkeypatch, [trainer(fail(LOST), last), LOST, trainer(lambda: None)])
    assert [config.trainer.resume_from_path for config in seen] == [None, str(last), str(last)]


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerLost):
        train(monkeypatch, [trainer(fail(LOST)), LOST, trainer(lambda: None)], "trainer.max_actor_restarts=1")


def test_a_role_without_state_of_the_run_is_replaced_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerLost):
        train(monkeypatch, [trainer(fail(WorkerLost("its process died", "ref", 0))), trainer(lambda: None)])


def test_it_goes_on_from_the_last_checkpoint_or_if_that_is_damaged_from_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last = tmp_path / "global_step_4"
    last.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    override = f"trainer.default_local_dir={tmp_path}"
    seen = train(monkeypatch, [trainer(fail(LOST), last), trainer(lambda: None)], override)
    assert (seen[1].trainer.resume_mode, seen[1].trainer.resume_from_path) == ("auto", None)
    seen = train(monkeypatch, [trainer(fail(LOST)), trainer(lambda: None)], override)
    assert seen[1].trainer.resume_mode == "disable", "what lies there is not of this run"


def test_a_run_that_is_told_to_end_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM came in the update, and then an actor rank was lost."""

    def fit() -> None:
        preemption.hold()
        preemption.handle(signal.SIGTERM, None)
        raise LOST

    preemption = Preemption()
    monkeypatch.setattr(run, "_build", lambda *args: (trainer(fit), None))
    with pytest.raises(Terminated):
        run._train(load_config([])[0], Path(), preemption)
    assert not preemption.held
    assert "SIGTERM: no checkpoint could be written: actor worker 0" in capsys.readouterr().err
