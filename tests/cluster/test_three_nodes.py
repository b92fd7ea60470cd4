"""The main job on a Ray cluster of three machines, emulated, with a slow network between them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_dist.assets import resolve_model_path
from tests.cluster.conftest import SETTINGS
from tests.cluster.ray_nodes import DASHBOARD_PORT, RAY, Cluster, classes, cluster, ended
from tests.cluster.slow_switch import Link
from tests.messages import says

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
SLOW = Link(delay_s=0.002, bits_per_s=1e9)
NOT_SAVED = ["trainer.save_freq=-1", "trainer.export_hf_model=false"]
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with cluster(3, SLOW, dashboard=True) as there:
        yield there


@pytest.mark.parametrize(
    ("nodes", "backend", "homes"),
    [
        (2, "object_store", [{"ActorWorker", "RolloutWorker", "RewardWorker"}, {"ActorWorker", "PolicyWorker"}, set()]),
        (3, "broadcast", [{"ActorWorker", "PolicyWorker"}, {"ActorWorker", "RewardWorker"}, {"RolloutWorker"}]),
    ],
)
def test_nodes_train_as_one(
    three: Cluster,
    as_on_one_machine: Callable[[Path], None],
    tmp_path: Path,
    nodes: int,
    backend: str,
    homes: list[set[str]],
) -> None:
    before = [three.logs(number) for number in range(3)]
    code, said = three.run("main", tmp_path, *SETTINGS, *NOT_SAVED, f"{BACKEND}={backend}", nodes=nodes)
    assert code == 0, said
    as_on_one_machine(tmp_path)
    found = [classes(three.logs(number) - before[number]) for number in range(3)]
    assert [{name for name in each if name.endswith("Worker")} for each in found] == homes


def submit(three: Cluster, env: dict[str, str], *overrides: str) -> tuple[int, str]:
    """`examples/ray_job_submit.sh` on the last machine, with the head's dashboard."""
    there = {
        "RAY_API_SERVER_ADDRESS": f"http://{three.there.addresses[0]}:{DASHBOARD_PORT}",
        "JOB_PYTHON": sys.executable,
        "PATH": f"{RAY.parent}:{os.environ['PATH']}",
    }
    script = str(ROOT / "examples/ray_job_submit.sh")
    return ended(three.there.start(2, "bash", script, *overrides, env=env | there))


def test_a_job_that_another_node_submits(
    three: Cluster, as_on_one_machine: Callable[[Path], None], tmp_path: Path
) -> None:
    """With the cluster's token, and not without. Its driver is on the head, and has the code that was sent along."""
    where = [f"trainer.default_local_dir={tmp_path}", f"ray_kwargs.ray_init.address={three.address}"]
    size = ["trainer.nnodes=3", "cluster.num_cpus_per_worker=1", f"{BACKEND}=object_store"]
    job = [*SETTINGS, *NOT_SAVED, *where, *size]
    stranger = {name: value for name, value in three.env.items() if name != "RAY_AUTH_TOKEN"} | {
        "RAY_AUTH_MODE": "disabled"
    }
    code, said = submit(three, stranger, *job)
    assert code != 0
    assert "token" in said
    assert not any(tmp_path.iterdir())
    code, said = submit(three, three.env, *job)
    assert code == 0, said
    as_on_one_machine(tmp_path)


def test_a_model_that_one_node_has_alone_is_refused(three: Cluster, tmp_path: Path) -> None:
    shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), three.there.own(0) / "private" / "model")
    key, model = "actor_rollout_ref.model.path", three.there.private / "model"
    code, said = three.run("main", tmp_path, *SETTINGS, *NOT_SAVED, f"{key}={model}", nodes=3)
    assert code == 2, said
    says(said, f"{key}={model}", "share")
    assert f"node1 ({three.there.addresses[1]})" in said or f"node2 ({three.there.addresses[2]})" in said, said
