"""A torch profile of this process: its operators, and the kernels of its GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from grpo_dist.errors import EngineError


class TorchProfile:
    """Records from when it is made, until it is written: the thread that makes it, and its backward passes."""

    def __init__(self) -> None:
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profile.start()

    def write(self, path: Path) -> None:
        """Stop, and write the trace as gzip'ed JSON in Chrome's format, whole or not at all.

        Raises:
            EngineError: it cannot be written.
        """
        temporary = path.with_name(f".{path.name}")
        try:
            self._profile.stop()
            self._profile.export_chrome_trace(str(temporary))  # compressed, since the name ends in .gz
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            raise EngineError(f"the trace {path} cannot be written: {error}") from None
