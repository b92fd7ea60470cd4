"""docs/clusters.md's table of models and GPUs is what the memory plan says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from grpo_dist.plan.commands import load_config
from tests.examples.test_examples import load_module

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clusters.md").read_text()


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    return load_module(ROOT / "scripts/fitting.py")


def cells(model: str) -> list[str]:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {model} |")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_some_cells_of_the_page_are_the_plans(fitting: ModuleType) -> None:
    columns = [(gpu, kind) for kind in fitting.KINDS for gpu in fitting.GPUS]
    for model, *column in (
        ("Qwen3-0.6B", "24 GB", "all weights"),
        ("Qwen3-8B", "80 GB", "all weights"),
        ("Qwen3-1.7B", "24 GB", "8-bit states"),
    ):
        gpu, kind = column
        assert cells(model)[columns.index((gpu, kind))] == fitting.fewest(model, fitting.GPUS[gpu], kind)


def test_what_the_page_says_of_8b_on_80_gb_loads(fitting: ModuleType) -> None:
    count, _, mark = cells("Qwen3-8B")[list(fitting.GPUS).index("80 GB")].partition(" ")
    assert (int(count), mark) == (4, ""), "engines have GPUs of their own"
    on = (*fitting.RUN, "cluster=node8", f"trainer.n_gpus_per_node={count}", "cluster.gpu_memory_gib=79.1")
    load_config([*on, f"{fitting.REF}.fsdp_config.param_offload=true", "actor_rollout_ref.model.path=Qwen/Qwen3-8B"])


@pytest.mark.long
def test_the_table_is_fresh(fitting: ModuleType) -> None:
    assert fitting.table() in PAGE, "run: python scripts/fitting.py, and put it into docs/clusters.md"
