"""Ray's control service and raylet, for which other services stand in."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import ray

from grpo_dist.runtime import ray_watch
from grpo_dist.runtime.ray_watch import end_with_ray, kill_ray, watching
from tests.observed import assert_gone
from tests.roles.services import Service


class Told:
    """What is told of a loss."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.event = threading.Event()

    def __call__(self, what: str) -> None:
        self.lost.append(what)
        self.event.set()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Service]]:
    """Two that answer, until they are closed or hang."""
    servers = {name: Service() for name in ("gcs_server", "raylet")}
    addresses = {name: each.place for name, each in servers.items()}
    monkeypatch.setattr(ray_watch, "ray_places", lambda: addresses)
    monkeypatch.setattr(ray_watch, "PERIOD_S", 0.01)
    monkeypatch.setattr(ray_watch, "ANSWER_TIMEOUT_S", 0.1)
    yield servers
    for server in servers.values():
        with contextlib.suppress(OSError):  # closed before
            server.close()


@pytest.mark.parametrize("how", ["lost", "hangs"])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_what_stops_answering_is_told_once(places: dict[str, Service], name: str, how: str) -> None:
    """Also where the kernel still takes connections for it, as for a process that is stopped."""
    told = Told()
    with watching(told):
        if how == "lost":
            places[name].close()
        places[name].hangs = True
        assert told.event.wait(30)
    assert told.lost == [name]


def test_one_check_that_fails_is_no_loss(places: dict[str, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[bool] = []
    enough, told = threading.Event(), Told()

    def answers(place: object) -> bool:
        checks.append(len(checks) % ray_watch.FAILED_CHECKS == 0)
        if len(checks) > 10 * ray_watch.FAILED_CHECKS:
            enough.set()
        return checks[-1]

    monkeypatch.setattr(ray_watch, "ray_places", lambda: {"gcs_server": ("127.0.0.1", 1)})
    monkeypatch.setattr(ray_watch, "_answers", answers)
    with watching(told):
        assert enough.wait(30)
    assert told.lost == []


def test_a_worker_ends_with_the_control_service_and_the_tests_own_process_does_not(
    places: dict[str, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, codes = threading.Event(), list[int]()

    def leave(code: int) -> None:
        codes.append(code)
        ended.set()

    gcs = places["gcs_server"].place
    context = SimpleNamespace(gcs_address="{}:{}".format(*gcs), worker=SimpleNamespace(mode=ray.SCRIPT_MODE))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_watch, "WORKER_PERIOD_S", 0.01)
    monkeypatch.setattr(ray_watch, "os", SimpleNamespace(_exit=leave))
    watches = threading.active_count()
    end_with_ray()
    assert threading.active_count() == watches
    context.worker.mode = ray.WORKER_MODE
    end_with_ray()
    assert not ended.is_set()
    places["gcs_server"].close()
    assert ended.wait(30)
    assert codes == [1]


def test_an_error_that_comes_of_the_loss_is_not_told_instead(places: dict[str, Service]) -> None:
    """Calls of Ray fail before the loss is certain. Other errors, and an interrupt, are the user's to see."""
    told = Told()
    with pytest.raises(RuntimeError), watching(told):
        raise RuntimeError
    assert told.lost == []
    places["raylet"].close()
    with pytest.raises(KeyboardInterrupt), watching(told):
        raise KeyboardInterrupt
    assert told.lost == []
    with pytest.raises(RuntimeError), watching(told):
        raise RuntimeError
    assert told.lost == ["raylet"]


def test_rays_processes_are_killed_and_others_are_not() -> None:
    sleeper = "import time; time.sleep(600)"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{sleeper}'])"]
    mine = subprocess.Popen([sys.executable, "-c", sleeper])
    rays = subprocess.Popen([*command, "/ray/raylet"])
    while not (below := psutil.Process(rays.pid).children()):
        pass
    kill_ray()
    assert_gone({psutil.Process(rays.pid), *below})
    assert mine.poll() is None
    mine.kill()
    mine.wait()
    rays.wait()
