"""Notices that Ray itself is lost: its control service (GCS), or the raylet of the driver's machine.

Without the control service Ray's calls hang, and after a minute Ray ends the driver with a text of its own. Without the
raylet calls fail one after the other, and the workers that were its children stay behind.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import psutil
import ray

# Checks in a row that fail before something counts as lost: several seconds, and half a minute where a whole machine
# is gone. Counted and not timed, because the driver itself may have been stopped meanwhile.
FAILED_CHECKS = 8
PERIOD_S, CONNECT_TIMEOUT_S = 1.0, 2.0


@contextlib.contextmanager
def watching(on_lost: Callable[[str], None]) -> Iterator[None]:
    """Watch Ray while the block runs.

    Args:
        on_lost: called with what is lost, in a thread of its own, or in this one if an error ends the block first. By
            then calls of Ray may hang.
    """
    ended = threading.Event()
    places = ray_places()

    def watch() -> None:
        failed = dict.fromkeys(places, 0)
        while not ended.wait(PERIOD_S):
            for what, place in places.items():
                failed[what] = 0 if _answers(place) else failed[what] + 1
                if failed[what] == FAILED_CHECKS and not ended.is_set():
                    on_lost(what)
                    return

    threading.Thread(target=watch, name="grpo_dist ray watch", daemon=True).start()
    try:
        yield
    except Exception:
        for what in [what for what, place in places.items() if not _answers(place)][:1]:
            on_lost(what)
        raise
    finally:
        ended.set()


def ray_places() -> dict[str, tuple[str, int]]:
    """What the driver cannot do without, with its host and port."""
    context = ray.get_runtime_context()
    gcs, _, port = context.gcs_address.rpartition(":")
    here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    ip, raylet = here["NodeManagerAddress"], here["NodeManagerPort"]
    return {
        f"Ray's control service (gcs_server) at {gcs}:{port}": (gcs.strip("[]"), int(port)),
        f"Ray's node service (raylet) of this machine at {ip}:{raylet}": (ip, raylet),
    }


def kill_ray() -> None:
    """Kill Ray's processes below this one, and what they have started."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if command.startswith("ray::") or "/ray/" in command:
                for each in [process, *process.children(recursive=True)]:
                    each.kill()


def _answers(place: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(place, timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
