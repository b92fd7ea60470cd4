"""Whether the installed torch and vLLM were built for the run's device: one build has no GPUs, the other needs them."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import torch


def build_problem(device: str) -> str:
    """Why the packages of this environment cannot run on `device` ("cpu" or "cuda"), and what to do; "" if they can."""
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
    """Whether its version says so; vLLM's package for CPU also has a name of its own."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True
