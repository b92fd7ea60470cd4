"""The main job on a Ray cluster of two machines, emulated: as on one machine, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.runs import SUPERVISED
from tests.cluster.conftest import SETTINGS, STEPS
from tests.cluster.ray_nodes import Cluster, classes, cluster
from tests.messages import says

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.deep]
TOKEN = "hf_" + "n0tReallyAS3cret" * 2


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with cluster(2) as there:
        yield there


@pytest.mark.parametrize(
    ("command", "settings"), [("main", SETTINGS), pytest.param("sft", SUPERVISED, marks=pytest.mark.long)]
)
def test_a_run_directory_that_one_node_has_alone_is_refused(two: Cluster, command: str, settings: list[str]) -> None:
    run_dir = two.there.private / command
    code, said = two.run(command, run_dir, *settings, nodes=2)
    assert code == 2, said
    says(said, f"trainer.default_local_dir={run_dir}", "node0", f"node1 ({two.there.addresses[1]})", "share")
    assert "Traceback" not in said
    left = {path.name for path in (two.there.own(0) / "private" / command).iterdir()}
    assert left == {"run.lock", "config.yaml"}, "nothing was trained, and the mark is gone"


def test_two_nodes_train_as_one(two: Cluster, as_on_one_machine: Callable[[Path], None], tmp_path: Path) -> None:
    """The ranks of the actor are on both, and both write their part of the checkpoint."""
    before = [two.logs(number) for number in (0, 1)]
    saving = f"trainer.save_freq={STEPS}"
    transport = "actor_rollout_ref.rollout.checkpoint_engine.backend=broadcast"
    # variables that a run on one machine leaves behind in its process, and a secret
    env = {"HF_TOKEN": TOKEN, "NCCL_SOCKET_IFNAME": "lo"}
    code, said = two.run("main", tmp_path, *SETTINGS, saving, transport, nodes=2, **env)
    assert code == 0, said
    as_on_one_machine(tmp_path)
    assert {"ActorWorker", "RolloutWorker"} <= classes(two.logs(0) - before[0])
    assert {"ActorWorker", "PolicyWorker"} <= classes(two.logs(1) - before[1])
    parts = {path.name for path in (tmp_path / f"global_step_{STEPS}" / "actor").glob("*.distcp")}
    assert parts == {"__0_0.distcp", "__1_0.distcp"}
    logs = (path for path in two.there.folder.rglob("logs/**/*") if path.is_file())
    assert [path for path in logs if TOKEN.encode() in path.read_bytes()] == []
