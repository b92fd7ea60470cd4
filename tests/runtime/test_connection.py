"""The run's cluster, and the loss of its control service and raylet, for which other services stand in."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private.utils import check_version_info

from grpo_dist.errors import ConfigError
from grpo_dist.runtime import nodes
from grpo_dist.runtime.nodes import connect, end_with_ray, kill_ray, watching
from tests.messages import refuses, says
from tests.observed import assert_gone
from tests.processes import is_loopback
from tests.workers.services import Service

# A process of its own: what counts is that Ray is imported after `prepare`, as in the main job.
SCRIPT = """
import json, os, sys, time
from grpo_dist.errors import ConfigError
from grpo_dist.runtime.cluster import prepare

address = prepare(None)
from grpo_dist.runtime.nodes import connect

said = connect(address, 1)
import psutil, ray

@ray.remote
class Worker:
    def niceness(self):
        return os.nice(0)

worker = Worker.remote()
nice = ray.get(worker.niceness.remote())
me = psutil.Process()
listening, beside = [], []
for p in (me, *me.children(recursive=True)):
    try:
        listening += [(p.name(), c.laddr.ip) for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        beside += [p.name()] if p != me and os.getpgid(p.pid) == os.getpgid(0) else []
    except (psutil.Error, ProcessLookupError):  # it has ended meanwhile
        continue
cpus = ray.cluster_resources()["CPU"]
session = ray._private.worker._global_node.get_session_dir_path()
ray.shutdown()
start, refusal = time.monotonic(), None
try:
    connect(prepare("127.0.0.1:1"), None)
except ConfigError as error:
    refusal = str(error)
print(json.dumps([said, nice, listening, beside, cpus, refusal, time.monotonic() - start, session]))
"""


@pytest.mark.parametrize("kind", [ray.exceptions.AuthenticationError, RuntimeError])
def test_a_cluster_with_another_token_is_named_with_the_way_in(
    kind: type[Exception], ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**arguments: object) -> None:
        raise kind("Unauthenticated: no token was found")

    monkeypatch.setattr(ray, "init", refused)
    service = Service()
    address = f"127.0.0.1:{service.place[1]}"
    with refuses(ConfigError, f"ray_kwargs.ray_init.address={address}", "RAY_AUTH_MODE=token", "~/.ray/auth_token"):
        connect(address, None)
    service.close()


def test_a_cluster_of_other_versions_is_named_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"ray_version": "2.55.1", "python_version": "3.9.7"}
    monkeypatch.setattr(ray, "init", lambda **_: check_version_info(other, "node", raise_on_mismatch=True))
    with refuses(ConfigError, "ray_kwargs.ray_init.address=head:6379", *other.values(), ray.__version__):
        connect("head:6379", None)


def test_another_failure_of_ray_stays_what_it_is(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**arguments: object) -> None:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(ray, "init", broken)
    with pytest.raises(RuntimeError) as caught:
        connect("auto", None)
    assert type(caught.value) is RuntimeError


@pytest.mark.deep
@pytest.mark.ray
def test_a_local_cluster_is_closed_to_other_machines(ray_folder: Path) -> None:
    """With a stale note about; and an address where nobody answers is refused."""
    (ray_folder / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    said, nice, listening, beside, cpus, refusal, seconds, session = json.loads(done.stdout.splitlines()[-1])
    says(said, "local", "127.0.0.1")
    assert (nice, cpus) == (0, 1)
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    open_ports = [(name, ip) for name, ip in listening if not is_loopback(ip)]
    assert open_ports == []
    assert beside == [], "a signal to the run's process group must not end Ray"
    says(refusal, "ray_kwargs.ray_init.address=127.0.0.1:1", "ray start --head")
    assert seconds < 60, "Ray itself tries for minutes"
    private = ray_folder / f"ray-{os.geteuid()}"
    assert Path(session).parent.parent == private
    assert private.stat().st_mode & 0o777 == 0o700, "Ray lets all users write into what is in it"


@pytest.mark.parametrize("what", ["file", "link", "open"])
def test_what_is_not_this_users_own_folder_is_refused(ray_folder: Path, what: str) -> None:
    """Somebody else may have put it there, before the first run or since."""
    place = ray_folder / f"ray-{os.geteuid()}"
    assert nodes._private_folder().parent == place
    assert nodes._private_folder().parent == place, "of several runs"
    place.rmdir()
    if what == "file":
        place.touch()
    elif what == "link":
        (ray_folder / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(ray_folder / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o777)
    with refuses(ConfigError, place, "RAY_TMPDIR", f"chmod 700 {place}"):
        nodes._private_folder()


def test_a_place_that_takes_no_folder_is_named(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ray_folder / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder / "file"))
    with refuses(ConfigError, ray_folder / "file", "RAY_TMPDIR"):
        nodes._private_folder()


def test_another_users_folder_is_refused(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ray_folder / "ray-4294967294").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4294967294)
    with refuses(ConfigError, ray_folder / "ray-4294967294"):
        nodes._private_folder()


# --- its loss -----------------------------------------------------------------------------------------------------
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
    monkeypatch.setattr(nodes, "ray_places", lambda: addresses)
    monkeypatch.setattr(nodes, "PERIOD_S", 0.01)
    monkeypatch.setattr(nodes, "ANSWER_TIMEOUT_S", 0.1)
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

    def answers(place: object, timeout_s: float) -> bool:
        checks.append(len(checks) % nodes.FAILED_CHECKS == 0)
        if len(checks) > 10 * nodes.FAILED_CHECKS:
            enough.set()
        return checks[-1]

    monkeypatch.setattr(nodes, "ray_places", lambda: {"gcs_server": ("127.0.0.1", 1)})
    monkeypatch.setattr(nodes, "answers", answers)
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
    monkeypatch.setattr(nodes, "WORKER_PERIOD_S", 0.01)
    monkeypatch.setattr(nodes, "os", SimpleNamespace(_exit=leave))
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
