"""The run's cluster: how it is found and closed to others, and the loss of its services, for which others stand in."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import grpc
import psutil
import pytest
import ray
from ray._common.utils import get_ray_address_file
from ray._private.utils import check_version_info

from grpo_dist.errors import ConfigError
from grpo_dist.runtime import cluster, nodes
from grpo_dist.runtime.cluster import find_cluster, running_cluster
from grpo_dist.runtime.nodes import connect, end_with_ray, kill_ray, watching
from tests.messages import refuses, says
from tests.observed import assert_gone
from tests.processes import is_loopback
from tests.workers.services import Service, control_service

NOTE = "ray/ray_current_cluster"


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ray's folder, short because the paths of its sockets are limited to 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        Path(folder, "ray").mkdir()
        monkeypatch.setenv("RAY_TMPDIR", folder)
        for name in ("RAY_ADDRESS", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield Path(folder)


# --- it is found ------------------------------
def test_without_a_note_or_with_a_stale_one_there_is_no_cluster(ray_folder: Path) -> None:
    assert running_cluster() is None
    for text in ("127.0.0.1:1", "", "nonsense", "127.0.0.1:port", "[::1]:1"):
        (ray_folder / NOTE).write_text(text)
        assert running_cluster() is None, text


@pytest.mark.parametrize("refusal", [None, grpc.StatusCode.UNAUTHENTICATED])
def test_a_note_of_a_control_service_that_answers_is_one(refusal: grpc.StatusCode | None, ray_folder: Path) -> None:
    with control_service(refusal=refusal) as address:
        (ray_folder / NOTE).write_text(address + "\n")
        assert (running_cluster(), find_cluster("auto"), find_cluster(None)) == (address, address, address)
    assert running_cluster() is None
    with refuses(ConfigError, f"ray_kwargs.ray_init.address={address}"):
        find_cluster("auto")


def test_the_note_is_where_ray_writes_it(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert str(cluster.ray_folder(cluster.NOTE)) == get_ray_address_file(None) == str(ray_folder / NOTE)
    monkeypatch.delenv("RAY_TMPDIR")
    assert str(cluster.ray_folder(cluster.NOTE)) == get_ray_address_file(None) == f"/elsewhere/{NOTE}"


def test_another_service_on_the_port_of_a_note_is_none(ray_folder: Path, monkeypatch: Any, caplog: Any) -> None:
    """One that speaks as Redis, on Ray's own port, or gRPC but not Ray's, or that hangs; it is told once each."""
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_S", 0.5)
    service = Service()
    with control_service("/etcdserverpb.KV/Range") as other:
        port = service.place[1]
        for address, hangs in ((f"127.0.0.1:{port}", False), (other, False), (f"localhost:{port}", True)):
            service.hangs = hangs
            (ray_folder / NOTE).write_text(address)
            caplog.clear()
            assert (running_cluster(), running_cluster()) == (None, None)
            with refuses(ConfigError, f"ray_kwargs.ray_init.address={address}"):
                find_cluster(address)
            (record,) = caplog.records
            says(record.getMessage(), ray_folder / NOTE, "remove")
    service.close()


def test_without_room_for_rays_sockets_a_local_cluster_is_refused(ray_folder: Path, monkeypatch: Any) -> None:
    """107 bytes, of which `/ray-0/r/session_..._4194304/sockets/plasma_store` are 72 for root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * 34)
    assert find_cluster("local") == "local"
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.setenv(variable, long := "/" + "x" * 33 + "ü")
        with refuses(ConfigError, f"{variable}={long}", 108, 107, "RAY_TMPDIR"):
            find_cluster("local")
        monkeypatch.delenv(variable)
    assert find_cluster(None) == "local"


# --- it is joined or started ------------------------------
NO_TOKEN, BROKEN = "Unauthenticated: no token was found", RuntimeError("no space left on device")
VERSIONS = {"ray_version": "2.55.1", "python_version": "3.9.7"}


def other_versions(**_: object) -> None:
    check_version_info(VERSIONS, "node", raise_on_mismatch=True)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ray.exceptions.AuthenticationError(NO_TOKEN), ["RAY_AUTH_MODE=token", "~/.ray/auth_token"]),
        (RuntimeError(NO_TOKEN), ["RAY_AUTH_MODE=token", "~/.ray/auth_token"]),
        (other_versions, [*VERSIONS.values(), ray.__version__]),
    ],
)
def test_a_cluster_of_another_token_or_version_is_named_with_the_way_in(answer: Any, told: list[str]) -> None:
    address = refuses(ConfigError, "ray_kwargs.ray_init.address=head:6379", *told)
    with patch.object(ray, "init", side_effect=answer), address:
        connect("head:6379", None)
    # another failure stays what it is
    with patch.object(ray, "init", side_effect=BROKEN), pytest.raises(RuntimeError, match=str(BROKEN)):
        connect("auto", None)


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


@pytest.mark.deep
@pytest.mark.ray
def test_a_local_cluster_is_closed_to_other_machines(ray_folder: Path) -> None:
    (ray_folder / NOTE).write_text("127.0.0.1:1")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    said, nice, listening, beside, cpus, refusal, seconds, session = json.loads(done.stdout.splitlines()[-1])
    says(said, "local", "127.0.0.1")
    assert (nice, cpus) == (0, 1)
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert [(name, ip) for name, ip in listening if not is_loopback(ip)] == []
    assert beside == [], "a signal to the run's process group must not end Ray"
    says(refusal, "ray_kwargs.ray_init.address=127.0.0.1:1", "ray start --head")
    assert seconds < 60, "Ray itself tries for minutes"
    private = ray_folder / f"ray-{os.geteuid()}"
    assert Path(session).parent.parent == private
    assert private.stat().st_mode & 0o777 == 0o700, "Ray lets all users write into what is in it"


def test_what_is_not_this_users_own_folder_is_refused(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(place: Path, *remedy: str) -> None:
        with refuses(ConfigError, place, "RAY_TMPDIR", *remedy):
            nodes._private_folder()

    place, others = ray_folder / f"ray-{os.geteuid()}", ray_folder / "ray-4294967294"
    assert nodes._private_folder().parent == nodes._private_folder().parent == place, "of several runs"
    place.rmdir()
    place.touch()
    refused(place, f"chmod 700 {place}")
    place.unlink()
    others.mkdir(mode=0o700)
    place.symlink_to(others)
    refused(place, f"chmod 700 {place}")
    place.unlink()
    place.mkdir()
    place.chmod(0o777)
    refused(place, f"chmod 700 {place}")
    monkeypatch.setattr(os, "geteuid", lambda: 4294967294)
    refused(others, f"chmod 700 {others}")
    (ray_folder / "taken").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder / "taken"))
    refused(ray_folder / "taken")


# --- its loss ------------------------------
@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Service]]:
    """Two that answer, until they are closed or hang."""
    servers = {name: Service() for name in ("gcs_server", "raylet")}
    addresses = {name: each.place for name, each in servers.items()}
    monkeypatch.setattr(nodes, "ray_places", lambda: addresses)
    for name, seconds in (("PERIOD_S", 0.01), ("WORKER_PERIOD_S", 0.01), ("ANSWER_TIMEOUT_S", 0.1)):
        monkeypatch.setattr(nodes, name, seconds)
    yield servers
    for server in servers.values():
        with contextlib.suppress(OSError):  # closed before
            server.close()


@pytest.mark.parametrize("how", ["lost", "hangs"])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_what_stops_answering_is_told_once(places: dict[str, Service], name: str, how: str) -> None:
    """Also where the kernel still takes connections for it, as for a process that is stopped."""
    told = SimpleQueue[str]()
    with watching(told.put):
        if how == "lost":
            places[name].close()
        places[name].hangs = True
        assert told.get(timeout=30) == name
    assert told.empty()


def test_one_check_that_fails_is_no_loss(places: dict[str, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    answers, told = Mock(side_effect=itertools.cycle([True, *[False] * (nodes.FAILED_CHECKS - 1)])), SimpleQueue[str]()
    monkeypatch.setattr(nodes, "ray_places", lambda: {"gcs_server": ("127.0.0.1", 1)})
    monkeypatch.setattr(nodes, "answers", answers)
    with watching(told.put):
        while answers.call_count <= 10 * nodes.FAILED_CHECKS:
            time.sleep(0.01)
    assert told.empty()


def test_a_worker_ends_with_the_control_service_and_this_process_does_not(places: Any, monkeypatch: Any) -> None:
    ended, gcs = SimpleQueue[int](), places["gcs_server"].place
    context = SimpleNamespace(gcs_address="{}:{}".format(*gcs), worker=SimpleNamespace(mode=ray.SCRIPT_MODE))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(nodes, "os", SimpleNamespace(_exit=ended.put))
    watches = threading.active_count()
    end_with_ray()
    assert threading.active_count() == watches
    context.worker.mode = ray.WORKER_MODE
    end_with_ray()
    assert ended.empty()
    places["gcs_server"].close()
    assert ended.get(timeout=30) == 1


def test_an_error_that_comes_of_the_loss_is_not_told_instead(places: dict[str, Service]) -> None:
    """Calls of Ray fail before the loss is certain. Other errors, and an interrupt, are the user's to see."""
    told = SimpleQueue[str]()
    with pytest.raises(RuntimeError), watching(told.put):
        raise RuntimeError
    places["raylet"].close()
    with pytest.raises(KeyboardInterrupt), watching(told.put):
        raise KeyboardInterrupt
    assert told.empty()
    with pytest.raises(RuntimeError), watching(told.put):
        raise RuntimeError
    assert told.get(timeout=0) == "raylet"


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
