"""The exported policy is there whole or not at all. What it holds: tests/engines/test_checkpoint.py."""

from __future__ import annotations

import resource
from pathlib import Path

from grpo_dist.engines.fsdp_engine import FSDPEngine
from grpo_dist.engines.hf_export import export_hf_model
from grpo_dist.engines.settings import ModelSettings, OptimizerSettings
from grpo_dist.errors import CheckpointError
from tests.ranks import run_ranks


def export_twice(rank: int, model: str, folder: Path) -> str:
    """Once as it should be; then where no file may grow beyond 20 kB, which the weights do."""
    optimizer = OptimizerSettings(1e-2, 0.01, (0.9, 0.999), "cosine", 2, 6, 0.1)
    settings = ModelSettings(model, False, "fp32", "fp32", False, True)
    engine = FSDPEngine(settings, device="cpu", temperature=1.0, optimizer=optimizer, grad_clip=1.0)
    export_hf_model(engine, folder)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        export_hf_model(engine, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_full_disk_leaves_the_one_before_and_all_ranks_say_so(random_models: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "huggingface"
    errors = run_ranks(2, export_twice, random_models["tied"], folder)
    for error in errors:
        assert error.startswith(f"cannot write the trained policy to {folder}: ")
        assert "trainer.default_local_dir" in error
    assert (folder / "model.safetensors").stat().st_size > 20_000
    assert {path.name for path in folder.iterdir()} >= {"config.json", "generation_config.json", "tokenizer.json"}
    assert list(tmp_path.iterdir()) == [folder], "nothing half written is left"
