"""examples/cluster/slurm.sh, with stand-ins for Slurm's commands, and for Python and Ray but in the last test."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.runs import SETTINGS, STEPS
from tests.messages import says
from tests.programs import program

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/cluster/slurm.sh"
SLURM = """
echo "$(basename "$0") $*" >> "$ASKED"
[[ $0 == */srun ]] || exit 0
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
# Notes what it is asked, plays Ray's head and nodes until it is ended, and a run by its environment.
PYTHON = f"""
echo "python $*" >> "$ASKED"
case "$*" in
  *"start --block --head"*)
    [[ ${{HEAD:-}} != broken ]] || exit 1
    [[ $RAY_AUTH_MODE == token && ${{#RAY_AUTH_TOKEN}} == 64 ]] || exit 1
    for option in "$@"; do [[ $option == --port=* ]] && port=${{option#*=}}; done
    exec {sys.executable} -c "import signal, socket; s = socket.create_server(('127.0.0.1', $port)); signal.pause()" ;;
  *"start --block --address="*) exec sleep 600 ;;
  *wait_for_nodes.py*)
    [[ ${{NODES:-}} != missing ]] || exec {sys.executable} -c "import signal; signal.setitimer(0, $4); signal.pause()"
    until [[ $SLURM_JOB_NUM_NODES == 1 ]] || grep -q -- --address= "$ASKED"; do sleep 0.02; done ;;
  *grpo_dist.main*)
    trap 'echo saved >> "$ASKED"' TERM
    echo runs >> "$ASKED"
    [[ -z ${{RUN_ENDS:-}} ]] || exit "$RUN_ENDS"
    until grep -q saved "$ASKED"; do sleep 0.02; done
    until [[ -e $ASKED.enough ]]; do sleep 0.02; done
    exit 143 ;;
esac
"""


class Job:
    def __init__(self, folder: Path, python: Path | str, *arguments: str, **env: str) -> None:
        (asked := folder / "asked").touch()
        self.asked_of, self.python = asked, python
        with socket.create_server(("127.0.0.1", 0)) as free:
            job = free.getsockname()[1] % 10000  # most likely free at 20000 + this, too
        self.id = str(job)
        slurm = {"SLURM_JOB_ID": self.id, "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(ROOT)}
        slurm |= {"HEAD_ADDRESS": "127.0.0.1", "ASKED": str(self.asked_of), "GRPO_DIST_PYTHON": str(python)}
        slurm |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RAY_"))}
        copy = shutil.copy(SCRIPT, folder / "spooled_by_slurm")
        self.process = subprocess.Popen(
            ["bash", str(copy), *arguments],
            cwd=folder,
            env=plain | slurm | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # neither of the group that pytest may be ended with, nor with SIGINT ignored as in a background job
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def asked(self) -> list[str]:
        return self.asked_of.read_text().splitlines()

    def wait_for(self, happened: Callable[[], object], within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while not happened():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, self.asked()
            time.sleep(0.02)

    def ends(self, within_s: float = 60) -> tuple[int, list[str], str]:
        """Exit code, what was asked of scontrol, and what was said; all processes of the job are gone."""
        said, _ = self.process.communicate(timeout=within_s)  # the pipe is closed when the last one is gone
        return self.process.returncode, [line for line in self.asked() if line.startswith("scontrol")], said


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(*arguments: str, python: Path | str = tmp_path / "python", **env: str) -> Job:
        jobs.append(Job(tmp_path, python, *arguments, **env))
        return jobs[-1]

    for name, text in {"bin/srun": SLURM, "bin/scontrol": SLURM, "python": PYTHON}.items():
        program(tmp_path / name, text)
    yield started
    for job in jobs:
        if job.process.poll() is None:
            for process in psutil.Process(job.process.pid).children(recursive=True):
                process.kill()
            job.process.kill()


def test_a_run_to_its_end(start: Callable[..., Job]) -> None:
    job = start("model=qwen3_8b", "trainer.seed=7", RUN_ENDS="0")
    assert job.ends()[:2] == (0, [])
    address = f"127.0.0.1:{20000 + int(job.id)}"
    ray = "-m ray.scripts.scripts start --block"
    asked = job.asked()
    # Ray runs beside the script, and is written down when it gets to it
    assert f"python {ray} --head --node-ip-address=127.0.0.1 --port={address[10:]} --include-dashboard=false" in asked
    others = f"{job.python} {ray} --address={address}"
    assert f"srun --relative=1 --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none {others}" in asked
    assert f"python {ray} --address={address}" in asked
    assert f"python examples/cluster/wait_for_nodes.py {address} 2 600" in asked
    run = f"python -m grpo_dist.main ray_kwargs.ray_init.address={address} cluster=multi_node trainer.nnodes=2"
    assert [line for line in asked if ray not in line][-2:] == [f"{run} model=qwen3_8b trainer.seed=7", "runs"]


def test_one_node_needs_no_srun_and_a_cluster_that_is_named_is_taken(start: Callable[..., Job]) -> None:
    job = start("cluster=node8", SLURM_JOB_NUM_NODES="1", RUN_ENDS="0")
    assert job.ends()[0] == 0
    assert [line for line in job.asked() if line.startswith("srun")] == []
    assert any(line.endswith(f":{20000 + int(job.id)} cluster=node8") for line in job.asked())


@pytest.mark.parametrize("code", [1, 143])
def test_a_run_that_fails_is_not_queued_again(start: Callable[..., Job], code: int) -> None:
    """Nor is one that got SIGTERM from somebody else than Slurm."""
    assert start(RUN_ENDS=str(code)).ends()[:2] == (code, [])


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_run_gets_one_signal_and_slurms_queues_the_job_again(start: Callable[..., Job], sent: int) -> None:
    """SIGINT saves, too, and ends the job for good."""
    job = start()
    job.wait_for(lambda: "runs" in job.asked())
    job.process.send_signal(sent)
    if sent == signal.SIGTERM:
        job.wait_for(lambda: "saved" in job.asked())
        job.process.send_signal(sent)
    job.asked_of.with_name("asked.enough").touch()
    requeued = [f"scontrol requeue {job.id}"] if sent == signal.SIGTERM else []
    assert (job.ends()[:2], job.asked().count("saved")) == ((143, requeued), 1)


def test_a_signal_before_the_run_has_started(start: Callable[..., Job]) -> None:
    job = start(NODES="missing")
    job.wait_for(lambda: any("wait_for_nodes" in line for line in job.asked()))
    job.process.terminate()
    assert job.ends()[:2] == (143, [f"scontrol requeue {job.id}"])
    assert "runs" not in job.asked()


def test_nodes_that_do_not_come_and_a_head_that_does_not_start(start: Callable[..., Job]) -> None:
    code, slurm, said = start(NODES="missing", NODES_WITHIN_S="0.1").ends()
    assert (code, slurm) == (1, [])
    says(said, "2 nodes", "0.1 s")
    job = start(HEAD="broken")
    code, slurm, said = job.ends()
    assert (code, slurm) == (1, [])
    says(said, f"127.0.0.1:{20000 + int(job.id)}")


def test_it_is_for_sbatch_and_waiting_for_nodes_has_an_end(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "SLURM_SUBMIT_DIR"}
    done = subprocess.run([str(SCRIPT)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    says(done.stderr, "SLURM_SUBMIT_DIR", "sbatch")
    options = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=B:TERM@600", "--ntasks-per-node=1"} <= set(options)
    waits = [sys.executable, "examples/cluster/wait_for_nodes.py", "127.0.0.1:1", "2", "0.2"]
    assert subprocess.run(waits, cwd=ROOT, timeout=60, check=False).returncode == -signal.SIGALRM


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_a_run_on_two_nodes_goes_on_when_slurm_starts_it_again(start: Callable[..., Job], tmp_path: Path) -> None:
    settings = [each for each in SETTINGS if not each.startswith("ray_kwargs")]
    arguments = [*settings, "cluster=cpu", f"trainer.default_local_dir={tmp_path}/run", "trainer.save_freq=100"]
    metrics = tmp_path / "run/metrics.jsonl"

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    job = start(*arguments, python=sys.executable)
    job.wait_for(lambda: 2 in steps(), within_s=240)
    job.process.terminate()
    code, slurm, said = job.ends(within_s=120)
    assert (code, slurm) == (143, [f"scontrol requeue {job.id}"]), said
    stopped_at = steps()[-1]
    assert (tmp_path / f"run/global_step_{stopped_at}").is_dir()
    assert stopped_at < STEPS
    code, _, said = start(*arguments, python=sys.executable).ends(within_s=240)
    assert code == 0, said
    says(said, f"resumed from {tmp_path}/run/global_step_{stopped_at}")
    assert [step for step in steps() if step] == list(range(1, STEPS + 1))
