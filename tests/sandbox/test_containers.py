"""The backends docker and podman, with a program in their place that does what is asked without a container."""

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError, SandboxError
from grpo_dist.sandbox import SandboxSettings, check, containers, open_sandbox
from tests.messages import refuses

# Records its arguments; `run` becomes the command, in the folder that it is told to mount; `kill` ends it by its name.
STAND_IN = """#!{python}
import json, os, signal, sys
log = "{log}"
open(log, "a").write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    options = dict(word[2:].partition("=")[::2] for word in sys.argv if word.startswith("--"))
    position = sys.argv.index("the/image:1")
    if sys.argv[position + 1] == "unknown":
        print("no such image", file=sys.stderr)
        sys.exit(125)
    open(f"{folder}/{{options['name']}}", "w").write(str(os.getpid()))
    os.chdir(options["volume"].partition(":")[0])
    os.execvp(sys.argv[position + 1], sys.argv[position + 1 :])
if sys.argv[1] == "kill":
    os.kill(int(open(f"{folder}/{{sys.argv[2]}}").read()), signal.SIGKILL)
if sys.argv[1] == "ps":
    print("left1\\nleft2")
"""
SETTINGS = SandboxSettings(backend="docker", image="the/image:1", memory_mib=100, processes=7, cpu_s=5.5, disk_mib=3)


@pytest.fixture(params=["docker", pytest.param("podman", marks=pytest.mark.deep)])
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SandboxSettings:
    (tmp_path / "bin").mkdir()
    (tmp_path / "folders").mkdir()
    program = tmp_path / "bin" / request.param
    program.write_text(STAND_IN.format(python=sys.executable, log=tmp_path / "log", folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
    return replace(SETTINGS, backend=request.param)


def calls(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


@pytest.mark.parametrize("settings", ["docker", "podman"], indirect=True)
def test_the_command_shuts_in_what_it_runs(settings: SandboxSettings, tmp_path: Path) -> None:
    with open_sandbox(settings) as sandbox:
        sandbox.put({"a/b": "text"})
        outcome = sandbox.exec(["sh", "-c", "cat a/b; cat; exit 3"], stdin=b" more")
        (folder,) = (tmp_path / "folders").iterdir()
        assert outcome == (3, b"text more", b"", "")
    assert not folder.exists()
    ((verb, *options, image, shell, flag, script),) = calls(tmp_path)
    assert (verb, image, shell, flag, script) == ("run", "the/image:1", "sh", "-c", "cat a/b; cat; exit 3")
    name = next(option for option in options if option.startswith(f"--name={folder.name}-"))
    user = f"{65534}:{65534}" if os.geteuid() == 0 else f"{os.getuid()}:{os.getgid()}"
    rootless = ["--userns=keep-id"] if settings.backend == "podman" and os.geteuid() != 0 else []
    assert sorted(options) == sorted(
        [
            *("--rm", "--interactive", "--init", "--pull=never", "--network=none", "--read-only", "--cap-drop=ALL"),
            *("--security-opt=no-new-privileges", "--memory=100m", "--memory-swap=100m", "--pids-limit=7", name),
            *("--ulimit=nofile=1024", "--ulimit=core=0", "--ulimit=cpu=5", f"--ulimit=fsize={3 << 20}"),
            *("--tmpfs=/tmp:rw,size=3m,mode=1777", "--shm-size=3m", f"--volume={folder}/0:/sandbox"),
            *("--workdir=/sandbox", f"--user={user}", "--env=HOME=/sandbox", "--env=LANG=C.UTF-8"),
            *("--env=OMP_NUM_THREADS=1", *rootless),
        ]
    )


def test_what_exceeds_a_limit_is_killed_by_name(settings: SandboxSettings, tmp_path: Path) -> None:
    programs = {"timeout": "", "disk": "head -c 4194304 /dev/zero > x;", "output": "yes | head -c 2000000;"}
    for limit, program in programs.items():
        with open_sandbox(settings) as sandbox:
            timeout = 0.5 if limit == "timeout" else 60
            outcome = sandbox.exec(["sh", "-c", f"{program} exec sleep 1000"], timeout=timeout)
            assert (outcome.ended_by, outcome.exit_code) == (limit, 137)
    with open_sandbox(settings) as sandbox:
        assert sandbox.exec(["sh", "-c", "kill -9 $$"]).ended_by == "memory", "the kernel has killed it"
    killed = [name for verb, name, *_ in calls(tmp_path) if verb == "kill"]
    started = {word.removeprefix("--name=") for verb, *words in calls(tmp_path) for word in words if verb == "run"}
    assert len(killed) == 3
    assert set(killed) <= started


def test_closing_ends_what_runs(settings: SandboxSettings, tmp_path: Path) -> None:
    sandbox, script = open_sandbox(settings), "mkdir -p closed/inner; chmod 0 closed; touch started; exec sleep 1000"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.exec, ["sh", "-c", script], timeout=1000)
        while not list((tmp_path / "folders").glob("*/0/started")):
            assert not running.done()
        sandbox.close()
        with refuses(SandboxError, "closed"):
            running.result()
    assert list((tmp_path / "folders").iterdir()) == []
    sandbox.close()


def test_what_a_killed_process_left_is_removed_by_the_next_one(settings: SandboxSettings, tmp_path: Path) -> None:
    killed = subprocess.Popen(["true"])
    killed.wait()
    prefix = containers.own_prefix(containers.PREFIX).replace(str(os.getpid()), str(killed.pid))
    (tmp_path / "folders" / f"{prefix}left" / "inner").mkdir(parents=True)
    with open_sandbox(settings):
        assert len(list((tmp_path / "folders").iterdir())) == 1
    asked, removed = calls(tmp_path)
    assert asked == ["ps", "--all", "--quiet", "--filter", f"name={prefix}left"]
    assert removed == ["rm", "--force", "left1", "left2"]


def test_what_does_not_work_is_refused(settings: SandboxSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    check(settings)
    with refuses(ConfigError, "sandbox.image=null", f"sandbox.backend={settings.backend}"):
        check(SandboxSettings(backend=settings.backend))
    with open_sandbox(settings) as sandbox, refuses(ConfigError, "sandbox.image=the/image:1", settings.backend):
        sandbox.exec(["unknown"])
    monkeypatch.setenv("PATH", "/nowhere")
    with refuses(ConfigError, f"sandbox.backend={settings.backend}", "PATH"):
        check(settings)
