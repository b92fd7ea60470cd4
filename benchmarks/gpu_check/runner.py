"""Part by part: each in a process of its own, its result in a file, so that a check that was cut off goes on."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.gpu import gpu_facts
from benchmarks.gpu_check.parts import PARTS, Part
from benchmarks.gpu_check.results import Result, read_result, write_json, write_result

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "safetensors", "triton", "vllm", "ray")
# A part that is told to end gets so long to end what it has started.
GRACE_S = 20.0
# Folders in which parts leave what is too large to keep.
LARGE = ("model", "model.tmp", "experts", "export", "export.tmp", "run")
LAST_LINES = 5  # of the log of a part that ended without a word


@dataclass(frozen=True)
class Check:
    """A run of the check.

    Attributes:
        out: its folder: results.json, and for each setup a folder of parts.
        setup: what it runs on.
        say: takes a line of progress.
        program: the module that runs a part.
    """

    out: Path
    setup: dict[str, Any]
    say: Callable[[str], None]
    program: str = "benchmarks.gpu_check.process"

    @property
    def folder(self) -> Path:
        """Of the parts on this device at this scale."""
        return self.out / f"{self.setup['device']}-{self.setup['scale']}"

    def run(self, parts: Sequence[Part], *, fresh: bool) -> list[Result]:
        """Run what has no result yet. What was skipped or has failed is tried again; a memory that was full is not.

        Returns:
            The results of these parts, in their order.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in parts if fresh else ():
            (self.folder / f"{part.name}.json").unlink(missing_ok=True)
        results = []
        try:
            for part in parts:
                results.append(self._result(part))
                if part.needs_model:  # which may have been written again, and better
                    results = [read_result(self.folder, each.part, self.setup) or each for each in results]
                write_json(self.out / "results.json", self._record(parts))
        finally:
            for name in LARGE:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        return results

    @property
    def _model(self) -> Path:
        return self.folder / "model"

    def _result(self, part: Part) -> Result:
        found = read_result(self.folder, part.name, self.setup)
        if found is not None and found.status in ("done", "out of memory"):
            self.say(f"{part.name}: has its result")
            return found
        if part.needs_model and not part.not_installed() and not self._model.is_dir():
            made = self._start(next(each for each in PARTS if each.name == "model"))
            if made.status != "done":
                reason = f"there is no model for it: {made.reason}"
                result = Result(part.name, made.status, self.setup, reason)
                write_result(self.folder, result)
                return result
        return self._start(part)

    def _start(self, part: Part) -> Result:
        """Run a part in a process, and wait for it as long as it may take."""
        self.say(f"{part.name}: {part.measures} (about {part.seconds} s)")
        (self.folder / f"{part.name}.json").unlink(missing_ok=True)
        log, started = self.folder / f"{part.name}.log", time.monotonic()
        command = [sys.executable, "-m", self.program, part.name]
        command += ["--folder", str(self.folder.resolve()), "--setup", json.dumps(self.setup)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        with log.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )
            try:
                code = str(process.wait(timeout=part.limit_s))
            except subprocess.TimeoutExpired:
                code = f"none after {part.limit_s} s, and was ended"
            finally:
                _end(process)
        result = read_result(self.folder, part.name, self.setup)
        if result is None:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            reason = f"its process's exit code is {code}; {log} ends: {' | '.join(lines)}"
            result = Result(part.name, "failed", self.setup, reason, time.monotonic() - started)
            write_result(self.folder, result)
        self.say(
            f"{part.name}: {result.status} after {time.monotonic() - started:.0f} s {result.reason[:100]}".rstrip()
        )
        return result

    def _record(self, parts: Sequence[Part]) -> dict[str, Any]:
        """All that has been found on this setup, also by earlier checks of other parts."""
        names = dict.fromkeys(part.name for part in (*PARTS, *parts))
        found = [result for name in names if (result := read_result(self.folder, name, self.setup)) is not None]
        return {"setup": self.setup, "parts": [asdict(result) for result in found]}


def find_setup(device: str, scale: str) -> dict[str, Any]:
    """What the check runs on: results of another GPU or of other packages do not count."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    facts = gpu_facts() if device == "cuda" else {}
    return {"device": device, "scale": scale, "python": platform.python_version(), **versions, **facts}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part's process and what it has started, which is its session: politely first, while it still runs."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
