"""A reward function in a process of its own, which may hang, crash or be killed without harm to anyone else.

The parent (`Scorer`) sends the responses to one prompt and waits for one result at a time. If a result does not come in
time, even from C code that never returns, the process is killed. A process that ends on a response is replaced, and the
remaining responses go to the new one. Either way that one response has failed, and the caller decides what that means.
Processes that the function has started end with its own (supervisor.py).

Work that the response alone makes costly, such as 9^{9^9} for an answer, is no failure but a wrong answer: a function
does it within limits of its own (`limited`). What custom code prints anywhere is kept (`OutputLines`).

The library pebble has such a process pool, but ends the worker's process alone: after a time-out or a crash what the
function had started lived on (tried with pebble 5.2.3), and it does not collect what the function prints.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from types import FrameType
from typing import Any

from grpo_dist.errors import GrpoDistError, RewardError
from grpo_dist.plugins.names import parse_code
from grpo_dist.rewards.contract import Failure, RewardResult, RowNeeds, Sample, score_group, shown_response, takes_one
from grpo_dist.rewards.load import check_data_sources, load_reward_function
from grpo_dist.supervisor import under_supervisors

START_TIMEOUT_S = 120.0  # importing the user's file, with whatever it imports
END_S = 5.0  # from closing the pipe to the end of the process: exit handlers may run
OUTPUT_BYTES, MOST_BLOCKS = 1 << 16, 8  # read at a time: a pipe's size on Linux, and so many times
MOST_LINES, MOST_LINE_BYTES = 5, 500  # that are kept of what custom code prints
MOST_PRINTED = 10  # lines of one kind of custom code that are shown per step
AGAIN_S = 0.1  # of CPU time, after which the error of `limited` is raised again where somebody has caught it


class Scorer:
    """The parent's side: starts the process, and another one whenever it has ended.

    What the function prints (stdout and stderr) is kept in `printed`. Once the function is loaded, `components` holds
    the reward components that it declares, with their weights, and `needs` what it reads. `path` None: the built-in.
    """

    def __init__(self, path: str | None, name: str, reward_kwargs: Mapping[str, Any], *, timeout_s: float) -> None:
        self._source, self.timeout_s = (path, name, dict(reward_kwargs)), timeout_s
        self.num_starts = 0
        self.printed = OutputLines()
        self.components: dict[str, float] = {}
        self.needs = RowNeeds()
        self._one_by_one = True
        self._process: Popen[bytes] | None = None
        self._output: int | None = None  # file descriptor of what the process prints; None: there will be no more
        self._pipe: Connection | None = None

    def start(self) -> None:
        """Start the process and load the function.

        Raises:
            ConfigError: the function cannot be loaded.
            RewardError: loading it hangs, or ends the process.
        """
        self.stop()
        self._pipe, theirs = Pipe()
        descriptor = theirs.fileno()
        command = [sys.executable, "-u", "-m", "grpo_dist.rewards.scorer", str(descriptor)]
        # The same modules as here: custom code may lie next to the command, or on a path that Ray has added.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = Popen(
            command, pass_fds=[descriptor], env=environment, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        theirs.close()
        self.num_starts += 1
        self._pipe.send(self._source)
        reply = self._receive(START_TIMEOUT_S)
        if isinstance(reply, Failure):
            path, name, _ = self._source
            named = "built-in" if path is None else str(parse_code(path, name))
            raise RewardError(f"the reward function {named} cannot be loaded: {reply.text}")
        self._one_by_one, self.components, self.needs = reply

    def score(self, samples: Sequence[Sample]) -> list[RewardResult | Failure]:
        """Return one result for each sample, in order.

        Raises:
            GrpoDistError: a mistake in the config or the data, which every response would meet.
        """
        results: list[RewardResult | Failure] = []
        while len(results) < len(samples):
            if self._process is None or self._process.poll() is not None:
                self.start()
            assert self._pipe is not None
            rest = samples[len(results) :]
            try:
                self._pipe.send(list(rest))
            except (BrokenPipeError, ConnectionResetError):
                self.stop()
                continue
            results += self._results(rest)
        return results

    def stop(self) -> None:
        """End the process, and the processes that it has started, at once."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(2 * END_S)
            except TimeoutExpired:  # the supervisor was stopped, or has not begun
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._read_output()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._output = None
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _results(self, samples: Sequence[Sample]) -> list[RewardResult | Failure]:
        """Return the results until all have come or the process has ended; then a batch function has failed on all."""
        results: list[RewardResult | Failure] = []
        lost = self._receive(START_TIMEOUT_S)  # None: it has begun
        for sample in samples:
            reply = lost or self._receive(self.timeout_s)
            if isinstance(reply, Failure) and self._pipe is None:  # it did not come from the process
                where = f"reward function {self._source[1]}, data_source={sample.data_source!r}"
                failure = Failure(f"{where}: {reply.text}\n{shown_response(sample.solution_str)}")
                return results + [failure] * (1 if self._one_by_one else len(samples) - len(results))
            results.append(reply)
        return results

    def _receive(self, timeout_s: float) -> Any:
        """Return the next message from the process; if none comes, the process is ended and a Failure says why."""
        assert self._pipe is not None
        assert self._process is not None
        try:
            if self._wait(timeout_s):
                reply = self._pipe.recv()
                if isinstance(reply, GrpoDistError):
                    raise reply
                return reply
            problem = f"did not return within reward.timeout_s={timeout_s:g} seconds and was killed"
        except (EOFError, ConnectionResetError):
            problem = self._how_it_ended()
        self.stop()
        return Failure(problem)

    def _how_it_ended(self) -> str:
        """Return a description of how the process ended; it may have closed its pipe only, and still be running."""
        assert self._process is not None
        deadline = time.monotonic() + END_S
        while (code := self._process.poll()) is None:
            if time.monotonic() >= deadline:
                return f"closed the pipe for its results, lived on for {END_S:g} seconds and was killed"
            self._read_output()
            time.sleep(0.01)
        return f"ended its process {f'by {signal.Signals(-code).name}' if code < 0 else f'with exit code {code}'}"

    def _wait(self, timeout_s: float) -> bool:
        """Tell whether a message or the end came in time. Output is read meanwhile: a full pipe blocks the process."""
        assert self._pipe is not None
        deadline = time.monotonic() + timeout_s
        while True:
            sources: list[Any] = [self._pipe] if self._output is None else [self._pipe, self._output]
            ready = wait(sources, max(0.0, deadline - time.monotonic()))
            if self._output in ready:
                self._read_output()
            if self._pipe in ready or not ready or time.monotonic() >= deadline:  # there may always be more output
                return self._pipe.poll()

    def _read_output(self) -> None:
        """Read what the process has printed so far, up to a limit, since it may never stop."""
        for _ in range(MOST_BLOCKS):
            if self._output is None or not wait([self._output], 0):
                return
            block = os.read(self._output, OUTPUT_BYTES)
            self.printed.add(block)
            if not block:  # nobody can write to it any more
                self._output = None


def serve(pipe: Connection) -> None:
    """Run the process's side: load the function, then score group after group until the parent is gone."""
    path, name, reward_kwargs = pipe.recv()
    try:
        function = load_reward_function(path, name, reward_kwargs)
    except GrpoDistError as error:
        pipe.send(error)
        return
    pipe.send((takes_one(function), dict(function.components), function.needs))
    while True:
        samples = pipe.recv()
        try:
            if path is None:  # what built-in scorers import is not in the time of a response
                check_data_sources(sample.data_source for sample in samples)
            pipe.send(None)
            for result in score_group(function, samples):
                pipe.send(result)
        except GrpoDistError as error:
            pipe.send(error)


def main() -> None:
    """Serve the pipe whose file descriptor is the only argument."""
    descriptor = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
    under_supervisors(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(Connection(descriptor))


# --- what custom code prints ---------------------------------------------------------------------------------------


class OutputLines:
    """Splits output into lines (`MOST_LINE_BYTES` of each) and keeps `most_lines` between two calls of `take`."""

    def __init__(self, most_lines: int = MOST_LINES) -> None:
        self._most_lines = most_lines
        self._lines: list[str] = []
        self._num_more = 0
        self._rest = b""

    def add(self, block: bytes) -> None:
        """Add output, in pieces of any length."""
        first, *others = block.split(b"\n", 1)
        self._rest += first[: MOST_LINE_BYTES - len(self._rest)]
        while others:
            self._end_line()
            if len(self._lines) >= self._most_lines:
                self._num_more += others[0].count(b"\n")
                self._rest = others[0].rpartition(b"\n")[2][:MOST_LINE_BYTES]
                return
            first, *others = others[0].split(b"\n", 1)
            self._rest = first[:MOST_LINE_BYTES]

    def take(self) -> tuple[list[str], int]:
        """Return the first lines since the last call, and the number of further lines."""
        if self._rest:
            self._end_line()
        taken = self._lines, self._num_more
        self._lines, self._num_more = [], 0
        return taken

    def _end_line(self) -> None:
        if len(self._lines) < self._most_lines:
            self._lines.append(self._rest.decode(errors="replace").rstrip())
        else:
            self._num_more += 1
        self._rest = b""


_LINES: ContextVar[OutputLines | None] = ContextVar("printed lines", default=None)


@contextlib.contextmanager
def printing_to(lines: OutputLines) -> Iterator[None]:
    """Add to `lines` what the block prints, and the tasks and threads that asyncio starts in it; it is printed too.

    An error of the package that ends the block gets the lines as notes, as nobody will take them.
    """
    if not isinstance(sys.stdout, _Copied):
        sys.stdout = _Copied(sys.stdout)
    token = _LINES.set(lines)
    try:
        yield
    except GrpoDistError as error:
        for line in lines.take()[0]:
            error.add_note(f"printed before: {line}")
        raise
    finally:
        _LINES.reset(token)


class _Copied:
    """A stream that also adds what is written to it to the lines of the block that writes (`printing_to`)."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> Any:
        if (lines := _LINES.get()) is not None:
            lines.add(text.encode(errors="replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrintedLines:
    """The lines that all processes of a run have printed, by kind of custom code: the first ones, and how many more."""

    def __init__(self) -> None:
        self._printed: dict[str, tuple[list[str], int]] = {}

    def note(self, kind: str, lines: Sequence[str], num_more: int) -> None:
        """Add lines; `num_more` lines were left out by the process itself."""
        kept, more = self._printed.get(kind, ([], 0))
        room = MOST_PRINTED - len(kept)
        self._printed[kind] = [*kept, *lines[:room]], more + num_more + len(lines[room:])

    def take(self) -> list[str]:
        """Return a message for each kind that has printed something since the last call."""
        printed, self._printed = self._printed, {}
        messages = []
        for kind, (lines, more) in printed.items():
            if lines:
                rest = [f"... and {more} more lines"] if more else []
                messages.append("\n  ".join([f"the {kind} printed:", *lines, *rest]))
        return messages


# --- limits that a scorer survives -----------------------------------------------------------------------------------


class TooCostly(BaseException):
    """The work went beyond its limits; no `except Exception` of a library in between catches it."""


@contextlib.contextmanager
def limited(*, cpu_s: float, memory_bytes: int) -> Iterator[None]:
    """Run a block with limits; within C code they hold wherever it looks for signals, as Python's integers do.

    Outside the main thread of a process, where Python runs no signal handlers, only the memory is limited.

    Args:
        cpu_s: CPU time of the process, all of its threads.
        memory_bytes: address space beyond what the process has now.

    Raises:
        TooCostly: the block went beyond the CPU time, or raised MemoryError.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        with _alarm(cpu_s) if threading.current_thread() is threading.main_thread() else contextlib.nullcontext():
            yield
    except MemoryError:
        raise TooCostly from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _alarm(cpu_s: float) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise TooCostly

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s, AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    finally:  # also where the alarm came on the way out
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    main()
