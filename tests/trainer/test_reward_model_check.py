"""What is wrong with a reward model is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from grpo_dist.assets import resolve_model_path
from grpo_dist.config.load import load_config
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.trainer.preflight import check_model
from grpo_dist.trainer.reward_model_check import check_conversations, check_reward_model
from grpo_dist.trainer.run_prompts import load_run_prompts
from tests.messages import refuses
from tests.models import builtin_reward_model, random_classifier, random_model

PATH = "reward_model.model.path"
NULL = "reward_model.model.input_tokenizer=null"


def config(path: object, *overrides: str) -> RunConfig:
    few = ("data.train_max_samples=32", "data.val_files=null", "trainer.val_before_train=false")
    return load_config(["reward_model.enable=true", f"{PATH}={path}", *few, *overrides])[0]


def converse(found: RunConfig) -> None:
    policy, scorer = check_model(found), check_reward_model(found, weights=True)
    check_conversations(found, policy, scorer, load_run_prompts(found, policy)[0].train)


@pytest.mark.parametrize("overrides", [(), (NULL,)])
def test_a_reward_model_that_fits(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    converse(config(builtin_reward_model(tmp_path), *overrides))


def test_a_causal_model_has_no_head(tmp_path: Path) -> None:
    path = random_model("Qwen3", tmp_path)
    with refuses(ConfigError, f"{PATH}={path}", "score.weight"):
        check_reward_model(config(path), weights=True)


def test_a_head_with_two_outputs(tmp_path: Path) -> None:
    path = random_classifier(tmp_path, num_labels=2)
    with refuses(ConfigError, f"{PATH}={path}", "score.weight has 2 outputs"):
        check_reward_model(config(path), weights=True)


def test_a_family_without_a_linear_head(tmp_path: Path) -> None:
    tiny = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=2, num_labels=1)
    transformers.GPT2ForSequenceClassification(tiny).save_pretrained(tmp_path)
    with refuses(ConfigError, f"{PATH}={tmp_path}", "model_type=gpt2"):
        check_reward_model(config(tmp_path), weights=True)


def test_other_tokens_are_not_read_as_they_are(tmp_path: Path, random_models: dict[str, str]) -> None:
    path = random_classifier(tmp_path)
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(path)
    with refuses(ConfigError, NULL, f"{PATH}={path}", "reward_model.model.input_tokenizer"):
        converse(config(path, NULL))
    converse(config(path))  # rendered again


def test_a_template_that_refuses_the_roles_of_the_rows(tmp_path: Path) -> None:
    path = builtin_reward_model(
        tmp_path, "{% if messages[0].role == 'system' %}{{ raise_exception('roles!') }}{% endif %}x"
    )
    converse(config(path))
    with refuses(DataError, f"{PATH}={path}", "roles!", "data.system_prompt"):
        converse(config(path, "data.system_prompt=Be brief."))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    path = random_classifier(tmp_path)
    with refuses(DataError, f"{PATH}={path}", "tokenizer.json"):
        converse(config(path))


def test_an_input_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    found = config(builtin_reward_model(tmp_path), "reward_model.model.input_tokenizer=nowhere/at/all")
    with refuses(DataError, "reward_model.model.input_tokenizer=nowhere/at/all"):
        converse(found)


def test_an_input_tokenizer_with_other_tokens(tmp_path: Path, random_models: dict[str, str]) -> None:
    other = f"reward_model.model.input_tokenizer={random_models['tied']}"
    with refuses(ConfigError, other, "actor_rollout_ref.model.path=builtin:tiny-qwen3"):
        converse(config(builtin_reward_model(tmp_path), other))


def test_a_tokenizer_of_a_larger_model(tmp_path: Path) -> None:
    path = random_classifier(tmp_path)  # of 96 tokens
    transformers.AutoTokenizer.from_pretrained(resolve_model_path("builtin:tiny-qwen3")).save_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["zzz"] + [f"z{i}" for i in range(96)])
    tokenizer.chat_template = "z95"
    tokenizer.save_pretrained(path)
    with refuses(DataError, f"{PATH}={path}", "vocab_size"):
        converse(config(path))


def test_without_its_weights_config_json_says_whether_it_is_one(tmp_path: Path) -> None:
    """In a dry run the weights of a hub model are not downloaded."""
    good, bad = builtin_reward_model(tmp_path / "good"), random_model("Qwen3", tmp_path / "bad")
    assert check_reward_model(config(good), weights=False).shapes == {}
    with refuses(ConfigError, f"{PATH}={bad}", "Qwen3ForCausalLM"):
        check_reward_model(config(bad), weights=False)


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    path = Path(builtin_reward_model(tmp_path))
    found = json.loads((path / "config.json").read_text()) | {"num_attention_heads": "four"}
    (path / "config.json").write_text(json.dumps(found))
    with refuses(DataError, f"{PATH}={path}", "config.json", "num_attention_heads"):
        check_reward_model(config(path), weights=True)


def test_the_policy_is_its_input_tokenizer_by_default(tmp_path: Path) -> None:
    found = config(builtin_reward_model(tmp_path)).reward_model.model
    assert resolve_model_path(found.input_tokenizer or "") == resolve_model_path("builtin:tiny-qwen3")


PROCESS = "reward_model.process.enable=true"
TOKENS = ("reward_model.process.good='1'", "reward_model.process.bad='0'")


def test_models_that_judge_steps(tmp_path: Path) -> None:
    """A head of two outputs, or a causal LM and the tokens by which it judges."""
    two = random_classifier(tmp_path, "Qwen3", "Token", num_labels=2)
    check_reward_model(config(two, PROCESS), weights=True)
    three = random_classifier(tmp_path / "three", "Qwen3", "Token", num_labels=3)
    with refuses(ConfigError, f"{PATH}={three}", "score.weight has 3 outputs"):
        check_reward_model(config(three, PROCESS), weights=True)
    converse(config("builtin:tiny-qwen3", PROCESS, *TOKENS))
    with refuses(ConfigError, f"{PATH}=builtin:tiny-qwen3", "score.weight"):
        check_reward_model(config("builtin:tiny-qwen3", PROCESS), weights=True)
    with refuses(ConfigError, f"{PATH}={two}", "score.weight", "reward_model.process.good=null"):
        check_reward_model(config(two, PROCESS, *TOKENS), weights=True)
    with refuses(ConfigError, "reward_model.process.good='12'", "2 tokens"):
        converse(config("builtin:tiny-qwen3", PROCESS, "reward_model.process.good='12'", TOKENS[1]))
