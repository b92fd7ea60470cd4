"""Which token sees which, for every attention kernel: segments on CPU, a block mask for FlexAttention, a dense mask for
SDPA.

A token sees the tokens before it that belong to its own segment, or to its prompt's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.compiled import compiled_whole
from grpo_dist.engines.train.segment_attention import BATCHED_TOKENS, plan_segments, segment_attention_forward
from grpo_dist.engines.train.ulysses import over_heads
from grpo_dist.errors import ConfigError, in_a_line
from grpo_dist.sizes import heads_split

FLEX = "grpo_dist_flex"
FLASH = "flash_attention_2"
SEGMENTS = "grpo_dist_segments"
# FlexAttention works on blocks of so many tokens.
FLEX_BLOCK = 128
# Its gradients are compared on so many tokens with those of SDPA; the largest difference that rounding explains,
# relative to their norm.
CHECKED_TOKENS = 1024
GRADIENT_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2}  # float32: TF32 where it is allowed


def why_padded(config: Any) -> str:
    """Why a model, by its config, only takes padded sequences; "" if nothing speaks against other layouts."""
    text = getattr(config, "text_config", config)
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        return f"the model has {', '.join(sorted(kinds - {'full_attention'}))} layers"
    if not kinds and getattr(text, "sliding_window", None):
        return f"the model has a sliding window of {text.sliding_window} tokens"
    if getattr(text, "attn_logit_softcapping", None):
        return "the model caps its attention logits"
    if getattr(text, "alibi", False):
        return "the model's positions are a bias of its attention (ALiBi)"
    return ""


def check_split(config: Any, settings: ModelSettings) -> None:
    """Check that a model, by its config, can split its sequences over `settings.sequence_parallel_size` ranks.

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
    if why := why_padded(config):
        raise ConfigError(f"{setting}: {why}, so its sequences cannot be split over ranks; set the size to 1")


def attention_implementation(config: Any, layout: str, device: str) -> str:
    """The `attn_implementation` that a model is loaded with.

    CPU: by segments. GPU: FlashAttention (varlen) for packed where it is installed,
    else FlexAttention; SDPA for padded.
    """
    if getattr(getattr(config, "text_config", config), "attn_logit_softcapping", None):
        return "eager"  # SDPA would leave the capping out
    if layout == "padded":
        return "sdpa"
    if device == "cpu":
        _register(SEGMENTS, over_heads(segment_attention_forward))
        return SEGMENTS
    if layout == "packed" and is_flash_attn_2_available():
        AttentionInterface.register(FLASH, over_heads(flash_attention_forward))  # its masks are transformers'
        return FLASH
    _register(FLEX, over_heads(flex_attention_forward))
    return FLEX


def sees(segments: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask_mod: (batch, head, query, key) indices -> whether the query sees the key.

    Args:
        segments: (2, B, L), see `MicroBatch`.
    """
    own, last = segments.unbind(0)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (own[b, k] <= own[b, q]) & (own[b, q] <= last[b, k])

    return mask_mod


def dense_mask(segments: Tensor) -> Tensor:
    """(B, 1, L, L) bool, True where the query (third axis) sees the key (fourth)."""
    _, batch, length = segments.shape
    b = torch.arange(batch, device=segments.device).view(-1, 1, 1)
    tokens = torch.arange(length, device=segments.device)
    return sees(segments)(b, b, tokens.view(1, -1, 1), tokens.view(1, 1, -1)).unsqueeze(1)


def block_mask(segments: Tensor) -> BlockMask:
    """Return the mask of `dense_mask` in the form of FlexAttention."""
    _, batch, length = segments.shape
    return _kernel(create_block_mask, segments.device.type)(
        sees(segments), batch, None, length, length, device=str(segments.device), BLOCK_SIZE=FLEX_BLOCK
    )


def attention_inputs(
    segments: Tensor | None, position_ids: Tensor, implementation: str, batched_tokens: int = BATCHED_TOKENS
) -> dict[str, Any]:
    """The model's keyword arguments that say who sees whom; none are needed for padded sequences.

    Args:
        segments: (2, B, L), see `MicroBatch`.
        position_ids: (B, L).
        implementation: of `attention_implementation`.
        batched_tokens: segments on CPU up to this long are batched.
    """
    if segments is None:
        return {}
    if implementation == FLASH:
        return varlen_inputs(position_ids)
    if implementation == SEGMENTS:
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # any mask of four axes keeps the model from making its own
        return {"attention_mask": unused, "segments": plan_segments(segments, batched_tokens)}
    mask = block_mask(segments) if implementation == FLEX else dense_mask(segments)
    return {"attention_mask": mask}


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """FlexAttention under a `BlockMask`, SDPA without one; in the form transformers calls: (B, heads, L, D) tensors.

    transformers' own flex attention compiles for fixed shapes; packed lengths change with every micro-batch.
    """
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # in a layer that is compiled as a whole it is a part of the graph
    attend = flex_attention if torch.compiler.is_compiling() else _kernel(flex_attention, query.device.type)
    grouped = query.shape[1] != key.shape[1]
    options: Any = {"block_mask": attention_mask, "scale": scaling, "enable_gqa": grouped}
    # the kernel is named, or rows of fewer than 128 tokens would get another one, which is for decoding
    out = attend(query, key, value, kernel_options={"BACKEND": "TRITON"}, **options)
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
