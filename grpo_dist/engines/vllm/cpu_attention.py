"""What vLLM's attention on CPU cannot compute, told from a model's config.json before anything is started."""

from __future__ import annotations

import ast
from collections.abc import Mapping
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
        found = sorted({size for layer in layers for size in [_head_size(layer)] if size})
    except Exception:  # noqa: BLE001 - an architecture of its own, which vLLM judges
        return ""
    if getattr(text, "index_topk", None):
        return "sparse attention (index_topk of config.json), which vLLM computes on GPUs only"
    latent = getattr(text, "kv_lora_rank", None)
    if latent:  # the cache has the latent, or, where vLLM has no such form of the model, whole keys
        rope = getattr(text, "qk_rope_head_dim", 0)
        if latent + rope in head_sizes("mla/cpu_mla.py"):
            return ""
        found = [getattr(text, "qk_nope_head_dim", 0) + rope]
    wrong = [size for size in found if size not in known]
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
    spec = find_spec("vllm")
    path = Path(*(spec.submodule_search_locations or ()) if spec else ()) / _BACKENDS / file
    for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
        if isinstance(node, ast.FunctionDef) and node.name == _SIZES and isinstance(node.body[-1], ast.Return):
            value = node.body[-1].value
            return sorted(ast.literal_eval(value)) if isinstance(value, ast.List) else []
    return []


def _head_size(layer: Any) -> int:
    """The size of a layer's heads, as vLLM finds it; 0: the layer has none."""
    if size := getattr(layer, "head_dim", None):
        return int(size)
    heads = getattr(layer, "num_attention_heads", 0) or 0
    return layer.hidden_size // heads if heads else 0
