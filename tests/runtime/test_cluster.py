from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from grpo_dist.errors import ConfigError
from grpo_dist.runtime import cluster
from grpo_dist.runtime.cluster import connect, find_cluster, running_cluster
from tests.messages import refuses, says
from tests.processes import is_loopback
from tests.roles.services import Service

# A process of its own: what counts is that Ray is imported after `connect`, as in the main job.
SCRIPT = """
import json, os, sys, time
from grpo_dist.errors import ConfigError
from grpo_dist.runtime.cluster import connect

said = connect(None, 1)
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
    connect("127.0.0.1:1", None)
except ConfigError as error:
    refusal = str(error)
print(json.dumps([said, nice, listening, beside, cpus, refusal, time.monotonic() - start, session]))
"""


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ray's folder, short because the paths of its sockets are limited to 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    (folder / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def note(folder: Path, text: str) -> None:
    (folder / "ray" / "ray_current_cluster").write_text(text)


def test_without_a_note_there_is_no_cluster(ray_folder: Path) -> None:
    assert running_cluster() is None


@pytest.mark.parametrize("text", ["127.0.0.1:1", "", "nonsense", "127.0.0.1:port", "[::1]:1"])
def test_a_stale_note_is_no_cluster(ray_folder: Path, text: str) -> None:
    note(ray_folder, text)
    assert running_cluster() is None


def test_a_note_whose_port_answers_is_one(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_S", 0.1)
    service = Service()
    address = f"127.0.0.1:{service.place[1]}"
    note(ray_folder, address + "\n")
    assert running_cluster() == address
    service.hangs = True
    assert running_cluster() is None, "the kernel alone takes connections"
    with refuses(ConfigError, f"ray_kwargs.ray_init.address={address}"):
        find_cluster(address)
    service.close()
    assert running_cluster() is None


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


def test_another_failure_of_ray_stays_what_it_is(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**arguments: object) -> None:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(ray, "init", broken)
    with pytest.raises(RuntimeError) as caught:
        connect("auto", None)
    assert type(caught.value) is RuntimeError


@pytest.mark.ray
def test_a_local_cluster_is_closed_to_other_machines(ray_folder: Path) -> None:
    """With a stale note about; and an address where nobody answers is refused."""
    note(ray_folder, "127.0.0.1:1")
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
    assert cluster._private_folder().parent == place
    assert cluster._private_folder().parent == place, "of several runs"
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
        cluster._private_folder()


def test_a_place_that_takes_no_folder_is_named(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ray_folder / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder / "file"))
    with refuses(ConfigError, ray_folder / "file", "RAY_TMPDIR"):
        cluster._private_folder()


def test_another_users_folder_is_refused(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ray_folder / "ray-4294967294").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4294967294)
    with refuses(ConfigError, ray_folder / "ray-4294967294"):
        cluster._private_folder()
