"""An adapter to go on from decides rank, alpha and layers; what contradicts it is told with both values."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import SFT, load_config
from tests.adapters import write_adapter
from tests.messages import refuses, says

MODEL = "actor_rollout_ref.model"


def test_the_adapter_decides(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    config, _ = load_config([f"{MODEL}.lora_adapter_path={folder}"])
    model = config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.target_modules) == (4, 8.0, ("o_proj", "q_proj"))
    assert not config.needs_reference_workers, "the reference is the model without its factors"
    same, said = load_config([f"{MODEL}.lora_adapter_path={folder}", f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8"])
    assert same == config
    _, said = load_config([f"{MODEL}.lora_adapter_path={folder}", f"{MODEL}.target_modules=all-linear"])
    says(said, f"{MODEL}.target_modules", f"{MODEL}.lora_adapter_path={folder}")
    sft, _ = load_command([f"model.lora_adapter_path={folder}"], SFT)
    assert (sft.model.lora_rank, sft.model.lora_alpha, sft.model.target_modules) == (4, 8.0, ("o_proj", "q_proj"))
    assert load_config([])[0].actor_rollout_ref.model.lora_adapter_path is None


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (f"{MODEL}.lora_rank=8", [f"{MODEL}.lora_rank=8", "r=4"]),
        (f"{MODEL}.lora_alpha=16", [f"{MODEL}.lora_alpha=16", "lora_alpha=8"]),
    ],
)
def test_contradictions(tmp_path: Path, override: str, parts: list[str]) -> None:
    folder = write_adapter(tmp_path)
    with refuses(ConfigError, f"{MODEL}.lora_adapter_path={folder}", *parts):
        load_config([f"{MODEL}.lora_adapter_path={folder}", override])


def test_bad_folders(tmp_path: Path) -> None:
    nowhere = f"{MODEL}.lora_adapter_path={tmp_path}/nowhere"
    with refuses(ConfigError, nowhere):
        load_config([nowhere])
    _, said = load_config([nowhere, "trainer.dry_run=config"])
    says(said, nowhere)
    with refuses(ConfigError, f"model.lora_adapter_path={tmp_path}", "adapter_config.json"):
        load_command([f"model.lora_adapter_path={tmp_path}"], SFT)
    folder = write_adapter(tmp_path, use_dora=True)
    with refuses(ConfigError, f"{MODEL}.lora_adapter_path={folder}", "use_dora=true"):
        load_config([f"{MODEL}.lora_adapter_path={folder}"])


def test_what_engines_can_compute_with() -> None:
    apart = (f"{MODEL}.lora.merge=false", f"{MODEL}.lora_rank=512", f"{MODEL}.target_modules=[q_proj]")
    config, _ = load_config([*apart])
    assert config.actor_rollout_ref.model.sends_factors
    with refuses(ConfigError, f"{MODEL}.lora_rank=513", f"{MODEL}.lora.merge=false", "512"):
        load_config([*apart, f"{MODEL}.lora_rank=513"])
    with refuses(ConfigError, f"{MODEL}.target_modules=[q_proj,lm_head]", f"{MODEL}.lora.merge=false"):
        load_config([*apart, f"{MODEL}.target_modules=[q_proj,lm_head]"])
    with refuses(ConfigError, f"{MODEL}.target_modules=[model.lm_head]", f"{MODEL}.lora.merge=false"):
        load_config([*apart, f"{MODEL}.target_modules=[model.lm_head]"])
    assert not load_config([apart[0]])[0].actor_rollout_ref.model.sends_factors
