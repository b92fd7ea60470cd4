"""Finds or starts the Ray cluster of a run: a running cluster, or a local one that other machines cannot reach.

Import this module before Ray: a local cluster binds to the loopback address only if Ray is told so before it is
imported.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_dist.engines.rendezvous import LOOPBACK_INTERFACE
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.supervisor import adopt_orphans

LOCAL = "local"
START_ATTEMPTS = 3
# How often, in ms, Ray's processes report the times of calls, which `ray.timeline` shows; 0: never.
TIMELINE_VARIABLE = "RAY_task_events_report_interval_ms"
# A running cluster answers at once.
CONNECT_TIMEOUT_S = 5.0
# How a client of HTTP/2 begins, on which gRPC rests, and with it all of Ray's services: preface and empty settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def connect(address: str | None, num_cpus: int | None, timeline: bool = False) -> str:
    """Join or start a Ray cluster.

    Args:
        address: HOST:PORT, "auto", "local", or None: $RAY_ADDRESS, else a cluster running on this machine, else local.
        num_cpus: logical CPUs of a local cluster; None: all.
        timeline: whether a local cluster keeps what `ray.timeline` reads; one that is joined does by default.

    Returns:
        A message that says which cluster is used.
    """
    address = find_cluster(address)
    # Ray would print the error of every call whose answer nobody waits for any more, before the run's own message.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address == LOCAL:
        return _start_local(num_cpus, timeline)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from None
    except (ray.exceptions.RayError, RuntimeError) as error:
        if "authentic" in str(error).lower():
            raise _other_token(address, error) from None
        raise
    return f"joined the Ray cluster at {address}"


def find_cluster(address: str | None) -> str:
    """The address of the run's Ray cluster, or `LOCAL`. Checks that HOST:PORT answers.

    Args:
        address: as in `connect`.
    """
    address = address or os.environ.get("RAY_ADDRESS") or (running_cluster() or LOCAL)
    try:
        if ":" in address:
            _check_answers(address)
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from None
    return address


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"ray_kwargs.ray_init.address={address}: no Ray cluster at this address ({error}). "
        "Start one with `ray start --head`, or set ray_kwargs.ray_init.address=local"
    )


def _other_token(address: str, error: Exception) -> ConfigError:
    """The error for a cluster that does not take this process's calls."""
    reason = " ".join(str(error).split())
    return ConfigError(
        f"ray_kwargs.ray_init.address={address}: the cluster refused this run: {reason}\n"
        "`ray start` turns on a token by itself where it finds one (RAY_AUTH_TOKEN, or ~/.ray/auth_token, which an "
        "earlier local Ray may have made), and the programs that join do not. Set RAY_AUTH_MODE=token here, and in "
        "front of `ray job submit`, with the token of the cluster's machines; or, inside a network of your own, start "
        "the cluster with RAY_AUTH_MODE=disabled"
    )


def running_cluster() -> str | None:
    """Address of the cluster that `ray start` started on this machine; None if it does not answer."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        address = note.read_text().strip()
        _check_answers(address)
    except (OSError, ValueError):
        return None
    return address


def _check_answers(address: str) -> None:
    """Raise OSError or ValueError unless HOST:PORT answers; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    greet((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)


def greet(place: tuple[str, int], timeout_s: float) -> None:
    """Greet a service of Ray and wait for its answer: the kernel takes a connection for a stopped process too."""
    with socket.create_connection(place, timeout=timeout_s) as connection:
        with contextlib.suppress(ConnectionResetError):  # an answer too, of one who wants TLS
            connection.sendall(GREETING)
            connection.recv(1)


def is_own() -> bool:
    """Return whether this process has started the cluster that it is connected to."""
    from ray._private import worker

    node: Any = worker._global_node
    return node is not None and node.is_head()


def set_local_environment() -> None:
    """Set what Ray reads when it is imported, so that other machines and users cannot reach a local cluster."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the switch that makes every Ray port bind to 127.0.0.1
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would give workers a lower priority than other processes
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # torch.distributed needs no other network interface: all processes are on this machine
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    # Only this run's processes may connect to the cluster. Without a token here Ray would write one into the user's
    # home, which would turn authentication on for every later `ray start`.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _start_local(num_cpus: int | None, timeline: bool) -> str:
    set_local_environment()
    # Ray would keep 3.6 kB of every call for its dashboard, which is off: 60 kB a step, up to 100,000 calls. The
    # timeline waits for one second until processes have reported.
    os.environ.setdefault(TIMELINE_VARIABLE, "200" if timeline else "0")
    import ray

    folder = str(_private_folder())
    adopt_orphans()  # workers whose raylet was killed can then be found and ended (ray_watch.py)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _in_own_process_groups():
                ray.init(
                    address=LOCAL,
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=folder,
                )
            break
        except Exception as error:
            # Ray waits 30 s for its own processes, which may not be enough on a busy machine; it has no setting for it
            ray.shutdown()
            if attempt == START_ATTEMPTS or "timed out during startup" not in str(error):
                raise GrpoDistError(f"Ray could not be started on this machine: {error}") from error
    return "started a local Ray cluster on 127.0.0.1"


def _private_folder() -> Path:
    """Make the folder of this user's local clusters, in one that nobody else can enter: Ray opens its own to all users.

    The names are short, because the paths of sockets have at most 107 bytes.
    """
    from ray._common.utils import get_default_system_temp_dir

    private = Path(get_default_system_temp_dir(), f"ray-{os.geteuid()}").absolute()
    try:
        private.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"no folder for the local Ray cluster: {error}; set RAY_TMPDIR to another one") from None
    status = private.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{private}: the local Ray cluster keeps its sockets and logs here, and this is not a folder that nobody "
            f"but this user can enter. Remove it, or `chmod 700 {private}`, or set RAY_TMPDIR to another folder"
        )
    return private / "r"


@contextlib.contextmanager
def _in_own_process_groups() -> Iterator[None]:
    """Start Ray's processes outside the run's process group, by patching the Popen class that Ray starts them with.

    The SIGTERM of a scheduler and the Ctrl-C of a terminal go to the whole process group, and would end Ray before the
    run has saved a checkpoint. Ray has no setting for this.
    """
    from ray._private import services

    module: Any = services
    popen = module.ConsolePopen
    module.ConsolePopen = functools.partial(popen, process_group=0)
    try:
        yield
    finally:
        module.ConsolePopen = popen
