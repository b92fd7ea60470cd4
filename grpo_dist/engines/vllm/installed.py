"""What the installed torch and vLLM can do, read without importing vLLM, which takes seconds."""

from __future__ import annotations

import ast
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_BACKENDS = "v1/attention/backends"
_SIZES = "get_supported_head_sizes"


def attention_problem(model_config: Mapping[str, Any]) -> str:
    """Say why the installed vLLM cannot compute a model's attention on CPU; "" if it can, or if that cannot be told.

    Args:
        model_config: the model's config.json, with the run's changes.
    """
    from transformers import AutoConfig

    known = head_sizes("cpu_attn.py")
    try:
        text: Any = AutoConfig.for_model(**model_config).get_text_config()
        layers = list(getattr(text, "per_layer_config", [])) or [text]
        sizes = sorted({size for layer in layers for size in [_head_size(layer)] if size})
    except Exception:  # noqa: BLE001 - an architecture of its own, which vLLM judges
        return ""
    if getattr(text, "index_topk", None):
        return "sparse attention (index_topk of config.json), which vLLM computes on GPUs only"
    latent = getattr(text, "kv_lora_rank", None)
    if latent:  # the cache has the latent, or, where vLLM has no such form of the model, whole keys
        rope = getattr(text, "qk_rope_head_dim", 0)
        if latent + rope in head_sizes("mla/cpu_mla.py"):
            return ""
        sizes = [getattr(text, "qk_nope_head_dim", 0) + rope]
    wrong = [size for size in sizes if size not in known]
    if not known or not wrong:
        return ""
    return (
        f"attention heads of {', '.join(map(str, wrong))} (head_dim of config.json, or hidden_size by "
        f"num_attention_heads); vLLM's attention on CPU computes heads of {', '.join(map(str, known))}"
    )


def head_sizes(file: str) -> list[int]:
    """Return the head sizes that one of vLLM's attention backends says it has; read without importing vLLM.

    Args:
        file: of the backend, below vLLM's folder of them. Where it cannot be read the list is empty.
    """
    for node in ast.walk(_source(f"{_BACKENDS}/{file}")):
        if isinstance(node, ast.FunctionDef) and node.name == _SIZES and isinstance(node.body[-1], ast.Return):
            value = node.body[-1].value
            return sorted(ast.literal_eval(value)) if isinstance(value, ast.List) else []
    return []


def _source(file: str) -> ast.Module:
    """Return the syntax tree of a file of vLLM's package; an empty one if there is no such file."""
    spec = find_spec("vllm")
    path = Path(*(spec.submodule_search_locations or ()) if spec else ()) / file
    return ast.parse(path.read_text() if path.is_file() else "")


def _head_size(layer: Any) -> int:
    """Return the size of a layer's heads, as vLLM finds it; 0: the layer has none."""
    if size := getattr(layer, "head_dim", None):
        return int(size)
    heads = getattr(layer, "num_attention_heads", 0) or 0
    return layer.hidden_size // heads if heads else 0


_TABLE = "_TOOL_PARSERS_TO_REGISTER"  # of vllm/tool_parsers/__init__.py


def parser_names() -> list[str]:
    """Return the names of vLLM's parsers of tool calls; empty where they cannot be read."""
    for node in _source("tool_parsers/__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLE:
            return sorted(ast.literal_eval(node.value))
    return []


def build_problem(device: str) -> str:
    """Say why the installed packages cannot run on `device` ("cpu" or "cuda"), and what to do; "" if they can."""
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
    return compiler_problem() if device == "cuda" else ""


def compiler_problem() -> str:
    """Say what Triton lacks on this machine to build its kernels, and what to do; "" if nothing is missing.

    It compiles the launcher of a kernel in C when that is first called.
    """
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("a C compiler (gcc or clang in PATH, or CC)")
    if not Path(headers := sysconfig.get_paths()["include"], "Python.h").is_file():
        missing.append(f"{headers}/Python.h")
    if not missing:
        return ""
    need = " and ".join(missing)
    return (
        f"Triton needs {need} to build kernels for GPUs; apt-get install gcc python3-dev, or what your system calls it"
    )


def _vllm_is_for_cpu() -> bool:
    """Tell if the version of vLLM says that it is for CPU; its package for CPU also has a name of its own."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True
