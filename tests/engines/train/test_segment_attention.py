"""Attention by segments against SDPA under the dense mask: values, gradients, grouped heads, padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from grpo_dist.engines.train.attention import dense_mask
from grpo_dist.engines.train.segment_attention import Run, segment_attention_forward, segment_runs
from tests.engines.train.test_attention import ROWS

MODULE = SimpleNamespace(num_key_value_groups=2, is_causal=True)
VISIBLE = ROWS[0] >= 0


def test_runs_by_hand() -> None:
    """[prompt of 3 | 2 | 1] and [prompt of 2 | 1] with two tokens of padding; the second row is one token and padding.

    A row's first run is its own, even where the row before ends in the same padding.
    """
    runs = segment_runs(ROWS)
    found = [(run.length, run.parent) for run in runs]
    assert found == [(3, -1), (2, 0), (1, 0), (2, -1), (1, 3), (2, None), (1, -1), (10, None)]
    mask = runs[1].mask
    assert mask is not None
    assert mask.tolist() == [[True] * 3 + [True, False], [True] * 5]


@pytest.mark.parametrize("key_heads", [4, 2])
def test_it_equals_the_dense_mask(key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 11, 8) for heads in (4, key_heads, key_heads)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    weights = torch.randn(2, 11, 4, 8, generator=generator) * VISIBLE[..., None, None]  # padding is not looked at
    results = []
    for mask, runs in ((None, segment_runs(ROWS)), (dense_mask(ROWS), None)):
        module = SimpleNamespace(num_key_value_groups=4 // key_heads, is_causal=True)
        out, _ = segment_attention_forward(module, *inputs, mask, scaling=0.3, segments=runs)  # type: ignore[arg-type]
        results.append([out[VISIBLE], *torch.autograd.grad((out * weights).sum(), inputs)])
    for mine, dense in zip(*results, strict=True):
        torch.testing.assert_close(mine, dense, atol=1e-5, rtol=1e-5)


def test_a_token_out_of_sight_changes_nothing() -> None:
    """Response 2 of the first group does not see response 1; the last prompt does not see the group before it."""
    query, key, value = (torch.randn(2, 2, 11, 8) for _ in range(3))
    runs: list[Run] = segment_runs(ROWS)

    def attend(values: torch.Tensor) -> torch.Tensor:
        return segment_attention_forward(MODULE, query, key, values, None, segments=runs)[0]  # type: ignore[arg-type]

    changed = value.clone()
    changed[0, :, 3:5] += 1.0
    same = (attend(value) == attend(changed)).flatten(2).all(-1)
    assert same[0].tolist() == [True] * 3 + [False] * 2 + [True] * 6
    assert same[1].all()
