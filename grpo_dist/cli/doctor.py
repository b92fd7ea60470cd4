"""`grpo-dist doctor`: what this machine has, what of it will not do for a run, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from grpo_dist.assets.model_folder import some
from grpo_dist.cli.arguments import command_parser
from grpo_dist.config.processor import BF16_FLAGS, cpu_flags, logical_cpus, memory_gib, physical_cores
from grpo_dist.engines.base import builtin_backends
from grpo_dist.errors import ConfigError
from grpo_dist.runtime.cluster import LOCAL, find_cluster
from grpo_dist.sizes import GIB
from grpo_dist.terminal import show

OK, NOTE, FAULT = "ok", "note", "FAULT"
LEAST_SHM_GIB = 1.0  # Docker gives 0.06; weights on their way and Ray's objects lie there
HUB_TIMEOUT_S = 3.0
PINNED = Path(__file__).parents[2] / "constraints"  # of a checkout
# Oldest NVIDIA driver for the CUDA that torch was built for, by its first number.
OLDEST_DRIVER = {"13": 580, "12": 525}


@dataclass(frozen=True)
class Finding:
    """A line of the report: how good it is, what it is about, what was found, and what to do."""

    grade: str
    what: str
    value: str
    fix: str = ""


def main(arguments: Sequence[str]) -> int:
    """Report on this machine; 1 if something will not work on the device, 0 else."""
    parser = command_parser(
        "doctor",
        "What this machine has for a run, and what will not work, with the fix. Exit code 1: something will not work "
        "on the device.",
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], help="default: what the installed torch was built for")
    device = parser.parse_args(arguments).device
    if device is None:
        import torch  # seconds, which --help does without

        device = "cpu" if torch.version.cuda is None else "gpu"
    show(f"this machine, for runs on {device}:\n")
    faults = 0
    for check in CHECKS:
        for finding in check(device):
            faults += finding.grade == FAULT
            fix = f"\n{'':<20} -> {finding.fix}" if finding.fix else ""
            show(f"  {finding.grade:<5} {finding.what:<12} {finding.value}{fix}\n")
    show(f"{faults} faults\n" if faults else "nothing stands in the way of a run\n")
    return 1 if faults else 0


def processor(device: str) -> Iterator[Finding]:
    """The CPU and the memory."""
    flags = cpu_flags()
    named = [name for name in ("avx2", "avx512f", *sorted(BF16_FLAGS)) if name in flags]
    cores = f"{physical_cores()} cores, {logical_cpus()} logical; {' '.join(named) or 'no vector instructions known'}"
    if device == "cpu" and platform.machine() == "x86_64" and "avx2" not in flags:
        yield Finding(FAULT, "processor", cores, "engines for CPU need AVX2: take another machine")
    else:
        speed = "" if BF16_FLAGS & flags or device == "gpu" else "; without bf16 instructions runs compute in fp32"
        yield Finding(OK, "processor", cores + speed)
    yield Finding(OK, "memory", f"{memory_gib():.1f} GiB")


def build(device: str) -> Iterator[Finding]:
    """Python and the packages: torch's build, and the versions that this package asks for."""
    needs = (engine.needs("cuda" if device == "gpu" else "cpu") for engine in builtin_backends())
    problem = next(filter(None, needs), "")
    why, _, fix = problem.partition(". ")
    yield Finding(FAULT if problem else OK, "python", why or f"{platform.python_version()} in {sys.prefix}", fix)
    wrong = wrong_versions(device)
    fix = f"make setup DEVICE={device}, or pip install -e '.[{device}]' -c constraints/{device}.txt"
    yield Finding(FAULT if wrong else OK, "packages", "; ".join(wrong) or "none is missing", fix if wrong else "")
    others = list(other_versions(PINNED / f"{device}.txt"))
    if others:
        yield Finding(NOTE, "packages", f"not those of constraints/: {some(others)}", fix)


def wrong_versions(device: str) -> list[str]:
    """The packages that a run on the device needs and that are missing, or of a version that is ruled out."""
    wrong = []
    for requirement in map(Requirement, importlib.metadata.requires("grpo_dist") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": device}):
            continue
        version = _version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} (needed: {requirement.specifier})")
    return wrong


def other_versions(pinned: Path) -> Iterator[str]:
    """Installed packages of another version than the one that was tested, by a file of constraints, if it is there."""
    for line in pinned.read_text().splitlines() if pinned.is_file() else ():
        name, pin, version = line.partition("==")
        installed = _version(name) if pin and name[:1].isalnum() else None
        if installed is not None and installed != version.split(" ")[0]:
            yield f"{name} {installed} (tested: {version})"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus(device: str) -> Iterator[Finding]:
    """GPUs, their driver, CUDA and NCCL; nothing of a machine without them, for runs on CPU."""
    smi = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = subprocess.run([smi, *query], capture_output=True, text=True, check=False) if smi else None
    lines = listed.stdout.strip().splitlines() if listed is not None and listed.returncode == 0 else []
    if device == "cpu":
        if lines:
            unused = f"{len(lines)} ({lines[0]}), not used on CPU"
            yield Finding(NOTE, "GPUs", unused, "make setup DEVICE=gpu uses them")
        return
    if not lines:
        fix = "install NVIDIA's driver; in a container start it with --gpus all; for runs on CPU: make setup DEVICE=cpu"
        yield Finding(FAULT, "GPUs", "nvidia-smi finds none", fix)
        return
    import torch

    driver, cuda = lines[0].rpartition(", ")[2], torch.version.cuda or "none"
    oldest = OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
    if not driver.partition(".")[0].isdigit() or int(driver.partition(".")[0]) < oldest:
        fix = f"install a driver of {oldest} or newer, or the build for older ones: make setup DEVICE=gpu CUDA=12"
        yield Finding(FAULT, "driver", f"{driver}, and torch was built for CUDA {cuda}", fix)
    elif not torch.cuda.is_available():
        fix = "see CUDA_VISIBLE_DEVICES, and whether another process holds the GPUs exclusively"
        yield Finding(FAULT, "GPUs", f"{len(lines)} by nvidia-smi, and torch can use none", fix)
    else:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        usable = f"{torch.cuda.device_count()} ({lines[0]}), CUDA {cuda}, NCCL {nccl}"
        yield Finding(OK, "GPUs", usable)


def shared_memory(device: str) -> Iterator[Finding]:
    """/dev/shm."""
    try:
        total, _, free = (size / GIB for size in shutil.disk_usage("/dev/shm"))
    except OSError:
        yield Finding(FAULT, "/dev/shm", "there is none", "mount a tmpfs there")
        return
    short = free < LEAST_SHM_GIB
    fix = "in a container: docker run --shm-size=4g, or --ipc=host; else remove what was left there" if short else ""
    yield Finding(FAULT if short else OK, "/dev/shm", f"{free:.1f} GiB free of {total:.1f}", fix)


def network(device: str) -> Iterator[Finding]:
    """Loopback, free ports and the name of the machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            port = server.getsockname()[1]
        yield Finding(OK, "ports", f"127.0.0.1 takes connections (tried {port})")
    except OSError as error:
        yield Finding(FAULT, "ports", f"127.0.0.1: {error}", "bring the interface lo up: ip link set lo up")
    name = socket.gethostname()
    try:
        yield Finding(OK, "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        fix = f"add a line `127.0.1.1 {name}` to /etc/hosts; it matters for runs on several machines"
        yield Finding(NOTE, "host name", f"{name}: {error}", fix)


def ray_cluster(device: str) -> Iterator[Finding]:
    """The Ray cluster that a run would join, and its token."""
    try:
        address = find_cluster(None)
    except ConfigError as error:
        unset = "unset RAY_ADDRESS, for a cluster of the run's own" if os.environ.get("RAY_ADDRESS") else ""
        yield Finding(FAULT, "Ray", str(error), unset)
        return
    if address == LOCAL:
        yield Finding(OK, "Ray", "no cluster is running: a run starts its own, with a token of its own")
        return
    needed = os.environ.get("RAY_AUTH_MODE") == "token"
    file = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    given = bool(os.environ.get("RAY_AUTH_TOKEN")) or Path(file).expanduser().is_file()
    joined = f"runs join the cluster at {address}, {'with' if given else 'without'} a token"
    fix = "ray get-auth-token --generate, and copy ~/.ray/auth_token to all nodes" if needed and not given else ""
    yield Finding(FAULT if fix else OK, "Ray", joined + (" (RAY_AUTH_MODE=token)" if needed else ""), fix)


def hub(device: str) -> Iterator[Finding]:
    """Tell if models can be downloaded."""
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    offline = [name for name in switches if os.environ.get(name, "0") not in ("", "0")]
    if offline:
        yield Finding(OK, "hub", f"not asked ({offline[0]} is set): models and data come from folders and the cache")
        return
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
        yield Finding(OK, "hub", f"{address} answers")
    except urllib.error.HTTPError as error:
        yield Finding(OK, "hub", f"{address} answers ({error.code})")
    except (OSError, ValueError) as error:
        fix = "name models and data by folders and set HF_HUB_OFFLINE=1; behind a proxy set HTTPS_PROXY"
        yield Finding(NOTE, "hub", f"{address} does not answer: {getattr(error, 'reason', error)}", fix)


CHECKS = (processor, build, gpus, shared_memory, network, ray_cluster, hub)
