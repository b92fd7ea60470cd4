"""How a kernel for decoding is noticed, on a faked compiler, and rows that come out wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.kernel.flex import flex_attention as lowering

from benchmarks.gpu_check import kernels
from benchmarks.gpu_check.results import Findings
from benchmarks.gpu_check.scale import SCALES
from benchmarks.gpu_check.work import Work


def test_kernels_for_decoding_are_counted_where_the_compiler_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the compiler's cache, which would make none, is off meanwhile."""
    monkeypatch.setattr(lowering, "create_flex_decoding_kernel", lambda *args: (args, config.force_disable_caches))
    before = config.force_disable_caches
    made: list[None] = []
    with kernels.made_for_decoding(made):
        assert made == []
        assert lowering.create_flex_decoding_kernel("query", "key") == (("query", "key"), True)
        lowering.create_flex_decoding_kernel("query", "key")
    lowering.create_flex_decoding_kernel("query", "key")
    assert len(made) == 2
    assert config.force_disable_caches == before


@pytest.mark.parametrize("rows", kernels.ROWS_OF_TWO)
def test_rows_of_two_tokens_that_come_out_wrong_are_seen(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel under which the first token sees the second one."""
    seen: list[torch.Size] = []

    def sees_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen.append(query.shape)
        return kernels._sdpa(torch.ones(1, 1, 2, 2, dtype=torch.bool))(query, key, value)

    monkeypatch.setattr(kernels, "_flex", lambda segments: sees_all)
    kernels._rows_of_two(work := Work("cpu", SCALES["small"], tmp_path, Findings(holds=False)), rows)
    assert [figure.met for figure in work.found.figures] == [False, None]
    assert seen == [torch.Size([rows, 4, 2, 32])]
