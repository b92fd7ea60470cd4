"""The backends `docker` and `podman`: each program in a container of its own, by the command line of either.

docs/environments.md#sandbox has what they do otherwise than bubblewrap. A kill of the kernel counts as "memory".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from grpo_dist.errors import ConfigError
from grpo_dist.sandbox.base import ENVIRONMENT, NOBODY, Outcome, Sandbox, SandboxSettings
from grpo_dist.supervisor import left_behind, own_prefix

PREFIX = "grpo_dist-sandbox"  # of names of containers, and of working folders
_OWN_ERROR, _KILLED = 125, 137  # exit codes


class Container(Sandbox):
    """See `Sandbox`."""

    def __init__(self, settings: SandboxSettings, folders: Sequence[str]) -> None:
        super().__init__(settings, folders)
        self._running: dict[str, Popen[bytes]] = {}
        if settings.image is None:
            raise ConfigError(f"sandbox.image=null: name the image that sandbox.backend={settings.backend} runs")
        if shutil.which(settings.backend) is None:
            raise ConfigError(f"sandbox.backend={settings.backend}: there is no such command on PATH; install it")
        place = Path(tempfile.gettempdir())
        for folder in left_behind(PREFIX, place):
            names = self._command("ps", "--all", "--quiet", "--filter", f"name={folder.name}").stdout.split()
            self._command("rm", "--force", *names) if names else None
            _remove(folder)
        self._place = tempfile.mkdtemp(prefix=own_prefix(PREFIX), dir=place)
        self._user = f"{os.getuid()}:{os.getgid()}"
        if os.geteuid() == 0:
            self._user = f"{NOBODY}:{NOBODY}"
            os.chown(self._place, NOBODY, NOBODY)

    def _run(self, command: Sequence[str], stdin: bytes, timeout: float) -> Outcome:
        name = f"{Path(self._place).name}-{uuid.uuid4().hex}"
        run = [*self._options(name), str(self._settings.image), *command]
        with self._lock:
            self._require_open()
            process = self._running[name] = Popen(run, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        try:
            used, end = partial(_used, self._place), partial(self._kill, name, process)
            outcome = self._settings.attend(process, stdin, timeout, used, end)
        finally:
            del self._running[name]
        if outcome.exit_code == _OWN_ERROR:
            said = outcome.stderr.decode(errors="replace").strip()
            raise ConfigError(f"sandbox.backend={self._settings.backend}, sandbox.image={self._settings.image}: {said}")
        killed = outcome.exit_code == _KILLED and not outcome.ended_by
        return outcome._replace(ended_by="memory") if killed else outcome

    def _end(self) -> None:
        for name, process in list(self._running.items()):
            self._kill(name, process)
        _remove(Path(self._place))

    def _options(self, name: str) -> list[str]:
        settings, memory = self._settings, f"{self._settings.memory_mib}m"
        limits = {"nofile": 1024, "core": 0, "cpu": int(settings.cpu_s), "fsize": settings.disk_mib << 20}
        options = [settings.backend, "run", "--rm", "--interactive", "--init", "--pull=never", f"--name={name}"]
        options += ["--network=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        options += [f"--memory={memory}", f"--memory-swap={memory}", f"--pids-limit={settings.processes}"]
        options += [f"--ulimit={kind}={most}" for kind, most in limits.items()]
        options += [f"--tmpfs=/tmp:rw,size={settings.disk_mib}m,mode=1777", f"--shm-size={settings.disk_mib}m"]
        options += [f"--volume={self._place}/{number}:{folder}" for number, folder in enumerate(self._folders)]
        options += [f"--workdir={self._folders[0]}", f"--env=HOME={self._folders[0]}", f"--user={self._user}"]
        options += ["--userns=keep-id"] if settings.backend == "podman" and os.geteuid() != 0 else []
        return [*options, *(f"--env={key}={value}" for key, value in ENVIRONMENT.items() if key != "PATH")]

    def _kill(self, name: str, process: Popen[bytes]) -> None:
        if process.poll() is None:
            self._command("kill", name)
            process.kill()

    def _command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self._settings.backend, *arguments], stdin=DEVNULL, capture_output=True, text=True)


def _used(folder: str) -> dict[str, float]:
    sizes = []
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # it has just been removed
                sizes.append(os.lstat(os.path.join(at, name)).st_blocks << 9)
    return {"disk": sum(sizes)}


def _remove(folder: Path) -> None:
    for at, folders, _ in os.walk(folder):
        for name in folders:
            if not os.path.islink(path := os.path.join(at, name)):
                os.chmod(path, 0o700)  # programs may have closed it to their own user
    shutil.rmtree(folder, ignore_errors=True)
