"""The file of measured rates: whose it is, what is not taken from it; the rates of GPUs by name, and between sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_dist.config import step_rates
from grpo_dist.config.step_rates import (
    BANDWIDTH_SHARE,
    FLOPS_SHARE,
    DecodeRates,
    MachineRates,
    PassRates,
    Rates,
    gpu_name,
    machine_key,
    machine_rates,
    rates_file,
    store_rates,
)

PASSES = PassRates({64: 1e9, 1024: 1.6e10}, 2e9, 0.01, 0.001, 0.0001)
RATES = Rates(1e10, PASSES, PASSES, DecodeRates(0.002, 0.001, 1e-4, 1e-8, 1.5, 0.5), {"object_store": 1e9}, 0.04)
MACHINE = MachineRates("measured here", {"1 fp32": RATES}, "2026-01-01", 0.001)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_rates_lie_between_those_of_known_sizes() -> None:
    assert PASSES.rate(64) == PASSES.rate(8) == 1e9
    assert PASSES.rate(1024) == PASSES.rate(9000) == 1.6e10
    assert PASSES.rate(256) == pytest.approx(4e9), "half of the way, by logarithms"
    seconds = PASSES.seconds(1024, 4, passes=3, sequences=20, products=3.2e10, attention=1e9)
    assert seconds == pytest.approx(3 * (0.01 + 4 * 0.001) + 20 * 0.0001 + 2 + 0.5)


def test_the_nearest_number_of_threads_of_the_same_type() -> None:
    kinds = {"1 fp32": RATES, "8 fp32": Rates(2e10, PASSES, PASSES, RATES.decode, {}), "8 bf16": RATES}
    machine = MachineRates("", kinds)
    assert machine.of(1, "fp32") is kinds["1 fp32"]
    assert machine.of(16, "fp32") is kinds["8 fp32"]
    half = machine.of(4, "fp32")
    assert (half.bandwidth, half.update.rate(64), half.forward.attention) == (2e10, 0.5e9, 1e9), "of those with 8"
    assert machine.of(8, "bf16") is kinds["8 bf16"]
    assert machine.of(1, "bf16").forward.rate(1024) == 2e9, "of the same type, whatever the threads"
    assert MachineRates("", {"1 fp32": RATES}).of(16, "bf16") is RATES


def test_what_is_stored_is_read_and_stands_beside_other_machines(cache: Path) -> None:
    assert machine_rates("cpu") is None, "nothing is made up"
    file = store_rates("another machine", MachineRates("measured there", {"1 fp32": RATES}))
    assert file == cache / "grpo_dist/step_rates.json"
    assert machine_rates("cpu") is None
    store_rates(machine_key("cpu"), MACHINE)
    assert machine_rates("cpu") == MACHINE
    assert set(json.loads(file.read_text())["machines"]) == {"another machine", machine_key("cpu")}
    assert list(file.parent.iterdir()) == [file], "nothing half written is left"


def test_the_home_folder_without_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rates_file() == tmp_path / ".cache/grpo_dist/step_rates.json"


def test_other_versions_and_processors_are_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    store_rates(machine_key("cpu"), MACHINE)
    monkeypatch.setattr(step_rates, "version", lambda package: "0.1")
    assert machine_rates("cpu") is None
    monkeypatch.undo()
    monkeypatch.setattr(step_rates, "physical_cores", lambda: 77)
    assert machine_rates("cpu") is None


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"format": 0, "machines": {}}', '{"format": 1}', "no rates", "a rate of 0", "a text", "unknown"],
)
def test_a_damaged_file_is_as_none_and_is_replaced(damage: str) -> None:
    file = store_rates(machine_key("cpu"), MACHINE)
    found = json.loads(file.read_text())
    machine = found["machines"][machine_key("cpu")]
    if damage == "no rates":
        machine["kinds"] = {}
    elif damage == "unknown":
        machine["kinds"]["1 fp32"]["speed"] = 1.0
    elif damage in ("a rate of 0", "a text"):
        machine["kinds"]["1 fp32"]["forward"]["flops"]["64"] = 0.0 if damage == "a rate of 0" else "fast"
    else:
        found = None
    file.write_text(damage if found is None else json.dumps(found))
    assert machine_rates("cpu") is None
    store_rates(machine_key("cpu"), MACHINE)
    assert machine_rates("cpu") == MACHINE


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.04e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.56e12),
    ],
)
def test_published_rates_of_gpus(name: str, flops: float, bandwidth: float) -> None:
    found = machine_rates("cuda", name)
    assert found is not None
    rates = found.of(1, "bf16")
    assert rates.update.rate(4096) == FLOPS_SHARE * flops
    assert rates.bandwidth == BANDWIDTH_SHARE * bandwidth
    assert not found.measured


def test_an_unknown_gpu_is_named_and_a_measured_one_is_taken() -> None:
    unknown = machine_rates("cuda", "Some GPU")
    assert unknown is not None
    assert "Some GPU" in unknown.source
    store_rates(machine_key("cuda", "Some GPU"), MACHINE)
    assert machine_rates("cuda", "Some GPU") == MACHINE


def test_the_name_of_the_gpu_without_cuda(tmp_path: Path) -> None:
    assert gpu_name(str(tmp_path)) is None
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0/information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert gpu_name(str(tmp_path)) == "NVIDIA H100 80GB HBM3"
