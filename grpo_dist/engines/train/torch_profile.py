"""A torch profile of this process: its operators, and the kernels of its GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

from grpo_dist.errors import EngineError

# Calls of modules that are recorded, some 20 forward passes of a model of 30 layers. With their operators and those of
# the backward passes they take 1 to 2 GiB when torch makes a trace of them: 7.5 kB for each operator.
MOST_MODULE_CALLS = 10_000


class TorchProfile:
    """Records the thread that makes it, and its backward passes: until it is written, or has seen so many modules."""

    def __init__(self) -> None:
        self._thread, self._module_calls, self._records = threading.get_ident(), 0, True
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profile.start()
        self._hook = register_module_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: Any) -> None:
        if threading.get_ident() == self._thread:  # only this one can stop it
            self._module_calls += 1
            if self._module_calls > MOST_MODULE_CALLS:
                self._stop()

    def _stop(self) -> None:
        if self._records:
            self._records = False
            self._hook.remove()
            self._profile.stop()

    def write(self, path: Path) -> None:
        """Stop, and write the trace as gzip'ed JSON in Chrome's format, whole or not at all."""
        temporary = path.with_name(f".{path.name}")
        try:
            self._stop()
            self._profile.export_chrome_trace(str(temporary))  # compressed, since the name ends in .gz
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"the trace {path} cannot be written: {error}") from None
