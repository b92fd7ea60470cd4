"""`grpo-dist doctor`: what will not work on a machine is told with the fix, and ends with exit code 1."""

import importlib.metadata
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_dist.cli import doctor
from grpo_dist.cli.doctor import FAULT, NOTE, OK
from tests.cli.conftest import Call
from tests.messages import says
from tests.programs import program
from tests.workers.services import control_service


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in "HF_ENDPOINT RAY_ADDRESS RAY_AUTH_MODE RAY_AUTH_TOKEN http_proxy HTTP_PROXY all_proxy".split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", None)


def only(check: Callable, device: str = "cpu") -> str:
    """The grade of a check's only finding, and what it says."""
    (finding,) = check(device)
    return f"{finding.grade}: {finding.value} {finding.fix}"


def test_it_tells_of_everything_and_its_exit_code_of_faults(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    told = call("doctor", "--device", "gpu", code=1).out
    says(told, "processor", "memory", "python", "packages", "/dev/shm", "ports", "host name", "Ray", "hub")
    says(told, FAULT, f"torch {torch.__version__}", "make setup DEVICE=gpu", "vllm")
    seen: list[str] = []
    monkeypatch.setattr(doctor, "CHECKS", (lambda device: iter(seen.append(device) or ()),))
    call("doctor")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    call("doctor")
    assert seen == ["cpu", "gpu"], "what is installed"


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


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gpus(of_device: str, driver: str = "") -> str:
        script = str(program(tmp_path / "nvidia-smi", f"echo 'Some GPU, 81559 MiB, {driver}'")) if driver else None
        monkeypatch.setattr(doctor.shutil, "which", lambda name: script)
        return only(doctor.gpus, of_device)

    assert gpus("gpu").startswith(FAULT)
    assert list(doctor.gpus("cpu")) == []
    assert gpus("cpu", "535.1").startswith(NOTE)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    says(gpus("gpu", "535.1"), FAULT, "535.1", "CUDA 13.0", "580", "CUDA=12")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    says(gpus("gpu", "580.65"), "CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    says(gpus("gpu", "580.65"), OK, "Some GPU", "CUDA 13.0", "NCCL 2.27.3")


@pytest.mark.parametrize(("free", "grade", "fix"), [(0.06, FAULT, "--shm-size=4g"), (4, OK, "")])
def test_dockers_shared_memory_is_too_small(free: float, grade: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (8 << 30, 0, int(free * (1 << 30))))
    told = only(doctor.shared_memory)
    assert (told.startswith(grade), fix in told) == (True, True)


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
    assert only(doctor.ray_cluster).startswith(OK)
    with control_service() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert only(doctor.ray_cluster).startswith(OK)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        token = "RAY_AUTH_MODE=token", "ray get-auth-token", "~/.ray/auth_token"
        says(only(doctor.ray_cluster), FAULT, address, *token)
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text("secret")
        assert only(doctor.ray_cluster).startswith(OK)
    says(only(doctor.ray_cluster), FAULT, address, "RAY_ADDRESS")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", "/x" * 40)
    says(told := only(doctor.ray_cluster), FAULT, f"RAY_TMPDIR={'/x' * 40}", 107)
    assert "unset RAY_ADDRESS" not in told, "it is not at fault"


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    says(only(doctor.hub), OK, "HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with monkeypatch.context() as there:
        there.setattr(doctor.urllib.request, "urlopen", lambda request, timeout: SimpleNamespace(close=lambda: None))
        assert only(doctor.hub).startswith(OK)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    says(only(doctor.hub), NOTE, "http://127.0.0.1:9", "HF_HUB_OFFLINE=1")
