"""What the processor has."""

import os

import pytest

from grpo_dist.config import processor
from grpo_dist.config.processor import cpu_flags, has_bf16, is_wsl, physical_cores


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 sse", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("model name\t: a bf16 machine", False),
    ],
)
def test_bf16_by_its_flag(line, expected, tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\n")
    assert has_bf16(str(file)) == expected


def test_elsewhere_than_on_linux_there_is_none(tmp_path):
    assert not has_bf16(str(tmp_path / "none"))
    assert cpu_flags(str(tmp_path / "none")) == frozenset()


def test_cores_of_this_machine():
    assert 1 <= physical_cores() <= os.cpu_count()


@pytest.mark.parametrize(
    ("version", "expected"), [("5.15.153.1-microsoft-standard-WSL2", True), ("6.8.0-generic", False)]
)
def test_linux_under_windows_by_its_kernel(version, expected, tmp_path):
    file = tmp_path / "version"
    file.write_text(f"Linux version {version} (gcc)\n")
    assert is_wsl(str(file)) == expected
    assert not is_wsl(str(tmp_path / "none"))


V2 = "0::/system.slice/job_7/step_0\n"
V1 = "5:cpu,cpuacct:/slurm/job_7\n4:memory:/slurm/job_7\n1:name=systemd:/slurm\n"


@pytest.mark.parametrize(
    ("groups", "files", "cpus", "memory"),
    [
        ("0::/", {"cpu.max": "150000 100000", "memory.max": "4096"}, 2, 4096),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, 64, None),
        (V2, {"system.slice/job_7/cpu.max": "400000 100000", "system.slice/memory.max": "8192"}, 4, 8192),
        (V2, {"system.slice/job_7/step_0/memory.max": "9000", "system.slice/memory.max": "8192"}, 64, 8192),
        ("0::/../other", {"cpu.max": "50000 100000", "memory.max": "4096"}, 1, 4096),
        (V1, {"cpu/slurm/cpu.cfs_quota_us": "300000", "cpu/slurm/cpu.cfs_period_us": "100000"}, 3, None),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64, None),
        (V1, {"memory/slurm/job_7/memory.limit_in_bytes": "2048", "memory/memory.limit_in_bytes": "4096"}, 64, 2048),
        ("4:memory:/docker/0123", {"memory/memory.limit_in_bytes": "2048"}, 64, 2048),
        ("4:pids:/", {"pids/memory.limit_in_bytes": "1", "memory.max": "1"}, 64, None),
    ],
)  # fmt: skip
def test_what_control_groups_leave(groups, files, cpus, memory, tmp_path, monkeypatch):
    """Versions 1 and 2, at the top of a container and deeper, where the tightest of all groups above holds too."""
    for name, text in {"own": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(processor, "CGROUPS", tmp_path)
    monkeypatch.setattr(processor, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (processor.logical_cpus(), processor.memory_gib()) == (cpus, (memory or whole) / 2**30)
