"""The main job on Ray clusters of two and three machines, emulated: as on one machine, or refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_dist.assets import resolve_model_path
from tests.chaos import runs as chaos
from tests.chaos.runs import SUPERVISED, Outcome
from tests.cluster.machines import machines
from tests.cluster.ray_nodes import DASHBOARD_PORT, RAY, Cluster, classes, cluster, ended, metric
from tests.cluster.slow_switch import Link
from tests.messages import says

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.deep]
ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "n0tReallyAS3cret" * 2
STEPS = 2
# A run of so many steps, in which nothing is lost.
SETTINGS = [
    *chaos.SETTINGS,
    *(f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false"),
    *("trainer.worker_timeout_s=300", "trainer.max_worker_restarts=0", "trainer.max_actor_restarts=0"),
]
NOT_SAVED = ["trainer.save_freq=-1", "trainer.export_hf_model=false"]
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"


def assert_as_on_one_machine(run_dir: Path, main_run: Outcome) -> None:
    """Rewards and gradient norms are one machine's to the last bit: a sum of two has no order."""
    for name in ("critic/score/mean", "actor/grad_norm"):
        alone = [(step, value) for step, value in main_run.curve(name) if 0 < step <= STEPS]
        assert metric(run_dir, name) == alone, name
        assert len(alone) == STEPS


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """So many machines; where a link is given, with a dashboard."""
    with cluster(*request.param, dashboard=len(request.param) > 1) as made:
        yield made


TWO = pytest.mark.parametrize("emulated", [(2,)], indirect=True, ids=["two"], scope="module")
SLOW = (3, Link(delay_s=0.002, bits_per_s=1e9))
THREE = pytest.mark.parametrize("emulated", [SLOW], indirect=True, ids=["three"], scope="module")


@TWO
@pytest.mark.parametrize(
    ("command", "settings"), [("main", SETTINGS), pytest.param("sft", SUPERVISED, marks=pytest.mark.long)]
)
def test_a_run_directory_that_one_node_has_alone_is_refused(
    emulated: Cluster, command: str, settings: list[str]
) -> None:
    run_dir = emulated.there.private / command
    code, said = emulated.run(command, run_dir, *settings, nodes=2)
    assert code == 2, said
    says(said, f"trainer.default_local_dir={run_dir}", "node0", f"node1 ({emulated.there.addresses[1]})", "share")
    assert "Traceback" not in said
    left = {path.name for path in (emulated.there.own(0) / "private" / command).iterdir()}
    assert left == {"run.lock", "config.yaml"}, "nothing was trained, and the mark is gone"


@TWO
def test_two_nodes_train_as_one(emulated: Cluster, main_run: Outcome, tmp_path: Path) -> None:
    """The ranks of the actor are on both, and both write their part of the checkpoint."""
    before = [emulated.logs(number) for number in (0, 1)]
    # variables that a run on one machine leaves behind in its process, and a secret
    env = {"HF_TOKEN": TOKEN, "NCCL_SOCKET_IFNAME": "lo"}
    code, said = emulated.run(
        "main", tmp_path, *SETTINGS, f"trainer.save_freq={STEPS}", f"{BACKEND}=broadcast", nodes=2, **env
    )
    assert code == 0, said
    assert_as_on_one_machine(tmp_path, main_run)
    assert {"ActorWorker", "RolloutWorker"} <= classes(emulated.logs(0) - before[0])
    assert {"ActorWorker", "PolicyWorker"} <= classes(emulated.logs(1) - before[1])
    parts = {path.name for path in (tmp_path / f"global_step_{STEPS}" / "actor").glob("*.distcp")}
    assert parts == {"__0_0.distcp", "__1_0.distcp"}
    logs = (path for path in emulated.there.folder.rglob("logs/**/*") if path.is_file())
    assert [path for path in logs if TOKEN.encode() in path.read_bytes()] == []


# --- with a slow network between them ------------------------------
@THREE
@pytest.mark.long
@pytest.mark.parametrize(
    ("nodes", "backend", "homes"),
    [
        (2, "object_store", [{"ActorWorker", "RolloutWorker", "RewardWorker"}, {"ActorWorker", "PolicyWorker"}, set()]),
        (3, "broadcast", [{"ActorWorker", "PolicyWorker"}, {"ActorWorker", "RewardWorker"}, {"RolloutWorker"}]),
    ],
)
def test_nodes_train_as_one(
    emulated: Cluster, main_run: Outcome, tmp_path: Path, nodes: int, backend: str, homes: list[set[str]]
) -> None:
    before = [emulated.logs(number) for number in range(3)]
    code, said = emulated.run("main", tmp_path, *SETTINGS, *NOT_SAVED, f"{BACKEND}={backend}", nodes=nodes)
    assert code == 0, said
    assert_as_on_one_machine(tmp_path, main_run)
    found = [classes(emulated.logs(number) - before[number]) for number in range(3)]
    assert [{name for name in each if name.endswith("Worker")} for each in found] == homes


def submit(emulated: Cluster, env: dict[str, str], *overrides: str) -> tuple[int, str]:
    """`examples/ray_job_submit.sh` on the last machine, with the head's dashboard."""
    there = {
        "RAY_API_SERVER_ADDRESS": f"http://{emulated.there.addresses[0]}:{DASHBOARD_PORT}",
        "JOB_PYTHON": sys.executable,
        "PATH": f"{RAY.parent}:{os.environ['PATH']}",
    }
    script = str(ROOT / "examples/ray_job_submit.sh")
    return ended(emulated.there.start(2, "bash", script, *overrides, env=env | there))


@THREE
@pytest.mark.long
def test_a_job_that_another_node_submits(emulated: Cluster, main_run: Outcome, tmp_path: Path) -> None:
    """With the cluster's token, and not without. Its driver is on the head, and has the code that was sent along."""
    where = [f"trainer.default_local_dir={tmp_path}", f"ray_kwargs.ray_init.address={emulated.address}"]
    size = ["trainer.nnodes=3", "cluster.num_cpus_per_worker=1", f"{BACKEND}=object_store"]
    job = [*SETTINGS, *NOT_SAVED, *where, *size]
    stranger = emulated.env | {"RAY_AUTH_MODE": "disabled"}
    del stranger["RAY_AUTH_TOKEN"]
    code, said = submit(emulated, stranger, *job)
    assert code != 0
    assert "token" in said
    assert not any(tmp_path.iterdir())
    code, said = submit(emulated, emulated.env, *job)
    assert code == 0, said
    assert_as_on_one_machine(tmp_path, main_run)


@THREE
@pytest.mark.long
def test_a_model_that_one_node_has_alone_is_refused(emulated: Cluster, tmp_path: Path) -> None:
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), emulated.there.own(0) / "private" / "model")
    key, model = "actor_rollout_ref.model.path", emulated.there.private / "model"
    code, said = emulated.run("main", tmp_path, *SETTINGS, *NOT_SAVED, f"{key}={model}", nodes=3)
    assert code == 2, said
    says(said, f"{key}={model}", "share")
    assert f"node1 ({emulated.there.addresses[1]})" in said or f"node2 ({emulated.there.addresses[2]})" in said, said


BYTES, TRIPS = 2_000_000, 5
SERVE = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    for _ in range(TRIPS):
        peer.sendall(peer.recv(1))
    left = BYTES
    while left:
        left -= len(peer.recv(1 << 20))
    peer.sendall(b".")
"""
ASK = """
import json, socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as peer:
    trips = []
    for _ in range(TRIPS):
        started = time.monotonic()
        peer.sendall(b".")
        peer.recv(1)
        trips.append(time.monotonic() - started)
    started = time.monotonic()
    peer.sendall(b"." * BYTES)
    peer.recv(1)
    print(json.dumps([trips, time.monotonic() - started]))
"""


@pytest.mark.long
def test_the_network_is_as_slow_as_it_is_to_be_and_gone_at_the_end() -> None:
    """Round trips between the last machine and the first, and so many bytes in one direction."""
    link, sizes = Link(0.02, 80e6), f"TRIPS, BYTES = {TRIPS}, {BYTES}\n"
    with machines(3, link) as there:
        server = there.start(0, sys.executable, "-c", sizes + SERVE, env=os.environ)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n", server.communicate()
        asks = there.start(2, sys.executable, "-c", sizes + ASK, there.addresses[0], env=os.environ)
        out, err = asks.communicate(timeout=60)
        assert asks.returncode == 0, err
    trips, sending = json.loads(out)
    print(f"{link}: {1000 * min(trips):.2f} to {1000 * max(trips):.2f} ms, {8e-6 * BYTES / sending:.0f} Mbit/s")
    assert min(trips) >= 2 * link.delay_s
    assert sending >= 8 * BYTES / link.bits_per_s
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in listed for name in there.names)
