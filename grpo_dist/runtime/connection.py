"""Joins or starts the Ray cluster that cluster.py has found, and notices that Ray itself is lost or hangs.

What may be lost is its control service (GCS), or the raylet of the driver's machine. Without the control service Ray's
calls hang, and after a minute Ray ends the driver with a text of its own. Without the raylet calls fail one after the
other, and the workers that were its children stay behind. So do workers on other machines, for minutes, where the
machine of the control service is gone without a word: each watches it too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import services, worker

from grpo_dist.config.processor import logical_cpus
from grpo_dist.errors import ConfigError, GrpoDistError
from grpo_dist.runtime.cluster import LOCAL, answers, local_folder, no_cluster
from grpo_dist.supervisor import adopt_orphans

START_ATTEMPTS = 3
# Checks in a row that fail before something counts as lost: several seconds, and half a minute where it hangs or its
# whole machine is gone. Counted and not timed, because the driver itself may have been stopped meanwhile.
FAILED_CHECKS = 8
PERIOD_S, ANSWER_TIMEOUT_S = 1.0, 2.0
# Of workers, since there may be hundreds.
WORKER_PERIOD_S = 5.0

# Host and port by what is there.
Places = dict[str, tuple[str, int]]


def connect(address: str, num_cpus: int | None) -> str:
    """Join or start a Ray cluster; returns a message that says which one is used.

    Args:
        address: what `cluster.prepare` has returned.
        num_cpus: logical CPUs of a local cluster; None: all that this process may use.
    """
    if address == LOCAL:
        return _start_local(num_cpus)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise no_cluster(address, error) from None
    except (ray.exceptions.RayError, RuntimeError) as error:
        if "authentic" in str(error).lower():
            raise _other_token(address, error) from None
        if "version" in str(error).lower():
            remedy = "run this with the cluster's Ray and Python, or start the cluster with those of this process"
            reason = " ".join(str(error).split())
            raise ConfigError(f"ray_kwargs.ray_init.address={address}: {reason}; {remedy}") from None
        raise
    return f"joined the Ray cluster at {address}"


def _other_token(address: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())
    return ConfigError(
        f"ray_kwargs.ray_init.address={address}: the cluster refused this run: {reason}\n"
        "`ray start` turns on a token by itself where it finds one (RAY_AUTH_TOKEN, or ~/.ray/auth_token, which an "
        "earlier local Ray may have made), and the programs that join do not. Set RAY_AUTH_MODE=token here, and in "
        "front of `ray job submit`, with the token of the cluster's machines; or, inside a network of your own, start "
        "the cluster with RAY_AUTH_MODE=disabled"
    )


def is_own() -> bool:
    """Return whether this process has started the cluster that it is connected to."""
    node: Any = worker._global_node
    return node is not None and node.is_head()


def _start_local(num_cpus: int | None) -> str:
    folder = str(_private_folder())
    adopt_orphans()  # workers whose raylet was killed can then be found and ended (`kill_ray`)
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            with _in_own_process_groups():
                ray.init(
                    address=LOCAL,
                    num_cpus=num_cpus or logical_cpus(),  # Ray itself sees no limit of a job below the top
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
    """Make the folder of this user's local clusters, in one that nobody else can enter: Ray opens its own to all."""
    private = local_folder().parent
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
    module: Any = services
    popen = module.ConsolePopen
    module.ConsolePopen = functools.partial(popen, process_group=0)
    try:
        yield
    finally:
        module.ConsolePopen = popen


# --- its loss -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def watching(on_lost: Callable[[str], None]) -> Iterator[None]:
    """Watch Ray while the block runs.

    Args:
        on_lost: called with what is lost, in a thread of its own, or in this one if an error ends the block first. By
            then calls of Ray may hang.
    """
    ended = threading.Event()
    places = ray_places()
    _start(places, on_lost, PERIOD_S, ended)
    try:
        yield
    except Exception:
        for what in [what for what, place in places.items() if not answers(place, ANSWER_TIMEOUT_S)][:1]:
            on_lost(what)
        raise
    finally:
        ended.set()


def end_with_ray() -> None:
    """Have this process end, if it is one of Ray's workers, once Ray's control service is lost."""
    if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        _start(_control_service(), lambda what: os._exit(1), WORKER_PERIOD_S, threading.Event())


def _start(places: Places, on_lost: Callable[[str], None], period_s: float, ended: threading.Event) -> None:
    """Watch these places in a thread until one is lost, or `ended` is set."""

    def watch() -> None:
        failed = dict.fromkeys(places, 0)
        while not ended.wait(period_s):
            for what, place in places.items():
                failed[what] = 0 if answers(place, ANSWER_TIMEOUT_S) else failed[what] + 1
                if failed[what] == FAILED_CHECKS and not ended.is_set():
                    on_lost(what)
                    return

    threading.Thread(target=watch, name="grpo_dist ray watch", daemon=True).start()


def ray_places() -> Places:
    """Return the services that the driver cannot do without, with its host and port."""
    context = ray.get_runtime_context()
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    ip, raylet = here["NodeManagerAddress"], here["NodeManagerPort"]
    return _control_service() | {f"Ray's node service (raylet) of this machine at {ip}:{raylet}": (ip, raylet)}


def _control_service() -> Places:
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return {f"Ray's control service (gcs_server) at {host}:{port}": (host.strip("[]"), int(port))}


def kill_ray() -> None:
    """Kill Ray's processes below this one, and what they have started."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if command.startswith("ray::") or "/ray/" in command:
                for member in [process, *process.children(recursive=True)]:
                    member.kill()
