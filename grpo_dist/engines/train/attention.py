"""Which token sees which, for every attention kernel: segments on CPU, a block mask for FlexAttention, a dense mask for
SDPA.

A token sees the tokens before it that belong to its own segment, or to its prompt's.

transformers lets a model's attention be replaced by a function, and tells nobody what the function leaves out. So what
the model's own code asks of one is read from its source: without memory it cannot be tried. A model whose attention
takes more than the functions here do, or is not asked for through that interface, keeps its own.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.recurrence import LINEAR, computes_segments, has_linear_layers
from grpo_dist.engines.train.segment_attention import (
    BATCHED_TOKENS,
    padded_attention_forward,
    plan_segments,
    segment_attention_forward,
)
from grpo_dist.engines.train.ulysses import over_heads
from grpo_dist.errors import ConfigError, in_a_line
from grpo_dist.sizes import heads_split

FLEX = "grpo_dist_flex"
FLASH = "flash_attention_2"
PADDED = "grpo_dist_padded"
SEGMENTS = "grpo_dist_segments"
OWN = "eager"  # what transformers calls a model's own code
_INTERFACE, _WINDOW_MASK = "ALL_ATTENTION_FUNCTIONS", "create_sliding_window_causal_mask"
SINKS, WINDOW = "s_aux", "sliding_window"
# Keywords that our attention functions take, and those that say nothing here: of dropout, of kernels that are not used.
_TAKEN = {"scaling", SINKS, WINDOW}
_IDLE = {"attention_mask", "dropout", "is_causal", "output_attentions", "position_ids"}
_IDLE |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
# FlexAttention works on blocks of so many tokens.
FLEX_BLOCK = 128
# Its gradients are compared on so many tokens with those of SDPA; the largest difference that rounding explains,
# relative to their norm.
CHECKED_TOKENS = 1024
# float32: TF32 where it is allowed, which has float16's mantissa.
GRADIENT_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def why_padded(model: Any) -> str:
    """Why a model, perhaps without memory, only takes padded sequences; "" if nothing speaks against other layouts."""
    text, windows = model.config.get_text_config(), windows_of(model)
    kinds = set(getattr(text, "layer_types", None) or ())
    linear = LINEAR in kinds and computes_segments(model)
    if others := kinds - {"full_attention", "sliding_attention" if windows else "", LINEAR if linear else ""}:
        return f"the model has {', '.join(sorted(others))} layers"
    if model._is_stateful and not linear:
        return "the model has layers that go from token to token"
    if not windows and not kinds and (window := getattr(text, "sliding_window", None)):
        return f"the model has a sliding window of {window} tokens"
    return why_own(model)


def check_split(config: Any, settings: ModelSettings, padded: str = "") -> None:
    """Check that a model, by its config, can split its sequences over `settings.sequence_parallel_size` ranks.

    Raises:
        ConfigError: its heads do not split, or (`padded`, of `why_padded`) its sequences stay whole.
    """
    size, text = settings.sequence_parallel_size, getattr(config, "text_config", config)
    if size == 1:
        return
    heads: int = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    setting = f"{settings.sequence_parallel_key}={size}, {settings.setting}"
    if not heads_split(heads, kv_heads, size):
        fitting = [ranks for ranks in range(1, heads + 1) if heads_split(heads, kv_heads, ranks)]
        raise ConfigError(
            f"{setting}: the model has {heads} attention heads and {kv_heads} key-value heads, which do not split over "
            f"{size} ranks; set the size to {' or '.join(map(str, fitting))}"
        )
    if has_linear_layers(config):
        padded = f"the model has {LINEAR} layers, which go from token to token"
    if padded:
        raise ConfigError(f"{setting}: {padded}, so its sequences cannot be split over ranks; set the size to 1")


def attention_implementation(model: Any, layout: str, device: str) -> str:
    """The `attn_implementation` that a model, of which one without memory is here, is loaded with.

    CPU: by segments. GPU: FlashAttention (varlen) for packed where it is installed and the model has no sinks, else
    FlexAttention; SDPA for padded. The model's own where it takes more than these do.
    """
    sinks = SINKS in keywords(model)
    if why_own(model) or not (sinks or model._supports_sdpa):
        return OWN
    if layout == "padded":
        _register(PADDED, padded_attention_forward)
        return PADDED if sinks else "sdpa"
    if device == "cpu":
        _register(SEGMENTS, over_heads(segment_attention_forward))
        return SEGMENTS
    if layout == "packed" and is_flash_attn_2_available() and not sinks and not has_linear_layers(model.config):
        AttentionInterface.register(FLASH, over_heads(flash_attention_forward))  # its masks are transformers'
        return FLASH
    _register(FLEX, over_heads(flex_attention_forward))
    return FLEX


def sees(
    segments: Tensor, position_ids: Tensor | None = None, window: int = 0
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask_mod: (batch, head, query, key) indices -> whether the query sees the key.

    Args:
        segments: (2, B, L), see `MicroBatch`.
        window: of how many positions, its own the last, a token sees; 0: of all.
    """
    own, last = segments.unbind(0)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (q >= k) & (own[b, k] <= own[b, q]) & (own[b, q] <= last[b, k])
        return seen if position_ids is None else seen & (position_ids[b, q] - position_ids[b, k] < window)

    return mask_mod


def dense_mask(segments: Tensor) -> Tensor:
    """(B, 1, L, L) bool, True where the query (third axis) sees the key (fourth)."""
    _, batch, length = segments.shape
    b = torch.arange(batch, device=segments.device).view(-1, 1, 1)
    tokens = torch.arange(length, device=segments.device)
    return sees(segments)(b, b, tokens.view(1, -1, 1), tokens.view(1, 1, -1)).unsqueeze(1)


def block_mask(segments: Tensor, position_ids: Tensor | None = None, window: int = 0) -> BlockMask:
    """The mask of `dense_mask` in the form of FlexAttention, within a window as `sees` has it."""
    _, batch, length = segments.shape
    make, visible = _kernel(create_block_mask, segments.device.type), sees(segments, position_ids, window)
    return make(visible, batch, None, length, length, device=str(segments.device), BLOCK_SIZE=FLEX_BLOCK)


def attention_inputs(
    segments: Tensor | None,
    position_ids: Tensor,
    implementation: str,
    batched_tokens: int = BATCHED_TOKENS,
    windows: Collection[int] = (),
) -> dict[str, Any]:
    """The model's keyword arguments that say who sees whom; none are needed for padded sequences.

    Args:
        segments: (2, B, L), see `MicroBatch`.
    """
    if segments is None:
        return {}
    if implementation == FLASH:
        return varlen_inputs(position_ids)
    if implementation == SEGMENTS:
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # any mask of four axes keeps the model from making its own
        return {"attention_mask": unused, "segments": plan_segments(segments, batched_tokens, windows)}
    if implementation != FLEX:
        return {"attention_mask": dense_mask(segments)}
    within = {"windows": {size: block_mask(segments, position_ids, size) for size in windows}} if windows else {}
    return {"attention_mask": block_mask(segments), **within}


def varlen_inputs(position_ids: Tensor) -> dict[str, Any]:
    """FlashAttention's varlen arguments for one row (1, L) of sequences, each of which starts at position 0."""
    starts = torch.nonzero(position_ids[0] == 0).flatten().int()
    ends = torch.tensor([position_ids.shape[1]], dtype=torch.int32, device=position_ids.device)
    cumulative = torch.cat([starts, ends])
    longest = int(cumulative.diff().max())
    lengths = {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative}
    return lengths | {"max_length_q": longest, "max_length_k": longest}


def flex_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    windows: dict[int, BlockMask] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """FlexAttention under a `BlockMask`, SDPA without one; in the form transformers calls: (B, heads, L, D) tensors.

    transformers' own flex attention compiles for fixed shapes; packed lengths change with every micro-batch.

    Args:
        s_aux: (heads,) attention sinks; see `padded_attention_forward`.
        windows: masks for layers with a `sliding_window` of so many tokens.
    """
    if not isinstance(attention_mask, BlockMask):
        return padded_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, s_aux=s_aux, **kwargs
        )
    if sliding_window and windows:
        attention_mask = windows[sliding_window]
    # in a layer that is compiled as a whole it is a part of the graph
    attend = flex_attention if torch.compiler.is_compiling() else _kernel(flex_attention, query.device.type)
    grouped = query.shape[1] != key.shape[1]
    options: Any = {"block_mask": attention_mask, "scale": scaling, "enable_gqa": grouped}
    # the kernel is named, or rows of fewer than 128 tokens would get another one, which is for decoding
    options["kernel_options"] = {"BACKEND": "TRITON"}
    if s_aux is None:
        out = attend(query, key, value, **options)
    else:
        out, aux = attend(query, key, value, return_aux=AuxRequest(lse=True), **options)
        out = out * torch.sigmoid(aux.lse - s_aux.view(-1, 1)).unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def flex_backward_fault(config: Any, segments: Tensor, dtype: torch.dtype) -> str:
    """Why FlexAttention does not train a model on this device; "" if its gradients are those of SDPA.

    Its kernels are compiled when they are first called, those of the backward pass apart from the forward pass. The
    beginning of the first row of `segments`, (2, B, L), is tried.
    """
    text = getattr(config, "text_config", config)
    heads: int = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    few = segments[:, :1, :CHECKED_TOKENS]
    counts = (heads, *[getattr(text, "num_key_value_heads", None) or heads] * 2)
    generator = torch.Generator().manual_seed(0)
    # heads behind tokens in memory, as projections leave them
    inputs = [torch.randn(1, few.shape[2], count, size, generator=generator) for count in counts]

    def gradients(attend: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [tensor.to(few.device, dtype).transpose(1, 2).detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():  # the check of layouts runs without gradients
            loss = attend(*leaves).float().square().sum()
        return list(torch.autograd.grad(loss, leaves))

    try:
        mask = block_mask(few)
        computed = gradients(lambda q, k, v: flex_attention_forward(nn.Module(), q, k, v, mask)[0])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise errors of many kinds
        return f"the backward pass of its attention fails: {in_a_line(error)}"
    sdpa, seen, grouped = nn.functional.scaled_dot_product_attention, dense_mask(few), heads != counts[1]
    dense = gradients(lambda q, k, v: sdpa(q, k, v, attn_mask=seen, enable_gqa=grouped))
    off = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(computed, dense, strict=True))
    return "" if off <= GRADIENT_TOLERANCE[dtype] else f"gradients of its attention are off by {off:.2g} of their size"


def compiled_whole(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function as a whole: it stops where it would go on uncompiled, and FlexAttention compute all pairs of
    tokens, masked or not: time and memory would explode unseen.
    """
    compiled = torch.compile(function, dynamic=True, fullgraph=True, **options)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            raise ConfigError(
                f"actor_rollout_ref.model.use_remove_padding=true: {function.__name__} was compiled "
                f"{torch._dynamo.config.recompile_limit} times for ever new shapes, and would be slow from now on; set "
                "it to false (padded sequences under SDPA), or install flash-attn and set "
                "actor_rollout_ref.actor.use_prefix_grouper=false. TORCH_LOGS=recompiles shows what changed"
            ) from error

    return run


@cache
def _kernel(function: Callable[..., Any], device: str) -> Any:
    return compiled_whole(function) if device == "cuda" else function


def _register(name: str, forward: Callable[..., Any]) -> None:
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)


# --- a model's own attention ----------------------------------------------------------------------------------------
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
