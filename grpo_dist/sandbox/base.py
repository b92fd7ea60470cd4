"""What all sandboxes share: settings, files that are put into them, and programs that are attended to their end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from subprocess import Popen, TimeoutExpired
from typing import IO, NamedTuple, Self

from grpo_dist.errors import SandboxError

VARIABLE = "GRPO_DIST_SANDBOX"  # the settings of a run, as JSON
FOLDER = "/sandbox"  # the usual working folder, as programs see it
# Programs get no other variables. Libraries that start a thread for each core would exceed `processes`.
ENVIRONMENT = {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
NOBODY = 65534  # whom programs belong to outside, where root has started them
LOOK_S, END_S = 0.05, 20.0  # between two looks at what a program uses; for a killed one to be gone
# What the kernel ends single processes with, should it be there before a look at their sum.
_ENDED_BY = {128 + signal.SIGXCPU: "cpu", 128 + signal.SIGXFSZ: "disk"}


@contextlib.contextmanager
def given(settings: Mapping[str, object]) -> Iterator[None]:
    """Tell this process and those that a block starts the settings of their run."""
    before = os.environ.get(VARIABLE, "{}")
    os.environ[VARIABLE] = json.dumps(settings)
    try:
        yield
    finally:
        os.environ[VARIABLE] = before


class Outcome(NamedTuple):
    """How a program ended; `ended_by` is "" or its limit: timeout, memory, processes, cpu, output, disk.

    The exit code is 128 and the signal's number where a signal ended it.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    ended_by: str


@dataclass(frozen=True)
class SandboxSettings:
    """The section `sandbox` of a config. Its defaults are those of grpo.yaml, for use outside of a run."""

    backend: str = "bubblewrap"
    image: str | None = None
    memory_mib: int = 1024
    processes: int = 64
    cpu_s: float = 60.0
    output_mib: int = 1
    disk_mib: int = 256

    @classmethod
    def of_run(cls) -> Self:
        """Return those of the run that this process belongs to."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    def exceeded(self, used: Mapping[str, float]) -> str:
        """Return the first limit that is exceeded, else ""."""
        most = {name: getattr(self, f"{name}_mib") << 20 for name in ("memory", "output", "disk")}
        most |= {"processes": self.processes, "cpu": self.cpu_s}
        return next((name for name, value in used.items() if value > most[name]), "")

    def attend(
        self,
        process: Popen[bytes],
        stdin: bytes,
        timeout: float,
        used: Callable[[], Mapping[str, float]],
        end: Callable[[], None],
    ) -> Outcome:
        """Feed a program, read what it writes, and `end` it at its first limit; `used` tells what it uses."""
        until, ended_by = time.monotonic() + timeout, ""
        # `communicate` forgets what it has not written yet when it times out.
        feeding = threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True)
        process.stdin = None
        feeding.start()
        try:
            while True:
                wait = min(LOOK_S, max(until - time.monotonic(), 0.0))
                try:
                    out, err = process.communicate(timeout=END_S if ended_by else wait)
                    break
                except TimeoutExpired as running:
                    if ended_by:
                        raise SandboxError(f"sandbox: still runs {END_S:g} s after its end: {process.args!r}") from None
                    written = len(running.stdout or b"") + len(running.stderr or b"")
                late = "timeout" if time.monotonic() >= until else ""
                if ended_by := self.exceeded({"output": written}) or self.exceeded(used()) or late:
                    end()
        finally:
            end()
        feeding.join()
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        most, at_end = self.output_mib << 20, {"output": len(out) + len(err), "disk": used()["disk"]}
        ended_by = ended_by or self.exceeded(at_end) or _ENDED_BY.get(code, "")
        return Outcome(code, out[:most], err[: max(most - len(out), 0)], ended_by)


def _feed(stream: IO[bytes], content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), stream:  # the program need not read it
        stream.write(content)


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """Runs programs in a working folder, which is all that is kept between them; for any number of threads.

    A backend makes the place `_place` for what is kept, runs a program (`_run`), and ends and removes all (`_end`).
    """

    def __init__(self, settings: SandboxSettings, folders: Sequence[str]) -> None:
        self._settings, self._is_closed, self._lock = settings, False, threading.Lock()
        self._folders, self._place = tuple(folders), ""

    def exec(self, command: Sequence[str], stdin: bytes = b"", timeout: float = 10.0) -> Outcome:
        """Run a program for at most `timeout` seconds; whatever it has started has then ended too.

        Raises:
            ConfigError: the backend does not work.
            SandboxError: the sandbox is closed, before or meanwhile.
        """
        self._require_open()
        outcome = self._run(command, stdin, timeout)
        self._require_open()
        return outcome

    def put(self, files: Mapping[str, bytes | str]) -> None:
        """Write files, by their paths in the working folder, or whole paths in a folder that is kept.

        Raises:
            SandboxError: a path leads out of these folders, or the file has no room; or the sandbox is closed.
        """
        with self._lock:
            self._require_open()
            for name, content in files.items():
                path = PurePosixPath(self._folders[0], name)
                within = [each for each in self._folders if PurePosixPath(each) in path.parents]
                if not within or ".." in path.parts or "\0" in name:
                    raise SandboxError(f"sandbox: {name!r}: must be a path below {', '.join(self._folders)}")
                place = f"{self._place}/{self._folders.index(within[0])}"
                _write(place, path.relative_to(within[0]), content.encode() if isinstance(content, str) else content)

    def close(self) -> None:
        """End what runs, and remove the working folder."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._end()

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _run(self, command: Sequence[str], stdin: bytes, timeout: float) -> Outcome: ...

    @abstractmethod
    def _end(self) -> None: ...

    def make_folders(self, copy_of: Sandbox | None) -> None:
        """Make the folders; what is in those of the same names in `copy_of`, where nothing runs now, is copied."""
        for number, folder in enumerate(self._folders):
            own = f"{self._place}/{number}"
            os.mkdir(own)
            if copy_of is not None and folder in copy_of._folders:
                there = f"{copy_of._place}/{copy_of._folders.index(folder)}"
                copied = subprocess.run(["cp", "-aT", there, own], capture_output=True, text=True)  # links stay links
                if copied.returncode:
                    raise SandboxError(f"sandbox: {folder} cannot be copied (sandbox.disk_mib): {copied.stderr[-300:]}")
            if os.geteuid() == 0:
                os.chown(own, NOBODY, NOBODY)

    def _require_open(self) -> None:
        if self._is_closed:
            raise SandboxError("sandbox: it is closed; open another one")


def _write(folder: str, path: PurePosixPath, content: bytes) -> None:
    """Write a file below a folder, whatever programs do in it meanwhile."""
    *parents, last = path.parts
    try:
        with contextlib.ExitStack() as opened:
            here = _opened(opened, folder, os.O_DIRECTORY)
            for parent in parents:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=here)
                here = _opened(opened, parent, os.O_DIRECTORY | os.O_NOFOLLOW, here)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISLNK(os.lstat(last, dir_fd=here).st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                os.unlink(last, dir_fd=here)
            file = _opened(opened, last, os.O_WRONLY | os.O_CREAT | os.O_EXCL, here)
            with open(file, "wb", closefd=False) as stream:
                stream.write(content)
    except OSError as error:
        full = " (sandbox.disk_mib)" if error.errno == errno.ENOSPC else ""
        raise SandboxError(f"sandbox: {str(path)!r} cannot be written: {error.strerror}{full}") from None


def _opened(stack: contextlib.ExitStack, path: str, flags: int, folder: int | None = None) -> int:
    """Open a file or folder for a block; what root has made belongs to the programs' user."""
    opened = os.open(path, flags, 0o777, dir_fd=folder)
    stack.callback(os.close, opened)
    if os.geteuid() == 0:
        os.fchown(opened, NOBODY, NOBODY)
    return opened
