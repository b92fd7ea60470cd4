"""Families with attention of their own train as transformers' own code says; docs/models.md has all of them."""

from __future__ import annotations

import pytest

from scripts.architectures import judge
from tests.ranks import run_ranks

RIGHT = "right"


def judged(rank: int, families: list[str], layouts: list[str]) -> list[list[str]]:
    return [judge(family, layouts) for family in families]


def test_sinks_own_attention_and_buffers_that_are_in_no_file() -> None:
    (found,) = run_ranks(1, judged, ["gpt_oss", "bloom", "falcon_h1"], ["padded", "shared"])
    sinks, own, buffers = found
    assert sinks == [RIGHT, RIGHT]
    assert own[0] == buffers[0] == RIGHT
    assert own[1].startswith("padded: ")
    assert "BloomAttention" in own[1]
    assert buffers[1].startswith("padded: ")


@pytest.mark.long
def test_families_of_each_kind() -> None:
    everywhere = ["gpt_oss", "mimo_v2_flash", "mistral", "gemma3_text", "deepseek_v3", "phi3", "opt"]
    padded = ["gptj", "falcon", "gemma2", "nemotron", "mamba", "zamba2", "hy_v4", "llama4_text", "qwen3_next"]
    (found,) = run_ranks(1, judged, everywhere + padded, ["padded", "packed", "shared"])
    for family, cells in zip(everywhere, found, strict=False):
        assert cells == [RIGHT] * 3, family
    for family, cells in zip(padded, found[len(everywhere) :], strict=True):
        assert cells[0] == RIGHT, family
        assert all(cell.startswith("padded: ") for cell in cells[1:]), family
