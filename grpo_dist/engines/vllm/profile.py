"""Profiles of an engine by vLLM's own torch profiler: each of its processes writes a trace.

vLLM must know the folder when the engine is made, and names the files itself. So an engine has a folder of its own,
from which its traces are taken.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from grpo_dist.engines.settings import EngineSettings
from grpo_dist.errors import EngineError

# Engine steps in a trace: each has all operators of a forward pass, and responses take thousands.
MOST_STEPS = 256


def profiler_args(settings: EngineSettings) -> dict[str, Any]:
    """The arguments of an engine that may be profiled; none of one that may not."""
    if settings.profile_dir is None:
        return {}
    from vllm.config import ProfilerConfig

    config = ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=settings.profile_dir,
        torch_profiler_with_stack=False,  # or each event holds its Python stack
        torch_profiler_dump_cuda_time_total=False,  # a table on the console
        ignore_frontend=True,  # vLLM's asyncio code is not what takes time
        max_iterations=MOST_STEPS,
    )
    return {"profiler_config": config}


def clear_traces(settings: EngineSettings) -> None:
    """Remove what a profile that was not ended may have left behind."""
    if settings.profile_dir is not None:
        shutil.rmtree(settings.profile_dir, ignore_errors=True)


def take_traces(settings: EngineSettings, path: Path) -> None:
    """Move what vLLM has written to `path`; of an engine of several processes, each one's to a file of its own.

    Raises:
        EngineError: there is no trace, or it cannot be moved.
    """
    folder = Path(settings.profile_dir or "")
    found = sorted(folder.glob("*.json.gz"), key=lambda each: (len(each.name), each.name))
    if not found:
        raise EngineError(
            f"vLLM has written no trace into {folder}: it has no worker with a profiler, or "
            "actor_rollout_ref.rollout.engine_kwargs.vllm.profiler_config is set, which wins"
        )
    name = path.name.removesuffix(".json.gz")
    try:
        for number, trace in enumerate(found):
            trace.replace(path if len(found) == 1 else path.with_name(f"{name}_worker{number}.json.gz"))
        shutil.rmtree(folder)
    except OSError as error:
        raise EngineError(f"the trace {path} cannot be written: {error}") from None
