"""tests/golden/vllm_on_gpus.json: what vLLM's build for GPUs makes of the runs of tests/engines/vllm/faked_gpu.py.

python -m scripts.cuda_engine_config > tests/golden/vllm_on_gpus.json

No GPU is needed, and nothing runs on one: the wheel's CUDA libraries load with a stand-in for NVIDIA's driver
(no_cuda_driver.c), and vLLM is told that there are H100s. The tests compare what they make of vLLM's build for CPU with
the file. It is made anew for each version of vLLM, in an environment of its own of about 10 GB, with a C compiler:

UV=uv VIRTUAL_ENV=FOLDER scripts/packages.sh gpu lora
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

DRIVER = Path(__file__).with_name("no_cuda_driver.c")


def without_driver(folder: Path) -> None:
    """Let CUDA's libraries load in this process and its children, and Triton take NVIDIA's driver for an active one."""
    library = folder / "libcuda.so.1"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, DRIVER]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    os.environ["VLLM_CACHE_ROOT"] = str(folder)  # what another build saw of a model's class is not taken
    from triton.backends import backends

    for name, backend in backends.items():
        backend.driver.is_active = staticmethod(lambda active=name == "nvidia": active)


def main() -> None:
    """Write the file to standard output: one run in full, and of the others what differs from it."""
    from tests.engines.vllm import faked_gpu

    rows = faked_gpu.every_row()
    with tempfile.TemporaryDirectory() as folder:
        without_driver(Path(folder))
        found = faked_gpu.answers(rows)
    if wrong := {name: row for name, row in found.items() if isinstance(row, str) != (name in faked_gpu.REFUSED)}:
        raise SystemExit(f"vLLM refuses a run, or takes what it should refuse: {wrong}")
    full = found["eight"]
    rest = {
        name: {k: v for k, v in row.items() if v != full[k]} for name, row in found.items() if isinstance(row, dict)
    }
    made = {name: version(name) for name in ("vllm", "torch", "triton", "flashinfer-python", "cuda-python")}
    refused = {name: row for name, row in found.items() if isinstance(row, str)}
    json.dump({"versions": made, "runs": rest | {"eight": full}, "refused": refused}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
