"""What the processor has."""

import os

import pytest

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
