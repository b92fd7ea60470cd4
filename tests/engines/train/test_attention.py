from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import BlockMask

from grpo_dist.engines.settings import choose_layout
from grpo_dist.engines.train import attention
from grpo_dist.engines.train.attention import (
    FLASH,
    FLEX,
    PADDED,
    SEGMENTS,
    attention_implementation,
    attention_inputs,
    dense_mask,
    sees,
    varlen_inputs,
    why_padded,
    windows_of,
)
from tests.messages import says
from tests.models import without_memory

# [prompt | r1 | r2] of one group, a second group, two tokens of padding; and a row of padding but for one token.
OWN = [[0, 0, 0, 1, 1, 2, 3, 3, 4, -1, -1], [5] + [-1] * 10]
PARENT = [[0, 0, 0, 0, 0, 0, 3, 3, 3, -1, -1], [5] + [-1] * 10]
LAST = [[2, 2, 2, 1, 1, 2, 4, 4, 4, -1, -1], [5] + [-1] * 10]
ROWS = torch.tensor([OWN, LAST], dtype=torch.int32)


def by_hand(row: int, q: int, k: int) -> bool:
    return q >= k and (OWN[row][q] == OWN[row][k] or PARENT[row][q] == OWN[row][k])


def test_both_masks_are_the_rule() -> None:
    dense = dense_mask(ROWS)
    mask_mod = sees(ROWS)
    assert dense.shape == (2, 1, 11, 11)
    for row in range(2):
        for q in range(11):
            for k in range(11):
                expected = by_hand(row, q, k)
                assert dense[row, 0, q, k].item() == expected
                index = [torch.tensor(i) for i in (row, 0, q, k)]
                assert mask_mod(*index).item() == expected


def sdpa_in_its_place(factor: float) -> Callable[..., tuple[torch.Tensor, None]]:
    """A kernel that goes backward on CPU; the gradient of its values is `factor` of what it should be."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask
    ) -> tuple[torch.Tensor, None]:
        value = factor * value + (1 - factor) * value.detach()
        dense = dense_mask(ROWS[:, :1])
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense, enable_gqa=True)
        return out.transpose(1, 2), None

    return attend


@pytest.mark.parametrize(
    ("factor", "fault"), [(1.0, ""), (0.9, "gradients of its attention are off by 0.1 of their size")]
)
def test_gradients_of_flex_attention_are_compared(factor: float, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    monkeypatch.setattr(attention, "flex_attention_forward", sdpa_in_its_place(factor))
    monkeypatch.setattr(attention, "CHECKED_TOKENS", 11)
    with torch.no_grad():  # as the check of layouts calls it
        found = attention.flex_backward_fault(config, ROWS, torch.float32)
    assert re.fullmatch(fault, found)


def test_inputs_of_each_kernel() -> None:
    lengths = varlen_inputs(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert (lengths["cu_seq_lens_q"].tolist(), lengths["max_length_q"]) == ([0, 3, 4, 6], 3)
    positions = torch.arange(11).repeat(2, 1)
    assert attention_inputs(None, positions, "sdpa") == {}
    mask = attention_inputs(ROWS, positions, "sdpa")["attention_mask"]
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 11, 11))
    assert isinstance(attention_inputs(ROWS, positions, FLEX)["attention_mask"], BlockMask)
    alone = [attention_inputs(ROWS, positions, SEGMENTS, limit)["segments"].alone for limit in (3, 2, 0)]
    assert [len(each) for each in alone] == [0, 1, 6]
    assert "cu_seq_lens_k" in attention_inputs(ROWS, positions[:1], FLASH)


TWO = {"num_hidden_layers": 2}
QWEN3, GEMMA2 = transformers.Qwen3Config(**TWO), transformers.Gemma2Config(**TWO)
GPT_OSS, BLOOM = transformers.GptOssConfig(**TWO), transformers.BloomConfig(n_layer=2)


@pytest.mark.parametrize(
    ("config", "layout", "device", "flash", "expected"),
    [
        (QWEN3, "shared", "cpu", True, SEGMENTS),
        (QWEN3, "padded", "cpu", True, "sdpa"),
        (QWEN3, "padded", "cuda", True, "sdpa"),
        (QWEN3, "shared", "cuda", True, FLEX),
        (QWEN3, "packed", "cuda", True, FLASH),
        (QWEN3, "packed", "cuda", False, FLEX),
        (GPT_OSS, "packed", "cuda", True, FLEX),  # FlashAttention 2 knows no sinks
        (GPT_OSS, "padded", "cpu", True, PADDED),
        (GPT_OSS, "shared", "cpu", True, SEGMENTS),
        *((config, layout, "cuda", True, "eager") for config in (GEMMA2, BLOOM) for layout in ("padded", "packed")),
    ],
)
def test_kernel_by_model_device_and_layout(
    config: Any, layout: str, device: str, flash: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: flash)
    assert attention_implementation(without_memory(config), layout, device) == expected


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_model_runs_with_the_registered_kernel(device: str, random_models: dict[str, str]) -> None:
    """transformers hands the block mask, or the segments, through to it."""
    name = attention_implementation(without_memory(QWEN3), "shared", device)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 3, 3]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 3, 0, 1, 2, 9, 10]])
    segments = ROWS[:, :1]
    logits = {}
    for kernel in ("sdpa", name):
        model = transformers.AutoModelForCausalLM.from_pretrained(random_models["tied"], attn_implementation=kernel)
        with torch.no_grad():
            mask = attention_inputs(segments, positions, kernel)
            logits[kernel] = model(input_ids=ids, position_ids=positions, **mask).logits
    torch.testing.assert_close(logits["sdpa"][:, :9], logits[name][:, :9], atol=1e-4, rtol=0)  # two of padding


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.LlamaConfig(**TWO), ""),
        (transformers.Qwen2Config(**TWO, use_sliding_window=True, max_window_layers=1), ""),
        (transformers.MistralConfig(**TWO, sliding_window=4096), ""),
        (transformers.Gemma3TextConfig(**TWO), ""),
        (GPT_OSS, ""),
        (GEMMA2, "softcap"),
        (BLOOM, "BloomAttention"),
        (transformers.GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]]), "GPTNeoSelfAttention"),
        (transformers.CodeGenConfig(n_layer=2), "CodeGenAttention"),
        (transformers.FalconConfig(**TWO, alibi=True), "FalconAttention"),
        (transformers.Llama4TextConfig(**TWO, num_local_experts=2), "chunked_attention"),
        (transformers.Qwen3NextConfig(**TWO, num_experts=2), "linear_attention"),
        (transformers.MambaConfig(**TWO), "linear_attention"),
    ],
)
def test_models_that_stay_padded(config: object, reason: str) -> None:
    found = why_padded(without_memory(config))
    if reason:
        says(found, reason)
    else:
        assert found == ""


def test_windows_are_those_that_a_models_masks_keep() -> None:
    """OLMoE passes a window on, and its masks know of none."""
    mistral = transformers.MistralConfig(**TWO, sliding_window=7)
    assert windows_of(without_memory(mistral)) == {7}
    assert windows_of(without_memory(transformers.MistralConfig(**TWO, sliding_window=None))) == set()
    assert windows_of(without_memory(transformers.OlmoeConfig(**TWO, num_experts=2, sliding_window=7))) == set()


def test_layout_by_keys() -> None:
    assert choose_layout(use_remove_padding=True, use_prefix_grouper=True) == "shared"
    assert choose_layout(use_remove_padding=True, use_prefix_grouper=False) == "packed"
    assert choose_layout(use_remove_padding=False, use_prefix_grouper=True) == "padded"
