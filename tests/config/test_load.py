"""The command line: groups, unknown keys, everything wrong at once, and the round trip to a file."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_dist.config.command import usage
from grpo_dist.config.keys import nearest_keys
from grpo_dist.config.load import readable_config, saved_values, with_overrides
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, load_config
from tests.config.read_back import read_back
from tests.messages import refuses, says

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def load(*overrides):
    return load_config(list(overrides))[0]


def refused(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    return str(caught.value)


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1")
    return path


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("data.train_bach_size", "data.train_batch_size"),
        ("rollout.n", f"{ROLLOUT}.n"),
        ("rollout.temperature", f"{ROLLOUT}.temperature"),
        ("lr", f"{ACTOR}.optim.lr"),
        ("actor.lr", f"{ACTOR}.optim.lr"),
        ("algoritm.adv_estimator", "algorithm.adv_estimator"),
        ("algorithm.kl_loss_coef", f"{ACTOR}.kl_loss_coef"),
        (f"{ACTOR}.kl_los_type", f"{ACTOR}.kl_loss_type"),
        ("trainer.epochs", "trainer.total_epochs"),
    ],
)
def test_typos_suggest_the_key(written, meant):
    assert nearest_keys(written)[0] == meant
    for prefix in ("", "+", "++"):
        says(refused(f"{prefix}{written}=1"), f"{written}:", meant)


def test_no_hint_where_nothing_is_near():
    assert nearest_keys("zzz.qqq") == []
    says(refused("zzz.qqq=1"), "zzz.qqq:", "--help")


def test_unknown_keys_inside_a_mapping():
    says(refused(f"{ACTOR}={{ppo_epoch:2}}"), f"{ACTOR}.ppo_epoch:", f"{ACTOR}.ppo_epochs?")


def test_everything_wrong_is_said_at_once():
    message = refused(
        "algorithm.adv_estimator=grpoo",
        "+data.shufle=true",
        f"{ROLLOUT}.temperature=0",
        f"{ACTOR}.ppo_mini_batch_size=5",
        f"{ROLLOUT}.max_model_len=10",
        "trainer.logger=console,wandb",
        "data.val_files=nowhere.parquet",
        "trainer.total_training_steps",
        "trainer.default_local_dir=${nowhere}/x",
    )
    lines = message.splitlines()
    says(lines[0], 9)
    assert len(lines) == 10
    for parts in (
        ("algorithm.adv_estimator=grpoo", "grpo, grpo_passk, grpo_process,"),
        ("data.shufle:", "data.shuffle"),
        (f"{ROLLOUT}.temperature=0", "greater than 0"),
        ("data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=5", "multiple"),
        (f"{ROLLOUT}.max_model_len=10", "data.max_prompt_length=64", "data.max_response_length=64"),
        ("trainer.logger=console,wandb", "trainer.logger=[console,wandb]"),
        ("data.val_files=nowhere.parquet", "file"),
        ("trainer.total_training_steps:", "key=value"),
        ("trainer.default_local_dir", "'nowhere'"),
    ):
        (line,) = (line for line in lines if parts[0] in line)
        says(line, *parts)


def test_rules_keep_quiet_about_keys_that_are_wrong_themselves():
    message = refused("data.train_bach_size=48", f"{ACTOR}.ppo_mini_batch_size=48")
    assert message.count("\n") == 1
    assert "multiple" not in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model=qwen3_8", "hf, qwen3_0_6b, qwen3_1_7b, qwen3_8b, smollm2_135m, tiny;"),
        ("model@actor=tiny", "(@)"),
        ("~trainer.seed", "~trainer.seed:"),
        ("trainer.seed=[1", "trainer.seed=[1:"),
        ("trainer.seed=1,2", "sweep"),
        ("trainer=3", "total_epochs, total_training_steps,"),
        ("actor_rollout_ref=x", "model, actor, rollout, ref"),
        ("--multirun", "--help"),
        ("", "'':"),
        ("hydra.run.dir=x", "hydra.run.dir:"),
        ("model=hf", "actor_rollout_ref.model.path="),
        ("data=files", "data.train_files="),
        ("trainer.logger.0=x", "trainer.logger.0:"),
    ],
)
def test_command_line_mistakes(override, part):
    message = refused(override)
    says(message, part)
    assert "Traceback" not in message


def test_the_last_of_two_counts(model_folder):
    config, notes = load_config(["trainer.seed=1", "model=qwen3_8b", "trainer.seed=2", "model=smollm2_135m"])
    assert config.trainer.seed == 2
    assert config.actor_rollout_ref.model.path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    says(notes, "model=qwen3_8b", "model=smollm2_135m")


@pytest.mark.parametrize("first", [["recipe=gspo"], ["+cluster=cpu", "+cluster=cpu"], [("recipe", "gspo")]])
def test_the_same_option_twice_is_no_contradiction(first):
    assert load_config([*first, *first]) == load_config(first)


@pytest.mark.parametrize("group", ["model=tiny model=hf", "cluster=cpu +cluster=node8", "data=gsm8k data=arithmetic"])
def test_of_two_options_of_a_group_the_one_without_effect_is_named(group, model_folder):
    given = f"actor_rollout_ref.model.path={model_folder}"
    says(load_config([*group.split(), given])[1], *(each.lstrip("+") for each in group.split()))


@pytest.mark.parametrize(
    "given",
    [
        ["+recipe=dapo", "+recipe=gspo"],
        ["recipe=dapo", "+recipe=gspo"],
        ["recipe=dapo", "trainer.seed=1", "recipe=gspo"],
        [("recipe", "dapo"), ("+recipe", "gspo")],
    ],
)
def test_two_recipes_are_not_combined(given):
    with refuses(ConfigError, "recipe=dapo", "recipe=gspo"):
        load_config(given)


def test_free_form_mappings_take_any_name():
    config = load(
        "data.apply_chat_template_kwargs.enable_thinking=false",
        "+data.apply_chat_template_kwargs.depth.of=3",
        "custom_reward_function.reward_kwargs={weight: 0.5}",
    )
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "depth": {"of": 3}}
    assert config.custom_reward_function.reward_kwargs == {"weight": 0.5}


def test_plus_in_front_of_a_known_key_sets_it():
    assert load("+trainer.seed=5").trainer.seed == 5
    assert load("++trainer={seed: 6}").trainer.seed == 6


def test_your_own_model_leaves_the_tiny_settings_behind(model_folder):
    config, notes = load_config([f"actor_rollout_ref.model.path={model_folder}"])
    assert config.actor_rollout_ref.model.path == str(model_folder)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.rollout.kv_cache_memory_gib is None
    says(notes, "model=hf")


def test_a_chosen_model_group_stays(model_folder):
    config, notes = load_config([f"actor_rollout_ref.model.path={model_folder}", "model=smollm2_135m"])
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.actor_rollout_ref.model.path == str(model_folder)
    assert notes == []


def test_naming_the_builtin_model_changes_nothing():
    assert load("actor_rollout_ref.model.path=builtin:tiny-qwen3") == load()


def test_your_own_data_leaves_the_arithmetic_settings_behind(parquet):
    config, notes = load_config([f"data.train_files={parquet}", "model=qwen3_0_6b", "cluster=node8"])
    assert (config.data.train_batch_size, config.data.max_response_length) == (1024, 1024)
    assert config.data.val_files == ()
    assert config.trainer.total_training_steps is None
    says(notes, "data=files")
    chosen = load(f"data.train_files={parquet}", "data=arithmetic")
    assert chosen.data.max_response_length == 64


def sizes(config):
    data = config.data
    return data.train_batch_size, data.max_prompt_length, data.max_response_length


MINI = f"{ACTOR}.ppo_mini_batch_size"


def test_defaults_for_own_data_fit_the_machine_and_the_model(parquet, model_folder):
    """On CPU and for the built-in model they are moderate; on machines with GPUs they are verl's."""
    own = f"data.train_files={parquet}"
    model = f"actor_rollout_ref.model.path={model_folder}"
    for overrides in ([own], [own, model], [own, model, "trainer.n_gpus_per_node=0"], [own, "cluster=single_gpu"]):
        assert sizes(load(*overrides)) == (32, 256, 256)
    for machine in ("cluster=node8", "cluster=single_gpu", "trainer.n_gpus_per_node=4", "cluster=multi_node"):
        assert sizes(load(own, model, machine)) == (1024, 512, 1024)
    config, notes = load_config([own, model, "trainer.n_gpus_per_node=4"])
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (4, 1)
    says(notes, "cluster=node8", "trainer.n_gpus_per_node")
    assert sizes(load("data.max_response_length=32", own)) == (32, 256, 32)


@pytest.mark.parametrize("batch", [4, 32])
def test_a_mini_batch_is_the_batch_unless_it_is_set(batch):
    size = f"data.train_batch_size={batch}"
    for overrides in ([size], [size, f"{MINI}=null"], [size, "recipe=ppo", "critic.ppo_mini_batch_size=null"]):
        config = load(*overrides)
        assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == batch
        assert config.on_policy == ("recipe=ppo" not in overrides)
    assert load(size, f"{MINI}=2").critic.ppo_mini_batch_size == 2
    assert refused("data.train_batch_size=0").count("\n") == 1, "said once"


def test_missing_files_stop_a_run_and_a_dry_run_of_this_machine_but_not_one_of_the_config():
    overrides = ["model=qwen3_8b", "data=gsm8k", "cluster=node8", "data.train_files=gone.parquet"]
    says(refused(*overrides), "data.train_files=gone.parquet", Path.cwd())
    says(refused(*overrides, "trainer.dry_run=true"), "data.train_files=gone.parquet", Path.cwd())
    config, notes = load_config([*overrides, "trainer.dry_run=config"])
    assert config.trainer.n_gpus_per_node == 8
    says(notes, "here", "data.train_files=gone.parquet")


def test_round_trip():
    config = load(f"{ACTOR}.optim.lr=3e-7", "trainer.experiment_name='0123'", "trainer.logger=[]")
    text = readable_config(config)
    assert read_back(text) == config
    assert read_back(text).trainer.experiment_name == "0123"
    assert read_back(text).actor_rollout_ref.actor.optim.lr == 3e-7
    assert "${" not in text


def test_a_config_of_an_older_version_has_the_defaults_of_what_is_new():
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


def test_the_check_loads_no_heavy_module():
    code = """
import sys
from grpo_dist.config import command
from grpo_dist.plan import plan
from grpo_dist.plan.commands import load_config
load_config(["model=smollm2_135m"])
print([name for name in ("torch", "ray", "vllm", "transformers", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_usage_names_groups_examples_and_the_place_of_the_keys():
    text = usage(GRPO)
    for part in ("* model=tiny", "model=qwen3_8b", "cluster=single_gpu", "trainer.dry_run=true", "grpo.yaml"):
        assert part in text
    assert text.count("grpo-dist train") == 7


def test_a_long_mapping_may_have_line_breaks():
    config = load(
        "custom_reward_function.path=grpo_dist.rewards.format", "custom_reward_function.reward_kwargs={a: 1,\n  b: 2}"
    )
    assert config.custom_reward_function.reward_kwargs == {"a": 1, "b": 2}


def test_a_saved_config_with_another_model_of_ones_own() -> None:
    """The group that such a key selects leaves it open; what copies it follows."""
    config = with_overrides({}, ["actor_rollout_ref.model.path=mine"], GRPO)
    assert config.actor_rollout_ref.model.path == config.reward_model.model.input_tokenizer == "mine"


def test_a_group_that_leaves_open_what_the_run_has_saved() -> None:
    saved = load("actor_rollout_ref.model.path=mine", "trainer.dry_run=config").model_dump(mode="json")
    assert with_overrides(saved, ["model=hf"], GRPO).actor_rollout_ref.model.path == "mine"


def test_infinity_is_written_as_itself() -> None:
    config = load("actor_rollout_ref.model.override_config.scale=-inf")
    assert read_back(readable_config(config)).actor_rollout_ref.model.override_config == {"scale": float("-inf")}
