from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.runtime import cluster
from grpo_dist.runtime.cluster import find_cluster, running_cluster
from tests.messages import refuses
from tests.roles.services import Service


def note(folder: Path, text: str) -> None:
    (folder / "ray" / "ray_current_cluster").write_text(text)


def test_without_a_note_there_is_no_cluster(ray_folder: Path) -> None:
    assert running_cluster() is None


@pytest.mark.parametrize("text", ["127.0.0.1:1", "", "nonsense", "127.0.0.1:port", "[::1]:1"])
def test_a_stale_note_is_no_cluster(ray_folder: Path, text: str) -> None:
    note(ray_folder, text)
    assert running_cluster() is None


def test_a_note_whose_port_answers_is_one(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_S", 0.1)
    service = Service()
    address = f"127.0.0.1:{service.place[1]}"
    note(ray_folder, address + "\n")
    assert running_cluster() == address
    service.hangs = True
    assert running_cluster() is None, "the kernel alone takes connections"
    with refuses(ConfigError, f"ray_kwargs.ray_init.address={address}"):
        find_cluster(address)
    service.close()
    assert running_cluster() is None
