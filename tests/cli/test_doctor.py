"""`grpo-dist doctor`: what will not work on a machine is told with the fix, and ends with exit code 1."""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_dist.cli import doctor
from grpo_dist.cli.doctor import FAULT, NOTE, OK, Finding
from grpo_dist.cli.entry import main
from tests.messages import says
from tests.workers.services import control_service


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "HF_ENDPOINT",
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)


def only(check: Callable, device: str = "cpu") -> Finding:
    (finding,) = check(device)
    return finding


def test_it_tells_of_everything_and_the_exit_code_says_whether_there_are_faults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["doctor", "--device", "cpu"])
    told = capsys.readouterr().out
    says(told, "processor", "memory", "python", "packages", "/dev/shm", "ports", "host name", "Ray", "hub")
    assert code == int(FAULT in told)


def test_a_build_for_cpu_is_no_good_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "gpu"]) == 1
    says(capsys.readouterr().out, FAULT, f"torch {torch.__version__}", "make setup DEVICE=gpu", "vllm")


def test_the_device_is_what_is_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    monkeypatch.setattr(doctor, "CHECKS", (lambda device: iter(seen.append(device) or ()),))
    assert main(["doctor"]) == 0
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["doctor"]) == 0
    assert seen == ["cpu", "gpu"]


def test_a_processor_without_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset({"sse2"}))
    assert [finding.grade for finding in doctor.processor("cpu")] == [FAULT, OK]
    assert [finding.grade for finding in doctor.processor("gpu")] == [OK, OK]
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset({"avx2", "amx_bf16"}))
    first = next(doctor.processor("cpu"))
    says(first.value, "avx2 amx_bf16")
    assert "fp32" not in first.value


def test_packages_that_are_missing_or_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed = ["numpy<1", "no-such-package>=2", "pytest", 'absent; extra == "gpu"', "numpy<0; python_version < '3'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    first, second = doctor.wrong_versions("cpu")
    says(first, "numpy", importlib.metadata.version("numpy"), "<1")
    says(second, "no-such-package")
    assert len(doctor.wrong_versions("gpu")) == 3
    finding = list(doctor.build("cpu"))[1]
    assert finding.grade == FAULT
    says(finding.fix, "make setup DEVICE=cpu")
    pinned = tmp_path / "cpu.txt"
    pinned.write_text("# comment\nnumpy==0.1\nabsent==3\npytest==" + importlib.metadata.version("pytest"))
    (other,) = doctor.other_versions(pinned)
    says(other, "numpy", "0.1")
    assert list(doctor.other_versions(tmp_path / "none")) == []


def nvidia_smi(folder: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho '{line}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: str(script))


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert list(doctor.gpus("cpu")) == []
    assert only(doctor.gpus, "gpu").grade == FAULT
    nvidia_smi(tmp_path, "Some GPU, 81559 MiB, 535.1", monkeypatch)
    assert only(doctor.gpus, "cpu").grade == NOTE
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    old = only(doctor.gpus, "gpu")
    says(f"{old.grade} {old.value} {old.fix}", FAULT, "535.1", "CUDA 13.0", "580", "CUDA=12")
    nvidia_smi(tmp_path, "Some GPU, 81559 MiB, 580.65", monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    says(only(doctor.gpus, "gpu").fix, "CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    good = only(doctor.gpus, "gpu")
    assert good.grade == OK
    says(good.value, "Some GPU", "CUDA 13.0", "NCCL 2.27.3")


@pytest.mark.parametrize(("free", "grade", "fix"), [(0.06, FAULT, "--shm-size=4g"), (4, OK, "")])
def test_dockers_shared_memory_is_too_small(free: float, grade: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = (8 << 30, 0, int(free * (1 << 30)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    finding = only(doctor.shared_memory)
    assert (finding.grade, fix in finding.fix) == (grade, True)


def test_the_name_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")

    def unknown(name: str) -> str:
        raise socket.gaierror("not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    ports, name = doctor.network("cpu")
    assert (ports.grade, name.grade) == (OK, NOTE)
    says(name.fix, "127.0.1.1 no-such-host.invalid", "/etc/hosts")


def test_a_ray_cluster_and_its_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("grpo_dist.runtime.cluster.running_cluster", lambda: None)
    assert only(doctor.ray_cluster).grade == OK
    with control_service() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert only(doctor.ray_cluster).grade == OK
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        finding = only(doctor.ray_cluster)
        assert finding.grade == FAULT
        says(
            f"{finding.value} {finding.fix}", address, "RAY_AUTH_MODE=token", "ray get-auth-token", "~/.ray/auth_token"
        )
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text("secret")
        assert only(doctor.ray_cluster).grade == OK
    gone = only(doctor.ray_cluster)
    says(f"{gone.grade} {gone.value} {gone.fix}", FAULT, address, "RAY_ADDRESS")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", "/x" * 40)
    long = only(doctor.ray_cluster)
    says(f"{long.grade} {long.value} {long.fix}", FAULT, f"RAY_TMPDIR={'/x' * 40}", 107)
    assert long.fix == "", "RAY_ADDRESS is not at fault"


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    offline = only(doctor.hub)
    says(f"{offline.grade} {offline.value}", OK, "HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(doctor.urllib.request, "urlopen", lambda request, timeout: SimpleNamespace(close=lambda: None))
    assert only(doctor.hub).grade == OK
    monkeypatch.undo()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    away = only(doctor.hub)
    assert away.grade == NOTE
    says(f"{away.value} {away.fix}", "http://127.0.0.1:9", "HF_HUB_OFFLINE=1")
