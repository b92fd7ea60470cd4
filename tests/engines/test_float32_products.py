"""On which tensors products of float32 numbers may read fewer bits. What a GPU makes of it is not seen here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_dist.engines.float32_products import float32_products


def states(dtype: torch.dtype, is_cuda: bool) -> Any:
    return SimpleNamespace(is_cuda=is_cuda, element_size=lambda: dtype.itemsize)


@pytest.mark.parametrize(
    ("dtype", "is_cuda", "within"),
    [
        (torch.bfloat16, True, "high"),
        (torch.float16, True, "high"),
        (torch.float32, True, "highest"),
        (torch.bfloat16, False, "highest"),
    ],
)
def test_of_hidden_states_of_16_bits_on_a_gpu(dtype: torch.dtype, is_cuda: bool, within: str) -> None:
    """And only within the block, also where it fails."""
    assert torch.get_float32_matmul_precision() == "highest"
    seen = []

    def product() -> None:
        with float32_products(states(dtype, is_cuda)):
            seen.append(torch.get_float32_matmul_precision())
            raise RuntimeError

    pytest.raises(RuntimeError, product)
    assert seen == [within]
    assert torch.get_float32_matmul_precision() == "highest"


def test_such_states_lose_nothing_in_tf32() -> None:
    """Their mantissas have 7 and 10 bits, and TF32's has 10."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype).float()
        bits = x.view(torch.int32)
        assert torch.equal(bits & ~((1 << 13) - 1), bits)
