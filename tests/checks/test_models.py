"""What is wrong with a model of a run is said before anything starts: one table, and what is asked of its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from grpo_dist.assets import resolve_model_path
from grpo_dist.checks.all_checks import Machine, problems_of_model
from grpo_dist.checks.models import (
    CheckedModel,
    check_conversations,
    check_files,
    check_teachers,
    check_tokens,
    check_use,
    checked_models,
)
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.data import Prompt, TokenizedPrompt
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plan.commands import REWARD_MODEL, SFT, load_config
from grpo_dist.trainer.run_prompts import load_run_prompts
from tests.messages import refuses, says
from tests.models import another_builtin_model, builtin_reward_model, policy_folder, random_classifier, random_model

PATH, CRITIC, TEACHER = "reward_model.model.path", "critic.model.path", "actor_rollout_ref.ref.model.path"
POLICY = "actor_rollout_ref.model.path"
KL = "actor_rollout_ref.actor.kl_loss_type=k2"
NULL = "reward_model.model.input_tokenizer=null"
RUNS = {
    POLICY: ("model", "data=arithmetic"),
    PATH: ("reward model", "reward_model.enable=true"),
    CRITIC: ("critic", "recipe=ppo"),
    TEACHER: ("teacher", "recipe=distill"),
}


def check(key: str, path: object, *overrides: str, weights: bool = True) -> str:
    """Check the model under `key` as a run does, and the tokens that it reads; returns what a dry run says of it."""
    role, run = RUNS[key]
    config, _ = load_config([run, f"{key}={path}", *overrides])
    row = next(row for row in checked_models(config) if row.model.title == role)
    model = check_files(row, weights=weights)
    told = check_use(row, model)
    if row.model.reads_tokens:
        check_tokens(config, row, model, policy_folder(config))
    return told


def rewrite(path: object, **changes: Any) -> None:
    file = Path(str(path)) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# --- every model -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("key", RUNS)
def test_a_file_is_missing(key: str, tmp_path: Path, missing: str) -> None:
    path = Path(builtin_reward_model(tmp_path)) if key in (PATH, CRITIC) else Path(another_builtin_model(tmp_path))
    role, run = RUNS[key]
    row = next(row for row in checked_models(load_config([run, f"{key}={path}"])[0]) if row.model.title == role)
    (path / missing).unlink()
    with refuses(DataError, f"{key}={path}", missing.partition(".")[0]):
        check_files(row)


@pytest.mark.parametrize("key", [CRITIC, TEACHER])
def test_a_tokenizer_is_missing(key: str, tmp_path: Path) -> None:
    path = Path(another_builtin_model(tmp_path))
    (path / "tokenizer.json").unlink()
    with refuses(DataError, f"{key}={path}", "tokenizer"):
        check(key, path)


@pytest.mark.parametrize("key", [CRITIC, TEACHER])
def test_other_tokens_than_the_policys(key: str, tmp_path: Path, random_models: dict[str, str]) -> None:
    path = another_builtin_model(tmp_path)
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(path)
    with refuses(ConfigError, f"{key}={path}", f"{POLICY}=builtin:tiny-qwen3", "tokens"):
        check(key, path)


def test_each_teacher_is_checked_and_each_data_source_has_one(tmp_path: Path, random_models: dict[str, str]) -> None:
    other = another_builtin_model(tmp_path)
    config, _ = load_config(["recipe=distill", KL, f"{TEACHER}={{a: builtin:tiny-qwen3, b/c: {other}}}"])
    rows = [row for row in checked_models(config) if row.model.reads_tokens]
    assert [(row.model.title, row.settings.path) for row in rows] == [
        ("teacher of a", "builtin:tiny-qwen3"),
        ("teacher of b/c", other),
    ]
    for row in rows:
        check_tokens(config, row, check_files(row), policy_folder(config))
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(other)
    with refuses(ConfigError, f"{TEACHER}={other}", "b/c"):
        check_tokens(config, rows[1], check_files(rows[1]), policy_folder(config))

    named = [
        TokenizedPrompt(Prompt(i, source, [], None, {}, f"rows.jsonl, line {i + 1}"), np.zeros(1, np.int32))
        for i, source in enumerate(("a", "b/c", "d", "d"))
    ]
    check_teachers(config, named[:2])
    with refuses(DataError, TEACHER, 2, "'d'", "rows.jsonl, line 3"):
        check_teachers(config, named)
    check_teachers(load_config([])[0], named)
    endpoint = "actor_rollout_ref.ref.model.endpoint"
    elsewhere = ("recipe=distill", f"{endpoint}.base_url=http://teacher/v1", f"{endpoint}.model=big")
    check_teachers(load_config([*elsewhere])[0], named)
    with refuses(ConfigError, f"{endpoint}.headers_env=NOWHERE"):
        check_teachers(load_config([*elsewhere, f"{endpoint}.headers_env=NOWHERE"])[0], named)


@pytest.mark.parametrize("key", [PATH, CRITIC])
def test_a_family_without_a_linear_head(key: str, tmp_path: Path) -> None:
    tiny = transformers.GPT2Config(vocab_size=32, n_positions=256, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2ForSequenceClassification(tiny).save_pretrained(tmp_path)
    with refuses(ConfigError, f"{key}={tmp_path}", "model_type=gpt2"):
        check(key, tmp_path)


@pytest.mark.parametrize("key", [PATH, CRITIC])
def test_a_head_with_two_outputs(key: str, tmp_path: Path) -> None:
    path = random_classifier(tmp_path, num_labels=2)
    rewrite(path, max_position_embeddings=512)
    with refuses(ConfigError, f"{key}={path}", "score.weight has 2 outputs"):
        check(key, path)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(("key", "remedy"), [(POLICY, "causal LM"), (TEACHER, PATH)])
def test_a_classifier_where_a_causal_model_is_needed(key: str, remedy: str, tmp_path: Path, weights: bool) -> None:
    """By its weights, and where these are not downloaded by its config.json."""
    path = builtin_reward_model(tmp_path, template=None)
    with refuses(ConfigError, f"{key}={path}", "classifier", remedy):
        check(key, path, weights=weights)


@pytest.mark.parametrize("key", [POLICY, TEACHER])
def test_code_that_comes_with_it_is_not_run_unless_it_is_trusted(key: str, tmp_path: Path) -> None:
    path = another_builtin_model(tmp_path)
    rewrite(path, model_type="mine", auto_map={"AutoConfig": "mine.Config"})
    with refuses(DataError, f"{key}={path}", f"{key.removesuffix('path')}trust_remote_code=true"):
        check(key, path)


def trained(command: Any, path: object = "builtin:tiny-qwen3") -> str:
    (row,) = checked_models(load_command([f"model.path={path}", "data.max_length=64"], command)[0])
    return check_use(row, check_files(row))


def test_a_model_in_a_few_words() -> None:
    says(trained(SFT), "qwen3", "35 tensors", "1 file")
    row = checked_models(load_command([], SFT)[0])[0]
    says(check_use(row, check_files(row, weights=False)), "qwen3", "downloaded")


def test_a_reward_model_goes_on_or_begins_with_a_new_head(tmp_path: Path) -> None:
    says(trained(REWARD_MODEL), "new head")
    says(trained(REWARD_MODEL, builtin_reward_model(tmp_path / "one")), "its head")
    two = random_classifier(tmp_path / "two", num_labels=2)
    rewrite(two, max_position_embeddings=512)
    with refuses(ConfigError, f"model.path={two}", "score.weight", "2 outputs"):
        trained(REWARD_MODEL, two)


def test_a_classifier_is_not_fine_tuned(tmp_path: Path) -> None:
    path = builtin_reward_model(tmp_path)
    with refuses(ConfigError, f"model.path={path}", "score.weight", "causal LM"):
        trained(SFT, path)


# --- critic and teacher ------------------------------------------------------------------------------------------
def test_a_critic_gets_a_head_or_has_one(tmp_path: Path) -> None:
    says(check(CRITIC, "builtin:tiny-qwen3"), "new head")
    says(check(CRITIC, builtin_reward_model(tmp_path)), "its head")


def test_a_teacher_of_any_size_and_the_policy_itself(tmp_path: Path) -> None:
    """With more layers, another width and an output layer of its own, also with rows of padding behind the tokens."""
    check(TEACHER, "builtin:tiny-qwen3")
    check(TEACHER, another_builtin_model(tmp_path / "wide", hidden_size=48, num_hidden_layers=5))
    check(TEACHER, another_builtin_model(tmp_path / "padded", vocab_size=320, tie_word_embeddings=False))


def test_a_teacher_with_fewer_outputs_than_the_policy(tmp_path: Path) -> None:
    path = another_builtin_model(tmp_path, vocab_size=250)
    with refuses(ConfigError, f"{TEACHER}={path}", "below 250", f"{POLICY}=builtin:tiny-qwen3", "256"):
        check(TEACHER, path)


def test_logits_that_are_more_than_hidden_states_times_the_output_layer(tmp_path: Path) -> None:
    """Only the exact KL is made of those."""
    path = another_builtin_model(tmp_path)
    rewrite(path, final_logit_softcapping=30.0)
    with refuses(ConfigError, "kl_loss_type=full", f"{TEACHER}={path}", "final_logit_softcapping", "k2"):
        check(TEACHER, path)
    check(TEACHER, path, "actor_rollout_ref.actor.kl_loss_type=k2")


def test_positions_of_a_critic_from_the_hub_are_asked_once_its_config_is_here() -> None:
    longer = "actor_rollout_ref.model.override_config.max_position_embeddings=4096"
    config, _ = load_config(["recipe=ppo", f"{CRITIC}=some/critic", "data.max_prompt_length=600", longer])
    rows = {row.model.title: row for row in checked_models(config)}
    model = check_files(replace(rows["critic"], settings=replace(rows["critic"].settings, path="builtin:tiny-qwen3")))
    (problem,) = problems_of_model(config, rows["critic"], model, Machine("", None))
    says(problem.text, f"{CRITIC}=some/critic", "512 positions", "data.max_prompt_length=600", "override_config")


# --- sequences that are split over ranks -------------------------------------------------------------------------
ACTOR, REF = (f"actor_rollout_ref.{role}.ulysses_sequence_parallel_size" for role in ("actor", "ref"))
SPLIT_CRITIC = "critic.ulysses_sequence_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        ([f"{ACTOR}=2"], [ACTOR, REF]),
        ([f"{ACTOR}=2", f"{REF}=1"], [ACTOR]),
        ([f"{ACTOR}=2", "actor_rollout_ref.actor.use_kl_loss=false"], [ACTOR]),
        ([f"{ACTOR}=2", "actor_rollout_ref.model.lora_rank=4"], [ACTOR]),
        ([f"{REF}=2"], [REF]),
        ([f"{SPLIT_CRITIC}=2", "recipe=ppo"], [SPLIT_CRITIC]),
        ([f"{SPLIT_CRITIC}=2"], []),
    ],
)
def test_the_roles_that_split_and_are_there(overrides: list[str], keys: list[str]) -> None:
    rows = checked_models(load_config(overrides)[0])
    split = [row.settings for row in rows if row.settings.sequence_parallel_size > 1]
    assert [settings.sequence_parallel_key for settings in split] == keys
    assert all(settings.sequence_parallel_size == 2 for settings in split)


def test_heads_of_a_teacher_are_asked_for_under_its_own_key(tmp_path: Path) -> None:
    path = random_model("Qwen3", tmp_path, num_attention_heads=3, num_key_value_heads=3, head_dim=8)
    config, _ = load_config([f"{ACTOR}=2", f"{TEACHER}={path}"])
    policy, teacher = checked_models(config)
    says(check_use(policy, check_files(policy)), "2 ranks")
    with refuses(ConfigError, f"{REF}=2", f"{TEACHER}={path}", "3 attention heads", "1 or 3"):
        check_use(teacher, check_files(teacher))
    (tmp_path / "config.json").write_text("{}")
    with refuses(DataError, path):
        check_files(teacher)


# --- reward models -----------------------------------------------------------------------------------------------
def config(path: object, *overrides: str) -> RunConfig:
    few = ("data.train_max_samples=32", "data.val_files=null", "trainer.val_before_train=false")
    return load_config(["reward_model.enable=true", f"{PATH}={path}", *few, *overrides])[0]


def scorer_row(found: RunConfig) -> CheckedModel:
    return next(row for row in checked_models(found) if row.model.title == "reward model")


def converse(found: RunConfig) -> None:
    policy, row = policy_folder(found), scorer_row(found)
    scorer = check_files(row)
    check_use(row, scorer)
    check_conversations(found, policy, scorer, load_run_prompts(found, policy)[0].train)


@pytest.mark.parametrize("overrides", [(), (NULL,)])
def test_a_reward_model_that_fits(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    converse(config(builtin_reward_model(tmp_path), *overrides))


def test_a_causal_model_has_no_head(tmp_path: Path) -> None:
    path = random_model("Qwen3", tmp_path)
    with refuses(ConfigError, f"{PATH}={path}", "score.weight"):
        check(PATH, path)


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
    says(check(PATH, good, weights=False), "downloaded")
    with refuses(ConfigError, f"{PATH}={bad}", "Qwen3ForCausalLM"):
        check(PATH, bad, weights=False)


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    path = Path(builtin_reward_model(tmp_path))
    found = json.loads((path / "config.json").read_text()) | {"num_attention_heads": "four"}
    (path / "config.json").write_text(json.dumps(found))
    with refuses(DataError, f"{PATH}={path}", "config.json", "num_attention_heads"):
        check(PATH, path)


def test_the_policy_is_its_input_tokenizer_by_default(tmp_path: Path) -> None:
    found = config(builtin_reward_model(tmp_path)).reward_model.model
    assert resolve_model_path(found.input_tokenizer or "") == resolve_model_path("builtin:tiny-qwen3")


PROCESS = "reward_model.process.enable=true"
TOKENS = ("reward_model.process.good='1'", "reward_model.process.bad='0'")


def test_models_that_judge_steps(tmp_path: Path) -> None:
    """A head of two outputs, or a causal LM and the tokens by which it judges."""
    two = random_classifier(tmp_path, "Qwen3", "Token", num_labels=2)
    check(PATH, two, PROCESS)
    three = random_classifier(tmp_path / "three", "Qwen3", "Token", num_labels=3)
    with refuses(ConfigError, f"{PATH}={three}", "score.weight has 3 outputs"):
        check(PATH, three, PROCESS)
    converse(config("builtin:tiny-qwen3", PROCESS, *TOKENS))
    with refuses(ConfigError, f"{PATH}=builtin:tiny-qwen3", "score.weight"):
        check(PATH, "builtin:tiny-qwen3", PROCESS)
    with refuses(ConfigError, f"{PATH}={two}", "score.weight", "reward_model.process.good=null"):
        check(PATH, two, PROCESS, *TOKENS)
    with refuses(ConfigError, "reward_model.process.good='12'", "2 tokens"):
        converse(config("builtin:tiny-qwen3", PROCESS, "reward_model.process.good='12'", TOKENS[1]))
