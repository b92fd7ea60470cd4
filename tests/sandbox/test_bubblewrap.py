"""Hostile programs in bubblewrap, run by this user and by one that may do nothing (attacks.py); refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.errors import ConfigError, SandboxError
from grpo_dist.sandbox import Outcome, SandboxSettings, bubblewrap, check, open_sandbox
from tests.messages import refuses, says
from tests.programs import program
from tests.sandbox import attacks

ROOT = Path(__file__).parents[2]
NOBODY = 65534
Told = dict[str, Any]


def run_as(user: str, orphans: int) -> Told:
    """What attacks.py tells, with the first interpreter that the user can run it with."""
    if user == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if user == "nobody" else {}
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", "import grpo_dist.sandbox"]
        try:
            found = subprocess.run(command, env=environment, capture_output=True, cwd="/", **identity)
        except OSError:
            continue
        if found.returncode == 0:
            command = [python, str(ROOT / "tests/sandbox/attacks.py"), str(orphans)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", **identity)
            assert done.returncode == 0, done.stderr
            told: Told = json.loads(done.stdout)
            return told
    pytest.skip("no Python of at least 3.11, and this checkout, can be read by the user nobody")


@pytest.fixture(scope="module", params=[("self", 1000), pytest.param(("nobody", 10_000), marks=pytest.mark.deep)])
def told(request: pytest.FixtureRequest, bwrap: None) -> Told:
    return run_as(*request.param)


@pytest.fixture
def programs(told: Told) -> dict[str, Outcome]:
    return {name: Outcome(*outcome) for name, outcome in told["programs"].items()}


def test_each_limit_ends_a_program_and_all_that_it_has_started(programs: dict[str, Outcome]) -> None:
    expected = {
        "memory": ["grows", "shared", "many", "memory files"],
        "processes": ["fork bomb", "unreaped"],
        "cpu": ["busy"],
        "output": ["print"],
        "disk": ["files", "files in /tmp"],
        "timeout": ["hangs"],
    }
    names = [name for each in expected.values() for name in each]
    assert {limit: [name for name in names if programs[name].ended_by == limit] for limit in expected} == expected
    assert len(programs["print"].stdout) == 1 << 20
    assert {programs[name].exit_code for name in names} <= {137, 1}


def test_the_kernel_refuses_what_is_too_large_at_once(programs: dict[str, Outcome]) -> None:
    assert "MemoryError" in str(programs["ten GiB"].stderr)
    assert "OSError" in str(programs["file"].stderr)
    assert [programs[name].exit_code for name in ("ten GiB", "file", "error")] == [1, 1, 7]


def test_what_stays_below_the_limits_ends_by_itself(programs: dict[str, Outcome]) -> None:
    """Memory that five processes share counts once; thousands of orphans are reaped."""
    assert programs["shares"] == (0, "shared [0, 0, 0, 0]\n", "", "")
    assert programs["orphans"] == (0, "done\n", "", "")
    assert programs["next"] == (0, "here\n", "", ""), "after a program that hung"
    assert programs["reads slowly"] == (0, "1000000\n", "", "")
    assert programs["reads nothing"] == (0, "here\n", "", "")


def test_nothing_outside_can_be_reached(programs: dict[str, Outcome]) -> None:
    refused, others, away, interfaces = str(programs["connect"].stdout).splitlines()
    assert refused == others == "ConnectionRefusedError"
    assert (away, interfaces) == ("OSError", "['lo']")
    own = [line for line in str(programs["write"].stdout).splitlines() if not line.startswith("written /tmp/")]
    assert (own, programs["kept"].stdout) == ([], "secret")
    variables, *read, seen = str(programs["read"].stdout).splitlines()
    assert variables == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PWD'] 1000 /sandbox"
    assert read == ["read /proc/1/environ b''"]
    assert seen == "[]", "processes of others"
    assert programs["signal"].stdout == "ProcessLookupError\nProcessLookupError\n"
    assert programs["enter"].stdout == "[-1, -1]\n", "no namespaces of its own"


def test_nothing_outlives_its_program_or_its_sandbox(told: Told) -> None:
    daemon = told["daemon"]
    assert (daemon["daemon"], daemon["left by a daemon"], daemon["left by close"]) == ("gone", [], [])
    says(daemon["closed"], "closed")
    assert [bool(text) for text in daemon["again"]] == [True, True, False]
    assert told["left open"] == 0, "file descriptors"
    assert len(told["closings"]) == 30
    assert all("closed" in text for text in told["closings"])


def test_files_stay_in_the_working_folder(told: Told) -> None:
    links = told["links"]
    assert all(links["refused"].values()), links["refused"]
    says(links["refused"]["room"], "sandbox.disk_mib")
    assert (links["kept"], links["made"], links["replaced"]) == ({"kept": "kept"}, "text", "other")


def test_sixteen_threads_have_a_sandbox_each(told: Told) -> None:
    assert told["side by side"] == [f"{number}1\n" * 3 for number in range(16)]


KILLED = """
import os, sys, threading
from grpo_dist.sandbox import open_sandbox
sandbox = open_sandbox()
run = lambda: sandbox.exec(["python3", "-c", f"import time; time.sleep(1000) # {sys.argv[1]}"], timeout=1000)
threading.Thread(target=run).start()
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_nothing_outlives_a_killed_process(bwrap: None) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, attacks.MARK], stdin=subprocess.PIPE)
    while not set(attacks.marked()) - {process.pid}:
        assert process.poll() is None
    assert process.stdin
    process.stdin.close()
    assert process.wait() == -9
    while attacks.marked():  # the kernel needs a moment
        pass


def test_it_works_or_is_refused(bwrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check()

    def says_instead(text: str, exit_code: int = 0) -> None:
        script = f"[ $1 = --version ] || echo '{text}' >&2\necho '{text}'\nexit {exit_code}"
        program(tmp_path / "bwrap", script, "sh")
        bubblewrap._require_version.cache_clear()
        bubblewrap._found.cache_clear()

    monkeypatch.setattr(bubblewrap, "PLACES", str(tmp_path))
    bubblewrap._found.cache_clear()
    with refuses(ConfigError, "sandbox.backend=bubblewrap", "bwrap", "apt-get", "bubblewrap"):
        check()
    monkeypatch.setattr(bubblewrap, "PLACES", f"{tmp_path}:/usr/bin")
    for version in ("bwrap 0.0.0", "bubblewrap 0.6.1", ""):  # PyPI's, and that of an older distribution
        says_instead(version)
        with refuses(ConfigError, "sandbox.backend=bubblewrap", f"{tmp_path}/bwrap", "0.8", "apt-get", "bubblewrap"):
            check()
    says_instead("bubblewrap 0.8.0", 1)  # and no namespaces
    with refuses(ConfigError, "sandbox.backend=bubblewrap", "kernel.unprivileged_userns_clone=1", "seccomp=unconfined"):
        check()
    monkeypatch.undo()
    bubblewrap._found.cache_clear()
    bubblewrap._require_version.cache_clear()


def test_where_there_are_no_user_namespaces_it_is_refused(bwrap: None) -> None:
    without = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", "--disable-userns"]
    code = "from grpo_dist.sandbox import check; check()"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*without, sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    says(done.stderr, "sandbox.backend=bubblewrap", "kernel.unprivileged_userns_clone=1", "systempaths=unconfined")


def test_a_sandbox_without_a_program_of_that_name_says_so(bwrap: None) -> None:
    with open_sandbox(SandboxSettings()) as sandbox:
        outcome = sandbox.exec(["no-such-program"])
    assert outcome.exit_code != 0
    assert b"no-such-program" in outcome.stderr
    with pytest.raises(SandboxError):
        sandbox.exec(["true"])
