"""Environments of `verifiers` 0.4, played for `default_agent_loop=external` (docs/environments.md#verifiers).

Runs without grpo_dist, where verifiers is installed. Its own defaults would go to its vendor's sandboxes and models:
here programs run as processes of this machine, and the only model is the policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

KEY = "GRPO_DIST_EPISODE_KEY"  # verifiers reads keys from variables; ours is a part of the address
HARNESS = "verifiers_harness"  # the module beside this one

_serving: dict[str, tuple[Any, Tasks]] = {}  # environments and their tasks, by their settings
_open = contextlib.AsyncExitStack()
_starting: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)


class Tasks:
    """The tasks of a taskset, which may have no end: read as far as they are asked for, in a thread of their own."""

    def __init__(self, taskset: Any) -> None:
        self._unread = iter(taskset)
        self._read: list[Any] = []
        self._reader = ThreadPoolExecutor(1)

    async def at(self, index: int) -> Any:
        """The task of an index."""
        await asyncio.get_running_loop().run_in_executor(self._reader, self._read_to, index + 1)
        if index >= len(self._read):
            raise IndexError(f"the row's index is {index}, and the taskset has {len(self._read)} tasks")
        return self._read[index]

    def _read_to(self, count: int) -> None:
        self._read.extend(itertools.islice(self._unread, max(0, count - len(self._read))))


async def play(task: dict[str, Any], base_url: str, token: str) -> dict[str, Any]:
    """Play the task `index` of the taskset `taskset`."""
    import verifiers.v1 as vf

    os.environ.setdefault(KEY, "none")
    env, tasks = await _environment(task["taskset"], task.get("env") or {})
    address = f"{base_url.removesuffix('/v1')}/s/{token}/v1"
    context = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=address, api_key_var=KEY))
    episode = await env.run_slot(env.slots(await tasks.at(task["index"]))[0], context)
    if not episode.ok:  # its trace shows the reward 0
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
    metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items() if value is not None}
    return {
        "reward": sum(trace.reward for trace in episode.traces),
        "metrics": metrics,
        "truncated": any(trace.is_timeout for trace in episode.traces),
    }


async def _environment(taskset: str, settings: dict[str, Any]) -> tuple[Any, Tasks]:
    """An environment and its tasks; made once."""
    name = json.dumps([taskset, settings], sort_keys=True)
    async with _starting[name]:
        if name not in _serving:
            env = await asyncio.to_thread(_make, taskset, settings)
            # A server for all episodes keeps a client for each address that it has ever seen, and each episode has its
            # own: without one, verifiers starts and ends a small one for each. Tools that tasks share need it.
            if env.taskset.toolsets(env.taskset.config):
                await _open.enter_async_context(env.serving())
            _serving[name] = env, Tasks(env.taskset)
    return _serving[name]


def _make(taskset: str, settings: dict[str, Any]) -> Any:
    import verifiers.v1 as vf

    names = taskset, settings.get("id", "")
    environment, form = vf.environment_class(*names), vf.env_config_type(*names)
    agents = [name for name, field in form.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(agents) > 1:
        told = f"{environment.__name__} of {taskset} has the agents {', '.join(agents)}"
        raise ValueError(f"{told}: one agent is played here; write an agent loop for several")
    config = {**settings, "taskset": {"id": taskset, **settings.get("taskset", {})}}
    for name in agents:
        config[name] = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, **settings.get(name, {})}
    return environment(form.model_validate(config))


def write_rows(taskset: str, file: str, most: int | None = None) -> int:
    """Write a row for each task of a taskset, in the form that training reads; how many there are."""
    tasks = _make(taskset, {}).taskset
    if most is None and not tasks.bounded:
        raise ValueError(f"{taskset} has no end: say how many rows you want, behind {file}")
    rows = []
    for index, task in enumerate(itertools.islice(tasks, most)):
        text = task.data.prompt_text or task.data.name or f"{taskset} {index}"
        extra = {"taskset": taskset, "index": index}
        rows.append({"prompt": text, "data_source": taskset, "extra_info": extra})
    with open(file, "w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return len(rows)


if __name__ == "__main__":
    try:
        count = write_rows(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    sys.stdout.write(f"{count} rows in {sys.argv[2]}\n")
