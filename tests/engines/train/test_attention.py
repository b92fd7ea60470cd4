"""Masks and kernels of each layout; attention by segments: values, gradients, sinks, windows; gated delta nets."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from grpo_dist.engines.train import attention, segment_attention
from grpo_dist.engines.train.recurrence import convolved, plan_recurrence, with_states
from grpo_dist.engines.train.segment_attention import plan_segments, segment_attention_forward, segment_runs
from tests.messages import says
from tests.models import GATED_DELTA_NET, without_memory
from tests.tiers import covering

# [prompt | r1 | r2] of one group, a second group, two tokens of padding; and a row of padding but for one token.
OWN = [[0, 0, 0, 1, 1, 2, 3, 3, 4, -1, -1], [5] + [-1] * 10]
PARENT = [[0, 0, 0, 0, 0, 0, 3, 3, 3, -1, -1], [5] + [-1] * 10]
LAST = [[2, 2, 2, 1, 1, 2, 4, 4, 4, -1, -1], [5] + [-1] * 10]
ROWS = torch.tensor([OWN, LAST], dtype=torch.int32)


def sees_by_hand(row: int, q: int, k: int) -> bool:
    return q >= k and (OWN[row][q] == OWN[row][k] or PARENT[row][q] == OWN[row][k])


def test_both_masks_are_the_rule() -> None:
    dense, mask_mod = attention.dense_mask(ROWS), attention.sees(ROWS)
    assert dense.shape == (2, 1, 11, 11)
    for row, q, k in product(range(2), range(11), range(11)):
        by_mod = mask_mod(*(torch.tensor(i) for i in (row, 0, q, k)))
        assert dense[row, 0, q, k].item() == by_mod.item() == sees_by_hand(row, q, k)


def sdpa_in_its_place(factor: float) -> Callable[..., tuple[Tensor, None]]:
    """A kernel that goes backward on CPU; the gradient of its values is `factor` of what it should be."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> tuple[Tensor, None]:
        value = factor * value + (1 - factor) * value.detach()
        dense = attention.dense_mask(ROWS[:, :1])
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense, enable_gqa=True)
        return out.transpose(1, 2), None

    return attend


@pytest.mark.parametrize(("factor", "fault"), [(1.0, ""), (0.9, "off by 0.1 of their size")])
def test_gradients_of_flex_attention_are_compared(factor: float, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    monkeypatch.setattr(attention, "flex_attention_forward", sdpa_in_its_place(factor))
    monkeypatch.setattr(attention, "CHECKED_TOKENS", 11)
    with torch.no_grad():  # as the check of layouts calls it
        found = attention.flex_backward_fault(config, ROWS, torch.float32)
    assert found.endswith(fault) if fault else not found


def test_inputs_of_each_kernel() -> None:
    lengths = attention.varlen_inputs(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert (lengths["cu_seq_lens_q"].tolist(), lengths["max_length_q"]) == ([0, 3, 4, 6], 3)
    positions, inputs = torch.arange(11).repeat(2, 1), attention.attention_inputs
    assert inputs(None, positions, "sdpa") == {}
    mask = inputs(ROWS, positions, "sdpa")["attention_mask"]
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 1, 11, 11))
    assert isinstance(inputs(ROWS, positions, attention.FLEX)["attention_mask"], BlockMask)
    alone = [inputs(ROWS, positions, attention.SEGMENTS, limit)["segments"].alone for limit in (3, 2, 0)]
    assert [len(each) for each in alone] == [0, 1, 6]
    assert "cu_seq_lens_k" in inputs(ROWS, positions[:1], attention.FLASH)


TWO = {"num_hidden_layers": 2}
QWEN3, GEMMA2 = transformers.Qwen3Config(**TWO), transformers.Gemma2Config(**TWO)
GPT_OSS, BLOOM = transformers.GptOssConfig(**TWO), transformers.BloomConfig(n_layer=2)
KERNELS = [
    (QWEN3, "shared", "cpu", True, attention.SEGMENTS),
    (QWEN3, "padded", "cpu", True, "sdpa"),
    (QWEN3, "padded", "cuda", True, "sdpa"),
    (QWEN3, "shared", "cuda", True, attention.FLEX),
    (QWEN3, "packed", "cuda", True, attention.FLASH),
    (QWEN3, "packed", "cuda", False, attention.FLEX),
    (GPT_OSS, "packed", "cuda", True, attention.FLEX),  # FlashAttention 2 knows no sinks
    (GPT_OSS, "padded", "cpu", True, attention.PADDED),
    (GPT_OSS, "shared", "cpu", True, attention.SEGMENTS),
    *((config, layout, "cuda", True, "eager") for config in (GEMMA2, BLOOM) for layout in ("padded", "packed")),
]


@pytest.mark.parametrize("row", KERNELS)
def test_kernel_by_model_device_and_layout(row: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    config, layout, device, flash, expected = row
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: flash)
    assert attention.attention_implementation(without_memory(config), layout, device) == expected


REASONS = [
    (transformers.LlamaConfig(**TWO), ""),
    (transformers.Qwen2Config(**TWO, use_sliding_window=True, max_window_layers=1), ""),
    (transformers.MistralConfig(**TWO, sliding_window=4096), ""),
    (transformers.Gemma3TextConfig(**TWO), ""),
    (GPT_OSS, ""),
    (transformers.Qwen3_5TextConfig(**TWO, **GATED_DELTA_NET, hidden_size=32), ""),
    (GEMMA2, "softcap"),
    (BLOOM, "BloomAttention"),
    (transformers.GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]]), "GPTNeoSelfAttention"),
    (transformers.FalconConfig(**TWO, alibi=True), "FalconAttention"),
    (transformers.Llama4TextConfig(**TWO, num_local_experts=2), "chunked_attention"),
    (transformers.MambaConfig(**TWO), "linear_attention"),
]


@pytest.mark.parametrize(("config", "reason"), REASONS)
def test_models_that_stay_padded(config: object, reason: str) -> None:
    found = attention.why_padded(without_memory(config))
    assert bool(found) == bool(reason)
    if reason:
        says(found, reason)


def test_windows_are_those_that_a_models_masks_keep() -> None:
    """OLMoE passes a window on, and its masks know of none."""
    configs = [transformers.MistralConfig(**TWO, sliding_window=window) for window in (7, None)]
    configs.append(transformers.OlmoeConfig(**TWO, num_experts=2, sliding_window=7))
    assert [attention.windows_of(without_memory(config)) for config in configs] == [{7}, set(), set()]


# --- by segments, against SDPA under the dense mask ------------------------------------------------------------------
MODULE: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
SINKS = (1.0, -1.0, 6.0, 0.0)


def rows_of(groups: list[tuple[int, list[int]]]) -> torch.Tensor:
    """Segments of one row of groups, (tokens of the prompt, of each response), and two tokens of padding."""
    own, lasts = [], []
    for prompt, responses in groups:
        first = len(set(own))
        for segment, length in enumerate([prompt, *responses]):
            own += [first + segment] * length
            lasts += [first + (segment or len(responses))] * length
    return torch.tensor([[[*own, -1, -1]], [[*lasts, -1, -1]]], dtype=torch.int32)


# (segment, the last that follows it, tokens): a prompt, a turn behind it with two branches, of which the second has
# two, and another turn behind the prompt.
TREE_RUNS = [(0, 6, 5), (1, 5, 30), (2, 2, 4), (3, 5, 25), (4, 4, 3), (5, 5, 40), (6, 6, 2)]
TREE = torch.tensor([[[run[axis] for run in TREE_RUNS for _ in range(run[2])]] for axis in (0, 1)], dtype=torch.int32)


def test_runs_by_hand() -> None:
    """A row's first run is its own, even where the row before ends in the same padding."""
    found = [(run.start, run.length, run.seen) for run in segment_runs(ROWS)]
    starts, lengths = (0, 3, 5, 6, 8, 9, 11, 12), (3, 2, 1, 2, 1, 2, 1, 10)
    assert found == list(zip(starts, lengths, ((), (0,), (0,), (), (3,), None, (), None), strict=True))
    assert [run.seen for run in segment_runs(TREE)] == [(), (0,), (0, 1), (0, 1), (0, 1, 3), (0, 1, 3), (0,)]


def test_a_batch_is_cut_where_its_scores_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten responses of 8 tokens to a prompt of 8 tokens: 8 * 16 pairs each."""
    segments = rows_of([(8, [8] * 10)])
    assert [len(batch.real) for batch in plan_segments(segments).batches] == [10, 1]
    monkeypatch.setattr(segment_attention, "BATCH_PAIRS", 8 * 16 * 4)
    assert [len(batch.real) for batch in plan_segments(segments).batches] == [4, 4, 2, 1]


MIXED = rows_of([(30, [40, 38, 7, 1]), (3, [12]), (9, []), (28, [3, 37])])
KINDS = {"rows": ROWS, "mixed": MIXED, "tree": TREE}


def positions_of(segments: torch.Tensor) -> torch.Tensor:
    """(B, L): as many tokens as each one attention.sees before it."""
    return attention.dense_mask(segments)[:, 0].sum(-1) - 1


def by_hand(inputs: list[torch.Tensor], mask: torch.Tensor, scale: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention with whole scores and, of each head, one logit more in the softmax."""
    query, key, value = inputs
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


WINDOWS = ((0, None), (5, None), (0, SINKS), (1, SINKS), (33, SINKS))
LENGTHS = ((0, 512), (0, 7), (20, 512), (20, 7), (100, 512))


@pytest.mark.parametrize(("kind", "key_heads", "lengths", "extras"), covering(KINDS, (4, 2, 1), LENGTHS, WINDOWS))
def test_it_equals_attention_by_hand(
    kind: str, key_heads: int, lengths: tuple[int, int], extras: tuple[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, (batched_tokens, queries), (window, sinks) = KINDS[kind], lengths, extras
    monkeypatch.setattr(segment_attention, "QUERIES", queries)
    generator = torch.Generator().manual_seed(0)
    _, rows, width = segments.shape
    visible = segments[0] >= 0
    sizes = ((4, 8), (key_heads, 8), (key_heads, 6))
    leaves = [torch.randn(rows, h, width, d, generator=generator, requires_grad=True) for h, d in sizes]
    own = None if sinks is None else torch.tensor(sinks, requires_grad=True)
    weights = torch.randn(rows, width, 4, 6, generator=generator) * visible[..., None, None]  # padding is not looked at
    mask, at = attention.dense_mask(segments), positions_of(segments)
    if window:
        mask = mask & (at.unsqueeze(2) - at.unsqueeze(1) < window).unsqueeze(1)
    module: Any = SimpleNamespace(num_key_value_groups=4 // key_heads, is_causal=True)
    options: Any = {"scaling": 0.3, "s_aux": own, "sliding_window": window or None}
    plan = plan_segments(segments, batched_tokens, [window] if window else [])
    outs = [by_hand(leaves, mask | ~visible[:, None, :, None], 0.3, own)]
    outs.append(segment_attention_forward(module, *leaves, None, segments=plan, **options)[0])
    assert not outs[1][~visible].any()
    if extras == (0, None):
        outs.append(segment_attention_forward(module, *leaves, mask, scaling=0.3, segments=None)[0])
    wanted = [*leaves, *([] if own is None else [own])]
    expected, *others = ([out[visible], *torch.autograd.grad((out * weights).sum(), wanted)] for out in outs)
    for found in others:
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_flex_attention_under_block_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = [torch.randn(1, n, TREE.shape[2], 8, generator=generator) for n in (4, 2, 2)]
    at = positions_of(TREE)
    options: Any = {"scaling": 0.3, "windows": {5: attention.block_mask(TREE, at, 5)}}
    for window, sinks in ((None, None), (None, SINKS), (5, SINKS)):
        own = None if sinks is None else torch.tensor(sinks)
        near = at.unsqueeze(2) - at.unsqueeze(1) < (window or 1000)
        expected = by_hand(flat, attention.dense_mask(TREE) & near.unsqueeze(1), 0.3, own)
        more = options | {"sliding_window": window, "s_aux": own}
        for mask in (attention.block_mask(TREE), *([attention.dense_mask(TREE)] if own is None else [])):
            found, _ = attention.flex_attention_forward(MODULE, *flat, mask, **more)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_sinks_of_padded_sequences(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, n, 9, 8, generator=generator, requires_grad=True) for n in (4, 2, 2)]
    sinks = torch.tensor(SINKS, requires_grad=True)
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    found, _ = attention.padded_attention_forward(MODULE, *leaves, seen if masked else None, scaling=0.3, s_aux=sinks)
    expected = by_hand(leaves, seen, 0.3, sinks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    results = (torch.autograd.grad(out.square().sum(), [*leaves, sinks]) for out in (found, expected))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_in_bf16_only_what_goes_in_and_out_is_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, heads, MIXED.shape[2], 8, generator=generator).bfloat16() for heads in (4, 2, 2)]
    plan = plan_segments(MIXED)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = segment_attention_forward(MODULE, *leaves, None, segments=plan)[0]  # type: ignore[arg-type]
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for mine, exact in zip(*results, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), exact, atol=1e-6, rtol=2**-8)


# --- gated delta nets: what a token goes on from. tests/equivalence has whole models ----------------------------------
# A prompt of 2 tokens, two responses to it, one of them with two turns behind it, padding; and a sequence alone.
FOLLOWS = [0, 0, 1, 2, 2, 3, 4, -1, 5, 5, 5]
ENDS = [4, 4, 1, 4, 4, 3, 4, -1, 5, 5, 5]
TURNS = torch.tensor([FOLLOWS, ENDS]).unsqueeze(1)
# The tokens that each one ends.
PATHS = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [0, 1, 3, 4, 5], [0, 1, 3, 4, 6], [], [8], [8, 9], [8, 9, 10]]


def test_a_convolution_reads_what_a_token_follows() -> None:
    """Weights of 100, 10 and 1, the last of the token itself."""
    plan, tokens = plan_recurrence(TURNS), torch.arange(1.0, 12.0).view(1, 1, -1)
    out = convolved(None, plan, tokens, torch.tensor([[100.0, 10.0, 1.0]]))  # type: ignore[arg-type]
    assert out.flatten().tolist() == [1, 12, 123, 124, 245, 456, 457, 8, 9, 100, 1011]


def rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule token by token, as arXiv 2412.06464 writes it, of (L, heads, D) tensors: the last token's value."""
    state, out = torch.zeros(query.shape[1], query.shape[2], value.shape[2]), value[0]
    for q, k, v, decay, rate in zip(query, key, value, g, beta, strict=True):
        state = state * decay.exp().view(-1, 1, 1)
        error = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv,h->hkv", k, error, rate)
        out = torch.einsum("hkv,hk->hv", state, q) * q.shape[-1] ** -0.5
    return out


def test_a_segment_begins_with_the_state_behind_what_it_follows() -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.nn.functional.normalize(torch.randn(3, 1, 11, 2, 4, generator=random), dim=-1)
    g, beta = -torch.rand(1, 11, 2, generator=random), torch.rand(1, 11, 2, generator=random)
    computed: list[int] = []

    def counted(*tensors: Tensor, **kwargs: Any) -> Any:
        computed.append(int((kwargs["beta"] > 0).any(-1).sum()))
        return torch_chunk_gated_delta_rule(*tensors, **kwargs)

    out, _ = with_states(counted, plan_recurrence(TURNS), query, key, value, g=g, beta=beta)
    for token, path in enumerate(PATHS):
        alone = rule(*(x[0, path] for x in (query, key, value, g, beta))) if path else torch.zeros(2, 4)
        torch.testing.assert_close(out[0, token], alone, atol=1e-6, rtol=1e-5)
    assert sum(computed) == 10, "each token once, the prompt's too"
