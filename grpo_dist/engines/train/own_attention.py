"""What a model's own attention asks of an attention function, read from its source: without memory it cannot be tried.

transformers lets a model's attention be replaced by a function, and tells nobody what the function leaves out. A model
whose attention takes more than ours do, or is not asked for through that interface, keeps its own.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

_INTERFACE, _WINDOW_MASK = "ALL_ATTENTION_FUNCTIONS", "create_sliding_window_causal_mask"
SINKS, WINDOW = "s_aux", "sliding_window"
OWN = "eager"  # what transformers calls a model's own code
# Keywords that our attention functions take, and those that say nothing here: of dropout, of kernels that are not used.
_TAKEN = {"scaling", SINKS, WINDOW}
_IDLE = {"attention_mask", "dropout", "is_causal", "output_attentions", "position_ids"}
_IDLE |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def why_own(model: Any) -> str:
    """Why a model, perhaps without memory, keeps its own attention; "" if ours take all that it passes."""
    replaced, own = [], {}
    kinds: dict[str, Any] = {f"{name}.": type(module) for name, module in model.named_modules()}
    for name, kind in kinds.items():
        if keywords_of(kind) is not None:
            replaced.append(name)
        elif kind.__name__.endswith("Attention"):
            own[name] = kind.__name__
    outside = sorted({own[name] for name in own if not any(n.startswith(name) or name.startswith(n) for n in replaced)})
    if outside or not replaced:
        return f"its attention{f' ({names})' if (names := ', '.join(outside)) else ''} is all its own code"
    more = sorted(keywords(model) - _TAKEN - _IDLE)
    return f"its attention takes {', '.join(more)}" if more else ""


def keywords(model: Any) -> frozenset[str]:
    """The keywords that a model's layers pass to attention functions."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    return frozenset().union(*(keywords_of(kind) or () for kind in kinds))


def windows_of(model: Any) -> frozenset[int]:
    """The sliding windows, in tokens, that a model passes to attention functions and that its own masks keep."""
    modules = {kind.__module__ for kind in type(model).__mro__ if _written_as(kind)}
    if WINDOW not in keywords(model) or not any(_WINDOW_MASK in vars(sys.modules[module]) for module in modules):
        return frozenset()
    holders = (model.config.get_text_config(), *model.modules())
    sizes = {getattr(holder, WINDOW, None) for holder in holders}
    return frozenset(size for size in sizes if type(size) is int and size > 0)


@cache
def keywords_of(kind: type[Any]) -> frozenset[str] | None:
    """The keywords that a module of this class passes to attention functions; None: it calls none."""
    found: set[str] = set()
    calls = False
    for node in (node for part in kind.__mro__ if (written := _written_as(part)) for node in ast.walk(written)):
        calls = calls or (isinstance(node, ast.Name) and node.id == _INTERFACE)
        if isinstance(node, ast.Call) and "interface" in ast.unparse(node.func).rpartition(".")[2]:
            found.update(keyword.arg for keyword in node.keywords if keyword.arg)
    return frozenset(found) if calls else None


def _written_as(kind: type[Any]) -> ast.ClassDef | None:
    """The source of a class of a model's code; None where there is none, or it is a library's."""
    of_library = kind.__module__.startswith(
        ("torch.", "builtins", "transformers.modeling", "transformers.integrations")
    )
    return None if of_library else _classes(kind.__module__).get(kind.__name__)


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


@contextlib.contextmanager
def own_code(model: Any) -> Iterator[None]:
    """Within the block a model's attention and experts are computed by its own code."""
    kept = take_own_code(model)
    try:
        yield
    finally:
        for config, attention, experts in kept:
            config._attn_implementation, config._experts_implementation = attention, experts


def take_own_code(model: Any) -> list[tuple[Any, str, str]]:
    """Have a model's attention and experts computed by its own code; returns each config with what it had."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    kept = [(each, each._attn_implementation, each._experts_implementation) for each in configs.values()]
    for config, _, _ in kept:
        config._attn_implementation = config._experts_implementation = OWN
    return kept
