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
POLICY, INPUT = "actor_rollout_ref.model.path", "reward_model.model.input_tokenizer"
TINY = "builtin:tiny-qwen3"
KL = "actor_rollout_ref.actor.kl_loss_type=k2"
RUNS = {
    POLICY: ("model", "data=arithmetic"),
    PATH: ("reward model", "reward_model.enable=true"),
    CRITIC: ("critic", "recipe=ppo"),
    TEACHER: ("teacher", "recipe=distill"),
}


def row_of(key: str, config: Any) -> CheckedModel:
    return next(row for row in checked_models(config) if row.model.title == RUNS[key][0])


def check(key: str, path: object, *overrides: str, weights: bool = True) -> str:
    """Check the model under `key` as a run does, and the tokens that it reads; returns what a dry run says of it."""
    config, _ = load_config([RUNS[key][1], f"{key}={path}", *overrides])
    row = row_of(key, config)
    model = check_files(row, weights=weights)
    told = check_use(row, model)
    if row.model.reads_tokens:
        check_tokens(config, row, model, policy_folder(config))
    return told


def rewrite(path: object, **changes: Any) -> None:
    file = Path(str(path)) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def two_outputs(folder: Path) -> str:
    path = random_classifier(folder, num_labels=2)
    rewrite(path, max_position_embeddings=512)
    return path


# --- every model -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("key", RUNS)
def test_a_file_is_missing(key: str, tmp_path: Path, missing: str) -> None:
    path = Path(builtin_reward_model(tmp_path)) if key in (PATH, CRITIC) else Path(another_builtin_model(tmp_path))
    row = row_of(key, load_config([RUNS[key][1], f"{key}={path}"])[0])
    (path / missing).unlink()
    with refuses(DataError, f"{key}={path}", missing.partition(".")[0]):
        check_files(row)


@pytest.mark.parametrize("key", [CRITIC, TEACHER])
def test_other_tokens_than_the_policys_or_none(key: str, tmp_path: Path, random_models: dict[str, str]) -> None:
    path = another_builtin_model(tmp_path)
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(path)
    with refuses(ConfigError, f"{key}={path}", f"{POLICY}={TINY}", "tokens"):
        check(key, path)
    Path(path, "tokenizer.json").unlink()
    with refuses(DataError, f"{key}={path}", "tokenizer"):
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
def test_a_model_without_a_head_of_one_output(key: str, tmp_path: Path) -> None:
    tiny = transformers.GPT2Config(vocab_size=32, n_positions=256, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2ForSequenceClassification(tiny).save_pretrained(tmp_path)
    with refuses(ConfigError, f"{key}={tmp_path}", "model_type=gpt2"):
        check(key, tmp_path)
    two = two_outputs(tmp_path / "two")
    with refuses(ConfigError, f"{key}={two}", "score.weight has 2 outputs"):
        check(key, two)


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


def test_a_model_in_a_few_words_and_its_head(tmp_path: Path) -> None:
    def trained(command: Any, path: object = TINY, *, weights: bool = True) -> str:
        (row,) = checked_models(load_command([f"model.path={path}", "data.max_length=64"], command)[0])
        return check_use(row, check_files(row, weights=weights))

    classifier, two = builtin_reward_model(tmp_path / "one"), two_outputs(tmp_path / "two")
    says(trained(SFT), "qwen3", "35 tensors", "1 file")
    says(trained(SFT, weights=False), "qwen3", "downloaded")
    with refuses(ConfigError, f"model.path={classifier}", "score.weight", "causal LM"):
        trained(SFT, classifier)
    says([trained(REWARD_MODEL)], "new head")
    says([trained(REWARD_MODEL, classifier)], "its head")
    with refuses(ConfigError, f"model.path={two}", "score.weight", "2 outputs"):
        trained(REWARD_MODEL, two)
    says(check(CRITIC, TINY), "new head")
    says(check(CRITIC, classifier), "its head")


# --- critic and teacher ------------------------------------------------------------------------------------------
def test_a_teacher_of_any_size_but_with_all_outputs_of_the_policy_and_no_others(tmp_path: Path) -> None:
    """With more layers, another width and an output layer of its own, also with rows of padding behind the tokens."""
    check(TEACHER, TINY)
    check(TEACHER, another_builtin_model(tmp_path / "wide", hidden_size=48, num_hidden_layers=5))
    check(TEACHER, another_builtin_model(tmp_path / "padded", vocab_size=320, tie_word_embeddings=False))
    path = another_builtin_model(tmp_path, vocab_size=250)
    with refuses(ConfigError, f"{TEACHER}={path}", "below 250", f"{POLICY}={TINY}", "256"):
        check(TEACHER, path)
    # Only the exact KL is made of those.
    path = another_builtin_model(tmp_path)
    rewrite(path, final_logit_softcapping=30.0)
    with refuses(ConfigError, "kl_loss_type=full", f"{TEACHER}={path}", "final_logit_softcapping", "k2"):
        check(TEACHER, path)
    check(TEACHER, path, KL)


def test_positions_of_a_critic_from_the_hub_are_asked_once_its_config_is_here() -> None:
    longer = "actor_rollout_ref.model.override_config.max_position_embeddings=4096"
    config, _ = load_config(["recipe=ppo", f"{CRITIC}=some/critic", "data.max_prompt_length=600", longer])
    row = row_of(CRITIC, config)
    model = check_files(replace(row, settings=replace(row.settings, path=TINY)))
    (problem,) = problems_of_model(config, row, model, Machine("", None))
    says(problem.text, f"{CRITIC}=some/critic", "512 positions", "data.max_prompt_length=600", "override_config")


# --- sequences that are split over ranks -------------------------------------------------------------------------
ACTOR, REF = (f"actor_rollout_ref.{role}.ulysses_sequence_parallel_size" for role in ("actor", "ref"))
SPLIT_CRITIC = "critic.ulysses_sequence_parallel_size"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        ([f"{ACTOR}=8"], [ACTOR, REF]),
        ([f"{ACTOR}=8", f"{REF}=1"], [ACTOR]),
        ([f"{ACTOR}=8", "actor_rollout_ref.actor.use_kl_loss=false"], [ACTOR]),
        ([f"{ACTOR}=8", "actor_rollout_ref.model.lora_rank=4"], [ACTOR]),
        ([f"{REF}=8"], [REF]),
        ([f"{SPLIT_CRITIC}=8", "recipe=ppo", "cluster.critic_world_size=8"], [SPLIT_CRITIC]),
        ([f"{SPLIT_CRITIC}=8"], []),
    ],
)
def test_the_roles_that_split_and_are_there(overrides: list[str], keys: list[str]) -> None:
    """The built-in model's 4 heads do not split over 8 ranks."""
    split = [row for row in checked_models(load_config(overrides)[0]) if row.settings.sequence_parallel_size > 1]
    assert [row.settings.sequence_parallel_key for row in split] == keys
    for row, key in zip(split, keys, strict=True):
        with refuses(ConfigError, f"{key}=8", f"={TINY}", "4 attention heads", "1 or 2 or 4"):
            check_use(row, check_files(row))


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
NULL = f"{INPUT}=null"


def config(path: object, *overrides: str) -> RunConfig:
    few = ("data.train_max_samples=32", "data.val_files=null", "trainer.val_before_train=false")
    return load_config(["reward_model.enable=true", f"{PATH}={path}", *few, *overrides])[0]


def converse(found: RunConfig) -> None:
    policy, row = policy_folder(found), row_of(PATH, found)
    scorer = check_files(row)
    check_use(row, scorer)
    check_conversations(found, policy, scorer, load_run_prompts(found, policy)[0].train)


def test_a_reward_model_that_fits_and_the_tokenizer_that_reads(tmp_path: Path, random_models: dict[str, str]) -> None:
    path, other = builtin_reward_model(tmp_path), f"{INPUT}={random_models['tied']}"
    assert resolve_model_path(config(path).reward_model.model.input_tokenizer or "") == resolve_model_path(TINY)
    converse(config(path))
    converse(config(path, NULL))
    with refuses(DataError, f"{INPUT}=nowhere/at/all"):
        converse(config(path, f"{INPUT}=nowhere/at/all"))
    with refuses(ConfigError, other, f"{POLICY}={TINY}"):
        converse(config(path, other))
    rewrite(path, num_attention_heads="four")
    with refuses(DataError, f"{PATH}={path}", "config.json", "num_attention_heads"):
        check(PATH, path)


def test_a_causal_model_has_no_head(tmp_path: Path) -> None:
    """In a dry run the weights of a hub model are not downloaded, and config.json says whether it has one."""
    good, bad = builtin_reward_model(tmp_path / "good"), random_model("Qwen3", tmp_path / "bad")
    with refuses(ConfigError, f"{PATH}={bad}", "score.weight"):
        check(PATH, bad)
    says(check(PATH, good, weights=False), "downloaded")
    with refuses(ConfigError, f"{PATH}={bad}", "Qwen3ForCausalLM"):
        check(PATH, bad, weights=False)


def test_no_tokenizer_and_tokens_that_are_not_read_as_they_are(tmp_path: Path, random_models: dict[str, str]) -> None:
    path = random_classifier(tmp_path)  # of 96 tokens
    with refuses(DataError, f"{PATH}={path}", "tokenizer.json"):
        converse(config(path))
    transformers.AutoTokenizer.from_pretrained(random_models["tied"]).save_pretrained(path)
    with refuses(ConfigError, NULL, f"{PATH}={path}", INPUT):
        converse(config(path, NULL))
    converse(config(path))  # rendered again
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model_path(TINY))  # of a larger model
    tokenizer.add_tokens(["zzz"] + [f"z{i}" for i in range(96)])
    tokenizer.chat_template = "z95"
    tokenizer.save_pretrained(path)
    with refuses(DataError, f"{PATH}={path}", "vocab_size"):
        converse(config(path))


PROCESS = "reward_model.process.enable=true"
TOKENS = ("reward_model.process.good='1'", "reward_model.process.bad='0'")


def test_models_that_judge_steps(tmp_path: Path) -> None:
    """A head of two outputs, or a causal LM and the tokens by which it judges."""
    two = random_classifier(tmp_path, "Qwen3", "Token", num_labels=2)
    check(PATH, two, PROCESS)
    three = random_classifier(tmp_path / "three", "Qwen3", "Token", num_labels=3)
    with refuses(ConfigError, f"{PATH}={three}", "score.weight has 3 outputs"):
        check(PATH, three, PROCESS)
    converse(config(TINY, PROCESS, *TOKENS))
    with refuses(ConfigError, f"{PATH}={TINY}", "score.weight"):
        check(PATH, TINY, PROCESS)
    with refuses(ConfigError, f"{PATH}={two}", "score.weight", "reward_model.process.good=null"):
        check(PATH, two, PROCESS, *TOKENS)
    with refuses(ConfigError, "reward_model.process.good='12'", "2 tokens"):
        converse(config(TINY, PROCESS, "reward_model.process.good='12'", TOKENS[1]))
