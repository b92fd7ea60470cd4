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


V2 = ["0::/system.slice/job_7/step_0"]
V1 = ["5:cpu,cpuacct:/slurm/job_7", "4:memory:/slurm/job_7", "1:name=systemd:/slurm"]
CPU_V1 = ("cpu/{}cpu.cfs_quota_us", "cpu/{}cpu.cfs_period_us")


@pytest.mark.parametrize(
    ("groups", "files", "cpus", "memory"),
    [
        (["0::/"], {"cpu.max": "150000 100000", "memory.max": "4096"}, 2, 4096),
        (["0::/"], {"cpu.max": "max 100000", "memory.max": "max"}, 64, None),
        (V2, {"system.slice/job_7/cpu.max": "400000 100000", "system.slice/memory.max": "8192"}, 4, 8192),
        (V2, {"system.slice/job_7/step_0/memory.max": "9000", "system.slice/memory.max": "8192"}, 64, 8192),
        (["0::/../other"], {"cpu.max": "50000 100000", "memory.max": "4096"}, 1, 4096),
        (V1, dict(zip((name.format("slurm/job_7/") for name in CPU_V1), ("300000", "100000"), strict=True)), 3, None),
        (V1, dict(zip((name.format("") for name in CPU_V1), ("-1", "100000"), strict=True)), 64, None),
        (V1, {"memory/slurm/job_7/memory.limit_in_bytes": "2048", "memory/memory.limit_in_bytes": str(1 << 63)}, 64, 2048),
        (["4:memory:/docker/0123"], {"memory/memory.limit_in_bytes": "2048"}, 64, 2048),
        (["4:pids:/", *V2], {"pids/memory.limit_in_bytes": "1", "memory.max": ""}, 64, None),
        ([], {"memory.max": "1"}, 64, None),
    ],
)  # fmt: skip
def test_what_control_groups_leave(groups, files, cpus, memory, tmp_path, monkeypatch):
    """Versions 1 and 2, at the top of a container and deeper, where the tightest of all groups above holds too."""
    (tmp_path / "self").write_text("".join(line + "\n" for line in groups))
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text + "\n")
    monkeypatch.setattr(processor, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(processor, "OWN_CGROUPS", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert processor.logical_cpus() == cpus
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert processor.memory_bytes() == (memory or whole)
    monkeypatch.setattr(processor, "OWN_CGROUPS", tmp_path / "none")
    assert (processor.logical_cpus(), processor.memory_bytes()) == (64, whole)
