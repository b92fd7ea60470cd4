"""Which models are checked because their ranks split sequences; the checks themselves are tested where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.trainer.split_check import check_split_model, split_models
from tests.messages import says
from tests.models import random_model

ACTOR, REF = (f"actor_rollout_ref.{role}.ulysses_sequence_parallel_size" for role in ("actor", "ref"))
CRITIC = "critic.ulysses_sequence_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        ([f"{ACTOR}=2"], [ACTOR, REF]),
        ([f"{ACTOR}=2", f"{REF}=1"], [ACTOR]),
        ([f"{ACTOR}=2", "actor_rollout_ref.actor.use_kl_loss=false"], [ACTOR]),
        ([f"{ACTOR}=2", "actor_rollout_ref.model.lora_rank=4"], [ACTOR]),
        ([f"{REF}=2"], [REF]),
        ([f"{CRITIC}=2", "recipe=ppo"], [CRITIC]),
        ([f"{CRITIC}=2"], []),
    ],
)
def test_the_roles_that_split_and_are_there(overrides: list[str], keys: list[str]) -> None:
    config, _ = load_config(overrides)
    found = list(split_models(config))
    assert [model.sequence_parallel_key for model in found] == keys
    assert all(model.sequence_parallel_size == 2 for model in found)


def test_a_teacher_is_checked_under_its_own_key(tmp_path: Path) -> None:
    teacher = random_model("Qwen3", tmp_path, num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    config, _ = load_config([f"{ACTOR}=2", f"actor_rollout_ref.ref.model.path={teacher}"])
    policy, reference = split_models(config)
    check_split_model(policy)
    with pytest.raises(ConfigError) as caught:
        check_split_model(reference)
    says(caught.value, f"{REF}=2", f"actor_rollout_ref.ref.model.path={teacher}", "3 attention heads", "1 or 3")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError) as damaged:
        check_split_model(reference)
    says(damaged.value, teacher)
