"""What is wrong with a critic is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from grpo_dist.config.load import load_config
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.trainer.critic_check import check_critic
from grpo_dist.trainer.preflight import check_model
from tests.messages import refuses
from tests.models import builtin_reward_model, random_classifier

PATH = "critic.model.path"


def check(path: object) -> dict[str, tuple[int, ...]]:
    config, _ = load_config(["recipe=ppo", f"{PATH}={path}"])
    return check_critic(config, check_model(config), weights=True).shapes


def test_the_policy_itself_gets_a_head_and_a_reward_model_has_one(tmp_path: Path) -> None:
    assert "score.weight" not in check("builtin:tiny-qwen3")
    assert "score.weight" in check(builtin_reward_model(tmp_path))


def test_a_head_with_two_outputs(tmp_path: Path) -> None:
    path = random_classifier(tmp_path, num_labels=2)
    with refuses(ConfigError, f"{PATH}={path}", "score.weight has 2 outputs"):
        check(path)


def test_a_family_without_a_linear_head(tmp_path: Path) -> None:
    tiny = transformers.GPT2Config(vocab_size=32, n_positions=256, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(tiny).save_pretrained(tmp_path)
    with refuses(ConfigError, f"{PATH}={tmp_path}", "model_type=gpt2"):
        check(tmp_path)


def test_other_tokens_than_the_policys(tmp_path: Path, random_models: dict[str, str]) -> None:
    path = builtin_reward_model(tmp_path)
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(path)
    with refuses(ConfigError, f"{PATH}={path}", "actor_rollout_ref.model.path=builtin:tiny-qwen3", "tokens"):
        check(path)


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors"])
def test_a_file_is_missing(tmp_path: Path, missing: str) -> None:
    path = Path(builtin_reward_model(tmp_path))
    (path / missing).unlink()
    with refuses(DataError, f"{PATH}={path}", missing.partition(".")[0]):
        check(path)
