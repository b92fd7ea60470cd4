"""Finds the Ray cluster of a run, without Ray: a running cluster, or a local one that other machines cannot reach.

A local cluster binds to the loopback address only if Ray is told so before it is imported: so `prepare` comes before
anything that imports Ray, such as nodes.py, which then joins or starts the cluster.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from functools import cache
from pathlib import Path

from grpo_dist.errors import ConfigError
from grpo_dist.hosts import LOOPBACK_INTERFACE

LOCAL = "local"
NOTE = "ray/ray_current_cluster"  # of `ray start`
# How often, in ms, Ray's processes report the times of calls, which `ray.timeline` shows; 0: never.
TIMELINE_VARIABLE = "RAY_task_events_report_interval_ms"
# A running cluster answers at once.
CONNECT_TIMEOUT_S = 5.0
# A call that Ray's control service alone knows.
CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
# The paths of sockets have at most so many bytes; and the longest that Ray has below a cluster's folder.
LONGEST_SOCKET_PATH, RAY_SOCKET = 107, "session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
# How a client of HTTP/2 begins, on which gRPC rests, and with it all of Ray's services: preface and empty settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

logger = logging.getLogger(__name__)


def prepare(address: str | None, timeline: bool = False) -> str:
    """Find the run's cluster, and set what Ray reads when it is imported; returns what `connection.connect` takes.

    Args:
        address: as in `find_cluster`.
        timeline: whether a local cluster keeps what `ray.timeline` reads; one that is joined does by default.
    """
    address = find_cluster(address)
    # Ray would print the error of every call whose answer nobody waits for any more, before the run's own message.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address == LOCAL:
        set_local_environment()
        # Ray would keep 3.6 kB of every call for its dashboard, which is off: 60 kB a step, up to 100,000 calls. The
        # timeline waits for one second until processes have reported.
        os.environ.setdefault(TIMELINE_VARIABLE, "200" if timeline else "0")
    return address


def find_cluster(address: str | None) -> str:
    """Return the address of the run's Ray cluster, or `LOCAL`. Checks that HOST:PORT answers, or that there is room.

    Args:
        address: HOST:PORT, "auto", "local", or None: $RAY_ADDRESS, else a cluster running on this machine, else local.
    """
    address = address or os.environ.get("RAY_ADDRESS") or (running_cluster() or LOCAL)
    if address == LOCAL:
        local_folder()
    if address == "auto" and (note := ray_folder(NOTE)).is_file():
        address = note.read_text().strip()  # Ray itself would wait for minutes where that is gone
    try:
        if ":" in address:
            _check_answers(address)
    except (OSError, ValueError) as error:
        raise no_cluster(address, error) from None
    return address


def no_cluster(address: str, error: Exception) -> ConfigError:
    """Return the error for an address where no cluster answers."""
    return ConfigError(
        f"ray_kwargs.ray_init.address={address}: no Ray cluster at this address ({error}). "
        "Start one with `ray start --head`, or set ray_kwargs.ray_init.address=local"
    )


def running_cluster() -> str | None:
    """Address of the cluster that `ray start` started on this machine; None if it does not answer."""
    note = ray_folder(NOTE)
    try:
        address = note.read_text().strip()
        _check_answers(address)
    except (OSError, ValueError) as error:
        if note.is_file():
            _tell(f"{note} is ignored: there is no Ray cluster where it says ({error}); remove it where that is gone")
        return None
    return address


@cache
def _tell(text: str) -> None:
    logger.warning(text)


def ray_folder(name: str) -> Path:
    """A folder or file below that of Ray on this machine."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", name).absolute()


def local_folder() -> Path:
    """The folder of this user's local clusters; a ConfigError where the paths of their sockets would be too long."""
    folder = ray_folder(f"ray-{os.geteuid()}/r")
    if (size := len(os.fsencode(folder / RAY_SOCKET))) > LONGEST_SOCKET_PATH:
        place = f"{'RAY_TMPDIR' if os.environ.get('RAY_TMPDIR') else 'TMPDIR'}={ray_folder('')}"
        limit = f"would have {size} bytes there, more than {LONGEST_SOCKET_PATH}"
        raise ConfigError(
            f"{place}: the paths of Ray's sockets {limit}; set RAY_TMPDIR to a short folder, such as /tmp"
        )
    return folder


def _check_answers(address: str) -> None:
    """Raise OSError or ValueError unless Ray answers at HOST:PORT; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    greet((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
    if address.startswith("ray://") or os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return  # another service of Ray, or one that takes no call without certificates
    import grpc

    with grpc.insecure_channel(f"{host}:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAUTHENTICATED:
                raise ConnectionError(f"what listens there does not answer as Ray: {error.code().name}") from None


def greet(place: tuple[str, int], timeout_s: float) -> None:
    """Greet a service of Ray and wait for its answer: the kernel takes a connection for a stopped process too."""
    with socket.create_connection(place, timeout=timeout_s) as connection:
        with contextlib.suppress(ConnectionResetError):  # an answer too, of one who wants TLS
            connection.sendall(GREETING)
            connection.recv(1)


def answers(place: tuple[str, int], timeout_s: float) -> bool:
    """Tell if a service of Ray answers a greeting in time."""
    try:
        greet(place, timeout_s)
    except OSError:
        return False
    return True


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
