"""The backend `bubblewrap`: programs in namespaces of Linux; limits hold for the sum of a program's processes.

One bwrap, the holder, has what stays: the system, read-only, and the working folder, a file system in memory. Each
program gets another bwrap, which enters the namespaces of the holder, its process ids among them. So the kernel itself
ends all programs and frees the folder when the holder ends, at the latest with this process, whose pipe it reads.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen

from grpo_dist.errors import ConfigError
from grpo_dist.sandbox.base import END_S, ENVIRONMENT, NOBODY, Outcome, Sandbox, SandboxSettings

PLACES = "/usr/local/bin:/usr/bin:/bin"  # of the distribution; PyPI's package bwrap is another program
_KEPT = "/kept"  # where the holder has the folders that are kept, by their numbers
_TEMPORARY = ("/tmp", "/dev/shm")
_PAGE, _TICKS = resource.getpagesize(), os.sysconf("SC_CLK_TCK")
_REMEDY = (
    "it needs user namespaces: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0, in a container docker run --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined; or set sandbox.backend=docker or podman"
)


class Bubblewrap(Sandbox):
    """See `Sandbox`. Where root opens it, programs belong to nobody."""

    def __init__(self, settings: SandboxSettings, folders: Sequence[str]) -> None:
        super().__init__(settings, folders)
        bwrap, nsenter, choom = map(_found, ("bwrap", "nsenter", "choom"))
        _require_version(bwrap)
        is_root, held = os.geteuid() == 0, ("user", "pid", "net", "uts", "cgroup")
        size = str((settings.disk_mib << 20) + _PAGE)  # whoever fills it has exceeded the limit
        options = [bwrap, *(f"--unshare-{name}" for name in held), "--hostname", "sandbox", *_system()]
        # Programs' bwraps need a /proc in which nothing is covered, to make theirs, and devices, to show some of them.
        options += "--as-pid-1 --proc /proc --bind /proc /all --dev-bind /dev /dev --dir /tmp --size".split()
        options += [size, "--tmpfs", _KEPT]
        gate = "--userns-block-fd" if is_root else "--block-fd"
        with self._started(options, gate, ["sh", "-c", "echo; exec cat"]) as (self._holder, init):
            self._init = os.pidfd_open(init)
            for kind in ("uid", "gid") if is_root else ():  # programs get another user than the holder
                Path(f"/proc/{init}/{kind}_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        assert self._holder.stdout
        if not self._holder.stdout.readline():
            raise self._failure(self._holder, ProcessLookupError("bwrap ended"))
        self._held_proc = os.stat(f"/proc/{init}/root/proc").st_dev
        os.mkdir(folder := f"/proc/{init}/root{_KEPT}/work")
        self._opened = self._init, os.open(folder, os.O_DIRECTORY)
        self._place = f"/proc/{os.getpid()}/fd/{self._opened[1]}"
        user = ["--setuid", str(NOBODY), "--setgid", str(NOBODY)] if is_root else ["--preserve-credentials"]
        enter = [nsenter, f"--target={init}", "--mount", *(f"--{name}" for name in held), *user, "--", bwrap]
        # The first to end where memory runs out.
        self._enter = [choom, "-n", "1000", "--", *enter, *_options(size, folders)]

    def _run(self, command: Sequence[str], stdin: bytes, timeout: float) -> Outcome:
        with ExitStack() as opened:
            with self._started(self._enter, "--block-fd", command) as (process, _):
                init = _child(_child(process.pid))
                opened.callback(os.close, end := os.pidfd_open(init))
                _limit(init, self._settings)
                own: list[int] = []
                for folder in self._own_folders(init, process):
                    own.append(os.open(folder, os.O_DIRECTORY))
                    opened.callback(os.close, own[-1])
            used = functools.partial(_used, *own, most=self._settings.memory_mib << 20)
            return self._settings.attend(process, stdin, timeout, used, functools.partial(_kill, end))

    def _end(self) -> None:
        _kill(self._init)
        self._holder.communicate()
        for opened in self._opened:
            os.close(opened)

    @contextmanager
    def _started(self, options: Sequence[str], gate: str, program: Sequence[str]) -> Iterator[tuple[Popen[bytes], int]]:
        """Start a bwrap, with its child's id as it sees it, that waits at the gate, an option, until the block ends."""
        with ExitStack() as pipes:
            ends = zip((*os.pipe(), *os.pipe()), ("rb", "wb") * 2, strict=True)
            told, tell, opened, _ = (pipes.enter_context(open(end, mode, buffering=0)) for end, mode in ends)
            fds = tell.fileno(), opened.fileno()
            command = [*options, "--cap-drop", "ALL", "--info-fd", str(fds[0]), gate, str(fds[1]), "--", *program]
            process = Popen(command, pass_fds=fds, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={})
            try:
                tell.close()
                text = b""
                while b"}" not in text and (block := told.read(4096)):
                    text += block
                if b"}" not in text:
                    raise ProcessLookupError("bwrap ended")
                yield process, json.loads(text)["child-pid"]
            except (OSError, IndexError) as error:
                raise self._failure(process, error) from None
            except BaseException:
                process.kill()
                raise

    def _own_folders(self, init: int, process: Popen[bytes]) -> list[str]:
        """Wait until a program has its /proc; where that and what it can write to are seen from outside."""
        root = f"/proc/{init}/root"
        while process.poll() is None:
            with suppress(FileNotFoundError):
                if os.stat(f"{root}/proc").st_dev != self._held_proc:
                    break
            time.sleep(0.001)
        return [root + path for path in ("/proc", self._folders[0], *_TEMPORARY)]

    def _failure(self, process: Popen[bytes], error: Exception) -> ConfigError:
        process.kill()
        self._require_open()
        try:
            said = process.communicate(timeout=1)[1]
        except subprocess.TimeoutExpired as running:
            said = running.stderr or b""
        why = said.decode(errors="replace").strip() or str(error)
        return ConfigError(f"sandbox.backend=bubblewrap: {why}; {_REMEDY}")


@functools.cache
def _found(name: str) -> str:
    if path := shutil.which(name, path=PLACES):
        return path
    raise ConfigError(f"sandbox.backend=bubblewrap: {name} is not in {PLACES}: apt-get install bubblewrap util-linux")


@functools.cache
def _require_version(bwrap: str) -> None:
    said = subprocess.run([bwrap, "--version"], capture_output=True, text=True).stdout.strip()
    version = re.fullmatch(r"bubblewrap (\d+)\.(\d+).*", said)
    if version is None or tuple(map(int, version.groups())) < (0, 8):  # --size and --disable-userns
        raise ConfigError(
            f"sandbox.backend=bubblewrap: {bwrap} --version says {said!r}, but must say bubblewrap 0.8 or newer: "
            "apt-get install bubblewrap, and pip uninstall bwrap, which is another program"
        )


@functools.cache
def _system() -> tuple[str, ...]:
    """The options that show the programs of this machine, and this Python."""
    options = ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        is_link = path.is_symlink()  # into /usr
        options += ["--symlink", os.readlink(path), str(path)] if is_link else ["--ro-bind-try", str(path), str(path)]
    parts = [f"/etc/{name}" for name in ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d")]
    for prefix in {sys.prefix, sys.base_prefix}:
        if not Path(prefix).is_relative_to("/usr"):
            parts += [f"{prefix}/{name}" for name in ("bin", "lib", "lib64", "pyvenv.cfg")]
    for part in parts:
        for folder in reversed(Path(part).parents[:-1]):  # bwrap's own would be open to its user alone
            options += ["--dir", str(folder)]
        options += ["--ro-bind-try", part, part]
    return tuple(options)


def _options(size: str, folders: Sequence[str]) -> Iterator[str]:
    """What a program's own bwrap is told."""
    yield from "--unshare-user --unshare-pid --unshare-ipc --disable-userns --uid 1000 --gid 1000".split()
    yield from "--die-with-parent --new-session --clearenv --proc /proc --dev /dev".split()
    for folder in _TEMPORARY:
        yield from ("--size", size, "--tmpfs", folder)
    yield from _system()
    for number, folder in enumerate(folders):
        yield from ("--bind", f"{_KEPT}/work/{number}", folder)
    yield from ("--chdir", folders[0], "--setenv", "HOME", folders[0])
    for name, value in ENVIRONMENT.items():
        yield from ("--setenv", name, value)
    yield from ("--remount-ro", "/dev", "--remount-ro", "/")


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _limit(pid: int, settings: SandboxSettings) -> None:
    """Set what the kernel holds each process to: fences behind the limits, for the time between two looks."""
    most = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_CPU: int(settings.cpu_s) + 2}
    most |= {resource.RLIMIT_FSIZE: settings.disk_mib << 20, resource.RLIMIT_DATA: settings.memory_mib << 21}
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if release >= (5, 14):  # where it counts the processes of this user namespace, not all of the user's
        most[resource.RLIMIT_NPROC] = settings.processes + 16
    for kind, value in most.items():
        before = resource.prlimit(pid, kind)[1]
        value = value if before == resource.RLIM_INFINITY else min(value, before)
        resource.prlimit(pid, kind, (value, value))


def _used(proc: int, *written: int, most: int) -> dict[str, float]:
    """What the processes of a /proc use, of which the first is bwrap's, and bytes in file systems.

    Memory that processes share counts for each; where the sum is above `most`, each has its share of it.
    """
    at, pids = f"/proc/self/fd/{proc}", list(filter(str.isdecimal, os.listdir(proc)))
    sums, unnamed = [0, 0, 0], dict[tuple[int, int], int]()
    for pid in pids:
        with suppress(OSError):  # it has just ended
            fields = Path(at, pid, "stat").read_bytes().rpartition(b")")[2].split()
            now = int(fields[21]) * _PAGE, int(fields[17]), sum(map(int, fields[11:15]))
            sums = [*map(operator.add, sums, now)]
            for file in os.scandir(f"{at}/{pid}/fd"):  # memory files, and removed ones
                with suppress(OSError):
                    status = file.stat()
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        unnamed[status.st_dev, status.st_ino] = status.st_blocks << 9
    memory, tasks, ticks = sums
    if memory > most:
        memory = sum(map(_share, (Path(at, pid) for pid in pids)))
    systems = map(os.fstatvfs, written)
    disk = sum((system.f_blocks - system.f_bfree) * system.f_frsize for system in systems)
    return {"memory": memory + sum(unnamed.values()), "processes": tasks - 1, "cpu": ticks / _TICKS, "disk": disk}


def _share(process: Path) -> int:
    with suppress(OSError):
        return sum(map(int, re.findall(rb"^Pss: +(\d+)", (process / "smaps_rollup").read_bytes(), re.M))) << 10
    return 0


def _kill(init: int) -> None:
    """End all processes of a namespace, and wait for it."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(init, signal.SIGKILL)
    select.select([init], [], [], END_S)
