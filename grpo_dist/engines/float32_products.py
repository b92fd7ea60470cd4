"""Matrix products in float32 of hidden states of 16 bits, as the output layer's with `head_dtype=fp32`.

Trainer and engines share this, so that both round alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def float32_products(states: Tensor) -> Iterator[None]:
    """Within the block products of float32 tensors on a GPU run on its tensor cores, if `states` are of 16 bits.

    These read TF32, whose 10 bits of mantissa hold such states exactly and round weights to eight times finer steps
    than bfloat16; sums are float32. Without them the product would take some fifteen times as long on an H100.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if states.is_cuda and states.element_size() == 2 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
