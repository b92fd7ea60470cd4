import pytest
from ray.util.placement_group import placement_group_table, remove_placement_group

from grpo_dist.errors import ConfigError
from grpo_dist.workers import resources
from grpo_dist.workers.resources import reserve

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def release(group: object) -> None:
    remove_placement_group(group)


def test_every_process_has_its_bundle_in_rank_order() -> None:
    group, bundles = reserve({"actor": (2, 0.05, 0.0), "ref": (1, 0.1, 0.0)})
    assert [(b.num_cpus, b.num_gpus, b.index) for b in bundles["actor"]] == [(0.05, 0, 0), (0.05, 0, 1)]
    assert [(b.num_cpus, b.index) for b in bundles["ref"]] == [(0.1, 2)]
    assert {b.group for part in bundles.values() for b in part} == {group}
    assert group.bundle_specs == [{"CPU": 0.05}, {"CPU": 0.05}, {"CPU": 0.1}]
    release(group)


@pytest.mark.parametrize("needs", [(1, 0.1, 1.0), (3, 100.0, 0.0)], ids=["gpu", "cpu"])
def test_what_the_cluster_has_not_is_refused(monkeypatch: pytest.MonkeyPatch, needs: tuple) -> None:
    monkeypatch.setattr(resources, "PLACEMENT_TIMEOUT_S", 0.5)
    count, cpus, gpus = needs
    with pytest.raises(ConfigError) as caught:
        reserve({"actor": (1, 0.1, 0.0), "rollout": needs})
    message = str(caught.value)
    assert f"actor 1 x (0.1 CPU, 0 GPU), rollout {count} x ({cpus:g} CPU, {gpus:g} GPU); it has 2 CPU" in message
    assert "0 GPU. Set trainer.n_gpus_per_node" in message


def test_a_refused_request_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(resources, "PLACEMENT_TIMEOUT_S", 0.5)
        with pytest.raises(ConfigError):
            reserve({"actor": (1, 0.2, 0.0), "rollout": (1, 50.0, 0.0)})
    states = {
        entry["state"] for entry in placement_group_table().values() if {"CPU": 50.0} in entry["bundles"].values()
    }
    assert states == {"REMOVED"}
    group, bundles = reserve({"actor": (1, 0.2, 0.0)})
    assert len(bundles["actor"]) == 1
    release(group)
