"""The command line: groups, unknown keys, everything wrong at once, what is chosen unless it is set; data files."""

from pathlib import Path

import pytest

from grpo_dist.config.data_files import DataFile, parse_data_file
from grpo_dist.config.keys import nearest_keys
from grpo_dist.config.load import saved_values, with_overrides
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, load_config
from tests.config.refusals import problems, refused
from tests.messages import refuses, says

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def load(*overrides):
    return load_config(list(overrides))[0]


@pytest.fixture
def rows(tmp_path):
    (path := tmp_path / "train.parquet").write_bytes(b"PAR1")
    return f"data.train_files={path}"


@pytest.fixture
def model(tmp_path):
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text("{}")
    return f"actor_rollout_ref.model.path={folder}"


TYPOS = {
    "data.train_bach_size": "data.train_batch_size",
    "rollout.n": f"{ROLLOUT}.n",
    "lr": f"{ACTOR}.optim.lr",
    "actor.lr": f"{ACTOR}.optim.lr",
    "algoritm.adv_estimator": "algorithm.adv_estimator",
    "algorithm.kl_loss_coef": f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.kl_los_type": f"{ACTOR}.kl_loss_type",
    "trainer.health.kll.action": "trainer.health.kl.action",
}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_typos_suggest_the_key(prefix):
    for line, (written, meant) in zip(problems(*(f"{prefix}{each}=1" for each in TYPOS)), TYPOS.items(), strict=True):
        says(line, f"{written}:", meant)
        assert nearest_keys(written)[0] == meant
    assert nearest_keys("zzz.qqq") == [], "nothing is near"


# What is wrong, and what is said of it beside its key.
WRONG = {
    "algorithm.adv_estimator=grpoo": ["algorithm.adv_estimator=grpoo", "grpo, grpo_passk, grpo_process,"],
    "+data.shufle=true": ["data.shufle:", "data.shuffle"],
    f"{ROLLOUT}.temperature=0": [f"{ROLLOUT}.temperature=0", "greater than 0"],
    f"{ACTOR}.ppo_mini_batch_size=5": ["data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=5", "multiple"],
    f"{ROLLOUT}.max_model_len=10": ["max_model_len=10", "data.max_prompt_length=64", "data.max_response_length=64"],
    "trainer.logger=console,wandb": ["trainer.logger=console,wandb", "trainer.logger=[console,wandb]"],
    "algorithm.kl_penalty=nowhere.py:f": ["algorithm.kl_penalty=nowhere.py", "file"],
    "trainer.total_training_steps": ["trainer.total_training_steps:", "key=value"],
    "trainer.default_local_dir=${nowhere}/x": ["'nowhere'"],
}


@pytest.mark.parametrize("causes", ["0", "1"], ids=["plain", "under a debugger"])
def test_everything_wrong_is_said_at_once_and_rules_keep_quiet_about_it(causes, monkeypatch):
    monkeypatch.setenv("OC_CAUSE", causes)
    lines = problems(*WRONG)
    assert len(lines) == len(WRONG)
    for override, parts in WRONG.items():
        (line,) = (line for line in lines if override.lstrip("+").partition("=")[0] in line)
        says(line, *parts)
    assert "multiple" not in refused("data.train_bach_size=48", f"{ACTOR}.ppo_mini_batch_size=48")


def test_the_last_of_two_counts():
    config = load("trainer.seed=1", "model=qwen3_8b", "trainer.seed=2", "model=smollm2_135m")
    assert config.trainer.seed == 2
    assert config.actor_rollout_ref.model.path == "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize("group", ["model=tiny model=hf", "cluster=cpu +cluster=node8", "data=gsm8k data=arithmetic"])
def test_of_two_options_of_a_group_the_one_without_effect_is_named(group, model):
    says(load_config([*group.split(), model])[1], *(each.lstrip("+") for each in group.split()))


def test_two_recipes_are_not_combined():
    for given in (["recipe=gspo"], ["+cluster=cpu", "+cluster=cpu"], [("recipe", "gspo")]):
        assert load_config([*given, *given]) == load_config(given), "the same twice"
    for given in (
        ["+recipe=dapo", "+recipe=gspo"],
        ["recipe=dapo", "trainer.seed=1", "recipe=gspo"],
        [("recipe", "dapo"), ("+recipe", "gspo")],
    ):
        with refuses(ConfigError, "recipe=dapo", "recipe=gspo"):
            load_config(given)


def test_free_form_mappings_take_any_name():
    config = load(
        "data.apply_chat_template_kwargs.enable_thinking=false",
        "+data.apply_chat_template_kwargs.depth.of=3",
        "custom_reward_function.reward_kwargs={weight:\n  0.5}",
    )
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "depth": {"of": 3}}
    assert config.custom_reward_function.reward_kwargs == {"weight": 0.5}
    assert load("+trainer.seed=5", "++trainer={test_freq: 6}").trainer.seed == 5


def test_own_models_and_data_leave_the_built_in_settings_behind(model, rows):
    for chosen, lr in (([], 1e-6), (["model=smollm2_135m"], 1e-5)):
        config, notes = load_config([model, *chosen])
        assert config.actor_rollout_ref.model.path == model.partition("=")[2]
        assert config.actor_rollout_ref.actor.optim.lr == lr
        assert config.actor_rollout_ref.rollout.kv_cache_memory_gib is None
        assert bool(notes) == (not chosen)
    says(load_config([model])[1], "model=hf")
    assert load("actor_rollout_ref.model.path=builtin:tiny-qwen3") == load(), "the built-in one is no other"
    config, notes = load_config([rows, "model=qwen3_0_6b", "cluster=node8"])
    assert (config.data.val_files, config.trainer.total_training_steps) == ((), None)
    says(notes, "data=files")
    assert load(rows, "data=arithmetic").data.max_response_length == 64


def sizes(config):
    data = config.data
    return data.train_batch_size, data.max_prompt_length, data.max_response_length


MINI = f"{ACTOR}.ppo_mini_batch_size"


def test_defaults_for_own_data_fit_the_machine_and_the_model(rows, model):
    for overrides in ([rows], [rows, model], [rows, model, "trainer.n_gpus_per_node=0"], [rows, "cluster=single_gpu"]):
        assert sizes(load(*overrides)) == (32, 256, 256)
    for machine in ("cluster=node8", "cluster=single_gpu", "trainer.n_gpus_per_node=4", "cluster=multi_node"):
        assert sizes(load(rows, model, machine)) == (1024, 512, 1024)
    config, notes = load_config([rows, model, "trainer.n_gpus_per_node=4"])
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (4, 1)
    says(notes, "cluster=node8", "trainer.n_gpus_per_node")
    assert sizes(load("data.max_response_length=32", rows)) == (32, 256, 32)


@pytest.mark.parametrize("batch", [4, 32])
def test_a_mini_batch_is_the_batch_unless_it_is_set(batch):
    size = f"data.train_batch_size={batch}"
    for overrides in ([size], [size, f"{MINI}=null"], [size, "recipe=ppo", "critic.ppo_mini_batch_size=null"]):
        config = load(*overrides)
        assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == batch
        assert config.on_policy == ("recipe=ppo" not in overrides)
    assert load(size, f"{MINI}=2").critic.ppo_mini_batch_size == 2
    says(refused("data.train_batch_size=0"), "data.train_batch_size=0")


def test_saved_configs_of_older_versions_and_of_other_models():
    values = load("trainer.seed=5").model_dump(mode="json")
    del values["reward"]["step_separator"]
    config = saved_values(values, GRPO)
    assert (config.trainer.seed, config.reward.step_separator) == (5, "\n")
    values["trainer"]["expected_response_length"] = 300  # was in no result
    values["actor_rollout_ref"]["rollout"]["draft_tokens"] = 8  # likewise
    values["trainer"]["stream_mini_batches"] = False
    assert saved_values(values, GRPO) == config
    with refuses(ConfigError, "trainer.stream_mini_batches"):
        saved_values(values | {"trainer": values["trainer"] | {"stream_mini_batches": True}}, GRPO)
    values["reward"]["gone"] = 3
    with refuses(ConfigError, "reward.gone"):
        saved_values(values, GRPO)
    # The group that such a key selects leaves it open; what copies it follows.
    config = with_overrides({}, ["actor_rollout_ref.model.path=mine"], GRPO)
    assert config.actor_rollout_ref.model.path == config.reward_model.model.input_tokenizer == "mine"
    saved = load("actor_rollout_ref.model.path=mine", "trainer.dry_run=config").model_dump(mode="json")
    assert with_overrides(saved, ["model=hf"], GRPO).actor_rollout_ref.model.path == "mine", "a group leaves it open"


# --- entries of data.train_files -------------------------------------------------------------------------------------
def test_names_of_data_sets():
    for name, expected in (
        ("builtin:arithmetic/train", DataFile("builtin", "arithmetic/train")),
        ("hf:openai/gsm8k", DataFile("hub", "openai/gsm8k")),
        ("hf:openai/gsm8k:train", DataFile("hub", "openai/gsm8k", None, "train")),
        ("hf:openai/gsm8k/main", DataFile("hub", "openai/gsm8k", "main")),
        ("hf:openai/gsm8k/main:test", DataFile("hub", "openai/gsm8k", "main", "test")),
    ):
        assert parse_data_file("data.train_files", name) == expected


def test_files_and_folders(tmp_path):
    for name in ("a.jsonl", "folder/train.parquet", "saved/state.json", "a:b/x.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name, kind, split in (
        ("a.jsonl", "file", None),
        ("folder", "parquet_folder", None),
        ("folder:train", "parquet_folder", "train"),
        ("saved:dev", "saved", "dev"),
        ("a:b", "parquet_folder", None),  # there is a folder of this name
    ):
        path = f"{tmp_path}/{name}".removesuffix(f":{split}")
        assert parse_data_file("data.train_files", f"{tmp_path}/{name}") == DataFile(kind, path, split=split)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hf:gsm8k", ["hf:OWNER/NAME"]),
        ("hf:a/b/c/d", ["hf:OWNER/NAME"]),
        ("gone.parquet", ["file", Path.cwd()]),
        ("/gone.parquet", ["file"]),
        ("gone", ["folder", Path.cwd()]),
        ("gone:train", ["folder"]),
        ("rows.csv", [".parquet, .jsonl or .json", "folder"]),
        (".", ["folder", ".parquet"]),
    ],
)
def test_entries_that_are_no_data(name, parts):
    says(parse_data_file("data.train_files", name).text, *parts)


def test_of_a_missing_file_the_one_beside_it_that_is_meant_is_named(tmp_path):
    (tmp_path / "train.parquet").touch()
    for near, is_near in (("trian.parquet", True), ("0.jsonl", False)):
        assert ("'train.parquet'" in parse_data_file("data.train_files", f"{tmp_path}/{near}").text) == is_near


def test_a_missing_library_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_dist.config.data_files.find_spec", lambda name: None)
    (tmp_path / "state.json").write_text("{}")
    for name in ("hf:openai/gsm8k", str(tmp_path)):
        says(parse_data_file("data.train_files", name).text, "pip install 'datasets>=4,<6'")
    assert isinstance(parse_data_file("data.train_files", "builtin:arithmetic/train"), DataFile)


# --- mistakes that people make, each answered with the key and what to do ---------------------------------------------
A, R, M = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))

MISTAKES = {
    # names
    "the wrong section": ("actor.ppo_mini_batch_size=8", f"{A}.ppo_mini_batch_size"),
    "a hyphen": ("trainer.save-freq=5", "trainer.save_freq"),
    "a mistake in a mapping": (f"{A}={{ppo_epoch:2}}", f"{A}.ppo_epochs?"),
    "a section for a key": (f"{A}.optim=adamw", " lr,"),
    "a section of sections for a key": ("actor_rollout_ref=x", "model, actor, rollout, ref"),
    "a group that is not there": ("model=qwen3_7b", "hf, qwen3_0_6b, qwen3_1_7b, qwen3_8b, smollm2_135m, tiny;"),
    "a group misspelt": ("model=qwen3_7b", "model=qwen3_1_7b"),
    "a removed key": ("~trainer.seed", "null"),
    "a key of Hydra": ("hydra.run.dir=x", "hydra.run.dir:"),
    "a place in a list": ("trainer.logger.0=x", "trainer.logger.0:"),
    # forms
    "dashes": ("--trainer.seed=1", "trainer.seed"),
    "dashes and another name": ("--learning-rate=1e-6", f"{A}.optim.lr"),
    "a flag of its own": ("--use_wandb", "trainer.logger=[console,wandb]"),
    "a flag of Hydra": ("--multirun", "--help"),
    "a sweep": ("trainer.seed=1,2", "trainer.seed=[1,2]"),
    "a package": ("model@actor=tiny", "(@)"),
    "nothing": ("", "'':"),
    "a model for a group": ("model=Qwen/Qwen3-0.6B", f"{M}.path=Qwen/Qwen3-0.6B"),
    "a file for a group": ("data=rows.jsonl", "data.train_files=rows.jsonl"),
    "an open bracket": ("trainer.logger=[console", "[ "),
    "a name that resembles none": ("data.foo=1", "--help"),
    "Python's None": (f"{A}.clip_ratio_low=None", "null"),
    # ranges
    "a share of a prompt": ("data.train_batch_size=1.5", "whole number"),
    "more memory than there is": (f"{R}.gpu_memory_utilization=1.2", "1"),
    # keys against each other
    "no model": ("model=hf", f"{M}.path=Qwen/Qwen3-0.6B"),
    "no rows": ("data=files", "data.train_files="),
    "too many prompts without a filter": ("data.gen_batch_size=64", "algorithm.filter_groups.enable=true"),
    "too few prompts without a filter": ("data.gen_batch_size=24", "null"),
    "prompts in halves without a filter": ("data.gen_batch_size=16", "null"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_names_the_key_and_the_fix(mistake: str) -> None:
    override, advice = MISTAKES[mistake]
    message = "\n".join(problems(override))
    says(message, override.lstrip("-~").partition("=")[0])
    says(message.replace(override, ""), advice)


@pytest.mark.parametrize(
    "override",
    [
        "custom_reward_function.reward_kwarg={api_key: SECRET123}",
        "custom_reward_function.reward_kwargs={api_key: SECRET123",
        "custom_reward_function.reward_kwargs.api_key=SECRET123,SECRET123",
        "custom_reward_function.reward_kwargs=[{api_key: SECRET123}]",
        f"{R}.agent.agent_kwargs={{hf_token: SECRET123, 1: b}}",
        "reward_model.model.api_key=SECRET123",
    ],
)
def test_no_message_shows_a_secret(override: str) -> None:
    try:
        said = "\n".join(load_config([override])[1])
    except ConfigError as error:
        said = str(error)
    assert override.partition("=")[0].rpartition(".")[2] in said
    assert "SECRET123" not in said
