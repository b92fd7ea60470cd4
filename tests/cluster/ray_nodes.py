"""A Ray cluster on emulated machines, as `ray start` makes it, and what a run on it leaves behind."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

import pytest

from grpo_dist.engines.rendezvous import INTERFACE_VARIABLES
from tests.cluster.machines import Machines

RAY = Path(sys.executable).parent / "ray"
PORT = 6379


def environment() -> dict[str, str]:
    """Ours, without what closes Ray and process groups to other machines; with a token, as on a real cluster."""
    left_out = ("RAY_", *INTERFACE_VARIABLES)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return plain | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}


def start_ray(
    there: Machines, env: dict[str, str], *, num_cpus: int = 3, head_cpus: int | None = None, dashboard: bool = False
) -> str:
    """A head on the first machine, and a node on each of the others; returns the cluster's address.

    Args:
        there: the machines.
        env: from `environment`.
        num_cpus: logical CPUs of each node.
        head_cpus: those of the head; None: as many.
        dashboard: whether the head has one, at port 8265 of its address, which `ray job submit` needs.
    """
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


def metric(run_dir: Path, name: str) -> list[float]:
    """A metric of a run's training steps."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if row["step"] > 0]


def workers_on(there: Machines, number: int) -> set[str]:
    """Classes of the workers that ran on a machine, by Ray's logs."""
    logs = (there.own(number) / "private").rglob("worker-*.out")
    lines = (line for path in logs for line in path.read_text().splitlines())
    return {line.removeprefix(":actor_name:") for line in lines if line.startswith(":actor_name:")}
