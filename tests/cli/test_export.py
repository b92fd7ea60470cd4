"""`grpo-dist export`: the model of any checkpoint, the same files that a run writes at its end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import Usage, read_usage
from grpo_dist.config.load import load_command
from grpo_dist.config.schema_roles import AdamWConfig
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT
from grpo_dist.trainer.checkpoint.config_changes import saved_config
from grpo_dist.trainer.checkpoint.folder import begin_checkpoint, is_model_of, publish_checkpoint
from grpo_dist.trainer.checkpoint.manifest import checkpoint_digest
from tests.cli.conftest import Call
from tests.messages import says
from tests.ranks import run_ranks
from tests.tiers import first
from tests.trainer.checkpoints import run_state
from tests.worker_settings import lora, model_settings

TINY = "builtin:tiny-qwen3"
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"]
CASES: dict[str, tuple[Any, str, list[str], dict[str, Any]]] = {
    "grpo": (GRPO, "actor", [], {}),
    "grpo by LoRA": (GRPO, "actor", LORA, {"lora": lora()}),
    "sft": (SFT, "sft", [], {}),
    "reward model": (REWARD_MODEL, "reward_model", [], {"num_labels": 1, "new_head_seed": 1}),
}


def shards(rank: int, folder: Path, whole: Path, options: dict[str, Any]) -> None:
    """A model of two ranks that has changed since it was loaded: its checkpoint, and its export at the end of a run."""
    model = model_settings(resolve_model_path(TINY), **options)
    optimizer = AdamWConfig(lr=1e-3, weight_decay=0.0, betas=(0.9, 0.999), override_optimizer_config=None)
    engine = FSDPEngine(model, device="cpu", temperature=1.0, optimizer=optimizer)
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            if parameter.requires_grad:
                parameter.to_local().add_(0.01)
    engine.begin_save(folder)
    engine.finished_save(wait=True)
    engine.export_hf_model(whole, "fp32", Usage(4, checkpoint="of the run", dtype="fp32"))


def checkpoint(run_dir: Path, case: str) -> Path:
    """Write the checkpoints of steps 2 and 4; returns the folder that the run would have exported at step 4."""
    command, role, overrides, options = CASES[case]
    config, _ = load_command([f"trainer.default_local_dir={run_dir}", *overrides], command)
    history: list[str] = []
    for step in (2, 4):
        temporary = begin_checkpoint(run_dir, step)
        (temporary / role).mkdir()
        if step == 4:
            run_ranks(2, shards, temporary / role, run_dir / "at_the_end", options)
        state = replace(run_state(step), history=[*history])
        history.append(checkpoint_digest(publish_checkpoint(temporary, state, saved_config(config))))
    return run_dir / "at_the_end"


def tensors(folder: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}.safetensors")


def are_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("case", first(CASES, "grpo by LoRA"))
def test_it_is_what_the_run_exports(case: str, tmp_path: Path, call: Call) -> None:
    run_dir = tmp_path / "run"
    whole = checkpoint(run_dir, case)
    folder = run_dir / "huggingface_step_4"
    says(call("export", run_dir).out, "steps 2, 4", "step 4", folder)
    assert {path.name for path in folder.iterdir()} == {path.name for path in whole.iterdir()}
    assert read_usage(whole) == Usage(4, checkpoint="of the run", dtype="fp32")
    assert is_model_of(folder, run_dir / "global_step_4")
    assert not is_model_of(folder, run_dir / "global_step_2")
    assert read_usage(folder).dtype == "fp32"
    mine, start = tensors(folder), tensors(Path(resolve_model_path(TINY)))
    assert are_equal(mine, tensors(whole))
    assert any(not torch.equal(mine[name], start[name].float()) for name in mine.keys() & start.keys())
    if "LoRA" in case:
        factors = run_dir / f"{folder.name}_lora_adapter"
        assert are_equal(tensors(factors, "adapter_model"), tensors(run_dir / "lora_adapter", "adapter_model"))
        assert is_model_of(factors, run_dir / "global_step_4")
        assert read_usage(run_dir / "lora_adapter") == read_usage(whole)

    says(call("export", run_dir / "global_step_4", code=2).err, folder, "--to")  # the folder is there
    call("export", run_dir / "global_step_4", "--to", tmp_path / "half", "--dtype", "bf16")
    assert {tensor.dtype for tensor in tensors(tmp_path / "half").values()} == {torch.bfloat16}


def test_what_cannot_be_exported(tmp_path: Path, call: Call) -> None:
    run_dir = tmp_path / "run"
    says(call("export", run_dir, code=2).err, run_dir, "trainer.default_local_dir", "trainer.save_freq")
    config, _ = load_command([f"trainer.default_local_dir={run_dir}"], GRPO)
    temporary = begin_checkpoint(run_dir, 2)
    (temporary / "actor").mkdir()
    (temporary / "actor/.metadata").write_text("index")
    folder = publish_checkpoint(temporary, run_state(2), saved_config(config))

    says(call("export", run_dir, "--step", "3", code=2).err, "--step 3", run_dir, "steps 2")
    said = call("export", run_dir, "--model", tmp_path / "gone", code=2)
    says(said.err, f"actor_rollout_ref.model.path={tmp_path / 'gone'}")
    (folder / "actor/.metadata").write_text("other")
    says(call("export", run_dir, code=1).err, folder, "actor/.metadata")
    assert [path.name for path in run_dir.iterdir() if path.name.startswith("huggingface")] == []
