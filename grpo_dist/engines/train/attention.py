"""Which token sees which, for every attention kernel: segments on CPU, a block mask for FlexAttention, a dense mask for
SDPA.

A token sees the tokens before it that belong to its own segment, or to its prompt's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.compiled import compiled_whole
from grpo_dist.engines.train.own_attention import OWN, SINKS, keywords, why_own, windows_of
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
# FlexAttention works on blocks of so many tokens.
FLEX_BLOCK = 128
# Its gradients are compared on so many tokens with those of SDPA; the largest difference that rounding explains,
# relative to their norm.
CHECKED_TOKENS = 1024
GRADIENT_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # float32: TF32 where it is allowed


def why_padded(model: Any) -> str:
    """Why a model, perhaps without memory, only takes padded sequences; "" if nothing speaks against other layouts."""
    text, windows = model.config.get_text_config(), windows_of(model)
    kinds = set(getattr(text, "layer_types", None) or ())
    if others := kinds - {"full_attention", "sliding_attention" if windows else ""}:
        return f"the model has {', '.join(sorted(others))} layers"
    if model._is_stateful:
        return "the model has layers that go from token to token"
    if not windows and not kinds and (window := getattr(text, "sliding_window", None)):
        return f"the model has a sliding window of {window} tokens"
    return why_own(model)


def check_split(config: Any, settings: ModelSettings, padded: str = "") -> None:
    """Check that a model, by its config, can split its sequences over `settings.sequence_parallel_size` ranks.

    Args:
        config: the model's.
        settings: that it is loaded by.
        padded: of `why_padded`, where the model is built.

    Raises:
        ConfigError: its heads do not split, or it takes padded sequences only, which stay whole.
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
    if layout == "packed" and is_flash_attn_2_available() and not sinks:
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
        position_ids: (B, L), for a window.
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
    """Return the mask of `dense_mask` in the form of FlexAttention, within a window as `sees` has it."""
    _, batch, length = segments.shape
    return _kernel(create_block_mask, segments.device.type)(
        sees(segments, position_ids, window),
        batch,
        None,
        length,
        length,
        device=str(segments.device),
        BLOCK_SIZE=FLEX_BLOCK,
    )


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
        position_ids: (B, L).
        implementation: of `attention_implementation`.
        batched_tokens: segments on CPU up to this long are batched.
        windows: of `windows_of` the model.
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
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": longest,
        "max_length_k": longest,
    }


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

    Its kernels are compiled when they are first called, those of the backward pass apart from the forward pass.

    Args:
        config: the model's, for the heads.
        segments: (2, B, L) of a micro-batch, of which the beginning of the first row is tried.
        dtype: that the model computes in.
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


@cache
def _kernel(function: Callable[..., Any], device: str) -> Any:
    return compiled_whole(function) if device == "cuda" else function


def _register(name: str, forward: Callable[..., Any]) -> None:
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
