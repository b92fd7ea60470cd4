"""Notices that Ray itself is lost or hangs: its control service (GCS), or the raylet of the driver's machine.

Without the control service Ray's calls hang, and after a minute Ray ends the driver with a text of its own. Without the
raylet calls fail one after the other, and the workers that were its children stay behind. So do workers on other
machines, for minutes, where the machine of the control service is gone without a word: each watches it too.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import psutil
import ray

from grpo_dist.runtime.cluster import greet

# Checks in a row that fail before something counts as lost: several seconds, and half a minute where it hangs or its
# whole machine is gone. Counted and not timed, because the driver itself may have been stopped meanwhile.
FAILED_CHECKS = 8
PERIOD_S, ANSWER_TIMEOUT_S = 1.0, 2.0
# Of workers, since there may be hundreds.
WORKER_PERIOD_S = 5.0

# Host and port by what is there.
Places = dict[str, tuple[str, int]]


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
        for what in [what for what, place in places.items() if not _answers(place)][:1]:
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
                failed[what] = 0 if _answers(place) else failed[what] + 1
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


def _answers(place: tuple[str, int]) -> bool:
    try:
        greet(place, ANSWER_TIMEOUT_S)
    except OSError:
        return False
    return True
