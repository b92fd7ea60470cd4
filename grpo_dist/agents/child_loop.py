"""`PYTHON child_loop.py FILE.py:FUNCTION`: plays episodes for `default_agent_loop=external` (external.py).

Runs in the environment that the function needs: Python 3.9 or later, and nothing else of grpo_dist.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

Play = Callable[[dict[str, Any], str, str], Awaitable[dict[str, Any]]]
_told: set[tuple[Any, ...]] = set()  # the files and lines of each traceback that was printed


def main(named: str) -> None:
    """Play the episodes that standard input asks for, side by side, until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the function prints is no answer
    asyncio.run(_serve(_load(named), answers))


def _load(named: str) -> Play:
    file, _, name = named.rpartition(":")
    sys.path[0] = os.path.dirname(os.path.abspath(file))  # as if it were the program
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(file))[0], file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{named}: name a function as FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # where pickle and dataclasses look for what the file defines
    spec.loader.exec_module(module)
    play: Play = getattr(module, name)
    return play


async def _serve(play: Play, answers: TextIO) -> None:
    running: dict[int, asyncio.Task[None]] = {}
    reader = ThreadPoolExecutor(1)  # of its own: what blocks in `asyncio.to_thread` holds up no other episode's end
    while line := await asyncio.get_running_loop().run_in_executor(reader, sys.stdin.readline):
        message = json.loads(line)
        number = message["id"]
        if not message.get("cancel"):
            running[number] = asyncio.create_task(_one(play, message, answers))
        elif number in running:
            running.pop(number).cancel()
        running = {i: task for i, task in running.items() if not task.done()}


async def _one(play: Play, message: dict[str, Any], answers: TextIO) -> None:
    try:
        answer = await play(message["task"], message["base_url"], message["token"])
        line = json.dumps({"id": message["id"], "ok": True, **answer})
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - it is told, and costs one episode
        path = tuple((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
        if path not in _told:
            _told.add(path)
            traceback.print_exc()
        why = "".join(traceback.format_exception_only(type(error), error)).strip()
        line = json.dumps({"id": message["id"], "ok": False, "error": why})
    answers.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
