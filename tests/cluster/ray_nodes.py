"""A Ray cluster on emulated machines, as `ray start` makes it, and what a run on it leaves behind."""

import os
import secrets
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_dist.engines.rendezvous import INTERFACE_VARIABLES
from tests.cluster.machines import Machines, machines
from tests.cluster.slow_switch import Link
from tests.records import json_lines

RAY = Path(sys.executable).parent / "ray"
PORT, DASHBOARD_PORT = 6379, 8265
LIMIT_S = 900
# In the environment of a head: a lost node is known sooner. Ray's default is up to 65 s.
SOON = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


def environment() -> dict[str, str]:
    """Ours, without what closes Ray and process groups to other machines; with a token, as on a real cluster."""
    left_out = ("RAY_", *INTERFACE_VARIABLES)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return plain | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


def start_ray(
    there: Machines, env: dict[str, str], *, num_cpus: int = 3, head_cpus: int | None = None, dashboard: bool = False
) -> str:
    """A head on the first machine, and a node on each other one; returns the cluster's address."""
    for number in range(len(there.names)):
        cpus = head_cpus if number == 0 and head_cpus is not None else num_cpus
        start_node(there, env, number, num_cpus=cpus, dashboard=dashboard)
    return f"{there.addresses[0]}:{PORT}"


def start_node(
    there: Machines, env: dict[str, str], number: int, *, num_cpus: int = 3, dashboard: bool = False
) -> None:
    """Start Ray on one machine, the head on number 0, and wait for it."""
    if number == 0:
        how = ["--head", f"--port={PORT}", f"--temp-dir={there.private}"]
        how += ["--dashboard-host=0.0.0.0"] if dashboard else ["--include-dashboard=false"]
    else:
        how = [f"--address={there.addresses[0]}:{PORT}"]
    common = [f"--num-cpus={num_cpus}", "--object-store-memory=300000000", "--disable-usage-stats", "--block"]
    ip = f"--node-ip-address={there.addresses[number]}"
    process = there.start(number, str(RAY), "start", *how, ip, *common, env=env)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            return
    pytest.fail(f"ray start ended: {''.join(said)}")


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster on emulated machines: what joins it, and the address of its head."""

    there: Machines
    env: dict[str, str]
    address: str

    def run(self, command: str, run_dir: Path, *overrides: str, nodes: int, **env: str) -> tuple[int, str]:
        """Exit code and output of a command of the package on the head; with one process per logical CPU no node has
        room for all.
        """
        where = [f"trainer.default_local_dir={run_dir}", f"ray_kwargs.ray_init.address={self.address}"]
        size = [f"trainer.nnodes={nodes}", "trainer.n_gpus_per_node=0", "cluster.num_cpus_per_worker=1"]
        called = [sys.executable, "-m", "grpo_dist", "train" if command == "main" else command]
        return ended(self.there.start(0, *called, *overrides, *where, *size, env=self.env | env))

    def logs(self, number: int) -> set[Path]:
        """The log files that Ray's workers have on a machine."""
        return set((self.there.own(number) / "private").rglob("worker-*.out"))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """A process's exit code and what it wrote, once it has ended; after `LIMIT_S` it is killed."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return process.returncode, err + out


@contextmanager
def cluster(count: int, link: Link | None = None, *, dashboard: bool = False) -> Iterator[Cluster]:
    """A Ray cluster of so many machines, until the block ends; see `machines` and `start_ray`."""
    with machines(count, link) as there:
        env = environment()
        yield Cluster(there, env, start_ray(there, env, dashboard=dashboard))


def metric(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """A metric by training step."""
    rows = json_lines(run_dir / "metrics.jsonl")
    return [(row["step"], row[name]) for row in rows if row["step"] > 0]


def classes(logs: Collection[Path]) -> set[str]:
    """Classes of the workers that wrote these logs."""
    lines = (line for path in logs for line in path.read_text().splitlines())
    return {line.removeprefix(":actor_name:") for line in lines if line.startswith(":actor_name:")}
