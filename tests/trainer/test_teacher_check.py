"""What is wrong with a teacher is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from grpo_dist.config.load import load_config
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.trainer.preflight import check_model
from grpo_dist.trainer.teacher_check import check_teacher
from tests.messages import refuses
from tests.models import another_builtin_model, builtin_reward_model

PATH = "actor_rollout_ref.ref.model.path"


def check(path: object, *overrides: str, weights: bool = True) -> None:
    config, _ = load_config(["recipe=distill", f"{PATH}={path}", *overrides])
    check_teacher(config, check_model(config), weights=weights)


def rewrite(path: str, **changes: Any) -> None:
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_teacher_of_any_size_and_the_policy_itself(tmp_path: Path) -> None:
    """With more layers, another width and an output layer of its own, also with rows of padding behind the tokens."""
    check("builtin:tiny-qwen3")
    check(another_builtin_model(tmp_path / "wide", hidden_size=48, num_hidden_layers=5))
    check(another_builtin_model(tmp_path / "padded", vocab_size=320, tie_word_embeddings=False))


def test_fewer_outputs_than_the_policys(tmp_path: Path) -> None:
    path = another_builtin_model(tmp_path, vocab_size=250)
    with refuses(ConfigError, f"{PATH}={path}", "below 250", "actor_rollout_ref.model.path=builtin:tiny-qwen3", "256"):
        check(path)


def test_other_tokens(tmp_path: Path, random_models: dict[str, str]) -> None:
    path = another_builtin_model(tmp_path)
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(path)
    with refuses(ConfigError, f"{PATH}={path}", "actor_rollout_ref.model.path=builtin:tiny-qwen3", "tokens"):
        check(path)


@pytest.mark.parametrize("weights", [True, False])
def test_a_classifier(tmp_path: Path, weights: bool) -> None:
    """By its weights, and where these are not downloaded by its config.json."""
    path = builtin_reward_model(tmp_path, template=None)
    with refuses(ConfigError, f"{PATH}={path}", "classifier", "reward_model.model.path"):
        check(path, weights=weights)


def test_logits_that_are_more_than_hidden_states_times_the_output_layer(tmp_path: Path) -> None:
    """Only the exact KL is made of those."""
    path = another_builtin_model(tmp_path)
    rewrite(path, final_logit_softcapping=30.0)
    with refuses(ConfigError, "kl_loss_type=full", f"{PATH}={path}", "final_logit_softcapping", "k2"):
        check(path)
    check(path, "actor_rollout_ref.actor.kl_loss_type=k2")


def test_code_that_comes_with_it_is_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    path = another_builtin_model(tmp_path)
    rewrite(path, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    with refuses(DataError, f"{PATH}={path}", "actor_rollout_ref.ref.model.trust_remote_code=true"):
        check(path)


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors"])
def test_a_file_is_missing(tmp_path: Path, missing: str) -> None:
    path = Path(another_builtin_model(tmp_path))
    (path / missing).unlink()
    with refuses(DataError, f"{PATH}={path}", missing.partition(".")[0]):
        check(path)
