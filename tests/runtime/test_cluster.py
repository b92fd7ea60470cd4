from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
from ray._common.utils import get_ray_address_file

from grpo_dist.errors import ConfigError
from grpo_dist.runtime import cluster
from grpo_dist.runtime.cluster import find_cluster, running_cluster
from tests.messages import refuses, says
from tests.workers.services import Service, control_service


def note(folder: Path, text: str) -> None:
    (folder / "ray" / "ray_current_cluster").write_text(text)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "", "nonsense", "127.0.0.1:port", "[::1]:1"])
def test_without_a_note_or_with_a_stale_one_there_is_no_cluster(ray_folder: Path, text: str) -> None:
    assert running_cluster() is None
    note(ray_folder, text)
    assert running_cluster() is None


@pytest.mark.parametrize("refusal", [None, grpc.StatusCode.UNAUTHENTICATED])
def test_a_note_of_a_control_service_that_answers_is_one(refusal: grpc.StatusCode | None, ray_folder: Path) -> None:
    """Also without the cluster's token, of which Ray itself says more."""
    with control_service(refusal=refusal) as address:
        note(ray_folder, address + "\n")
        assert (running_cluster(), find_cluster("auto"), find_cluster(None)) == (address, address, address)
    assert running_cluster() is None
    with refuses(ConfigError, f"ray_kwargs.ray_init.address={address}"):
        find_cluster("auto")


def test_the_note_is_where_ray_writes_it(ray_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    assert str(cluster.ray_folder(cluster.NOTE)) == get_ray_address_file(None) != "/elsewhere/ray/ray_current_cluster"
    monkeypatch.delenv("RAY_TMPDIR")
    assert str(cluster.ray_folder(cluster.NOTE)) == get_ray_address_file(None) == "/elsewhere/ray/ray_current_cluster"


def test_another_service_on_the_port_of_a_note_is_none(
    ray_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that speaks as Redis, on Ray's own port, or gRPC but not Ray's, or that hangs; it is told once each."""
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_S", 0.5)
    service = Service()
    with control_service("/etcdserverpb.KV/Range") as other:
        port = service.place[1]
        for address, hangs in ((f"127.0.0.1:{port}", False), (other, False), (f"localhost:{port}", True)):
            service.hangs = hangs
            note(ray_folder, address)
            caplog.clear()
            assert (running_cluster(), running_cluster()) == (None, None)
            with refuses(ConfigError, f"ray_kwargs.ray_init.address={address}"):
                find_cluster(address)
            (record,) = caplog.records
            says(record.getMessage(), ray_folder / "ray/ray_current_cluster", "remove")
    service.close()


def test_without_room_for_rays_sockets_a_local_cluster_is_refused(
    ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """107 bytes, of which `/ray-0/r/session_..._4194304/sockets/plasma_store` are 72 for root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * 34)
    assert find_cluster("local") == "local"
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.setenv(variable, long := "/" + "x" * 33 + "ü")
        with refuses(ConfigError, f"{variable}={long}", 108, 107, "RAY_TMPDIR"):
            find_cluster("local")
        monkeypatch.delenv(variable)
    assert find_cluster(None) == "local"
