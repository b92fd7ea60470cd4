"""Tests of the changes of the config that a checkpoint survives."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.data import Prompt
from grpo_dist.errors import CheckpointError
from grpo_dist.plan.commands import REWARD_MODEL, load_config
from grpo_dist.trainer.checkpoint import config_changes
from grpo_dist.trainer.checkpoint.config_changes import (
    Changes,
    check_changes,
    digest_code,
    identify_prompts,
    saved_config,
)
from grpo_dist.trainer.checkpoint.folder import RunState
from tests.adapters import write_adapter
from tests.messages import refuses, says


@functools.cache
def config(*overrides: str) -> RunConfig:
    return load_config(list(overrides))[0]


compare_configs = functools.partial(config_changes.compare_configs, schema=RunConfig)


def as_dict(*overrides: str) -> dict[str, Any]:
    return yaml.safe_load(saved_config(config(*overrides)))


def changed(before: tuple[str, ...], after: tuple[str, ...]) -> Changes:
    return compare_configs(as_dict(*before), as_dict(*after))


OPTIM, FSDP = "actor_rollout_ref.actor.optim", "actor_rollout_ref.actor.fsdp_config"
MODEL = "actor_rollout_ref.model"
HARMLESS = (
    "trainer.default_local_dir=/elsewhere trainer.logger=[] trainer.console=false trainer.total_training_steps=77 "
    "trainer.save_freq=1 trainer.save_interval_minutes=5 trainer.halve_on_out_of_memory=true "
    "algorithm.filter_groups.max_num_gen_batches=9 data.train_max_samples=1000 trainer.keep_best_metric=val-core/x "
    "trainer.profile_steps=[3,4] cluster.actor_world_size=1 ray_kwargs.ray_init.num_cpus=3 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.actor.checkpoint.async_save=false "
    "actor_rollout_ref.rollout.max_num_seqs=7"
)


def test_harmless_changes_say_nothing() -> None:
    idle = ("data.seed=1", "actor_rollout_ref.model.lora_alpha=3")  # what null means here; without a rank
    assert changed((), (*HARMLESS.split(), *idle)) == Changes()


def test_where_the_factors_began_does_not_matter_to_a_checkpoint_that_has_them(tmp_path: Path) -> None:
    before = as_dict(f"{MODEL}.lora_adapter_path={write_adapter(tmp_path)}")
    same = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.target_modules=[o_proj,q_proj]")
    assert compare_configs(before, as_dict(*same)) == Changes()
    says(compare_configs(before, as_dict(*same, f"{MODEL}.lora_rank=2")).refused, f"{MODEL}.lora_rank: 4 -> 2")


ANOTHER = (
    "algorithm.norm_adv_by_std_in_grpo=false algorithm.kl_ctrl.kl_coef=0.5 data.train_batch_size=512 "
    "data.max_response_length=99 data.system_prompt=hello actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
    "actor_rollout_ref.actor.kl_loss_coef=0.5 actor_rollout_ref.rollout.temperature=0.5 "
    "+actor_rollout_ref.rollout.agent.agent_kwargs.tries=3 +custom_reward_function.reward_kwargs.weight=2 "
    "reward.overlong_buffer.enable=true"
)


def test_method_data_loss_reward_and_sampling_define_the_experiment() -> None:
    overrides = tuple(ANOTHER.split())
    lines = changed((), overrides).experiment
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        says(lines, f"{key}:", value)
    assert len(lines) == len(overrides) + 1, "a mini-batch is the batch unless it is set"


ROLLOUT, TEACHER = "actor_rollout_ref.rollout", "actor_rollout_ref.ref.model"
SCORER = "reward_model.model.path=builtin:tiny-qwen3"
SCORED = ("reward_model.enable=true", SCORER)
PPO = ("recipe=ppo",)
COSINE, CRITICS = (f"{OPTIM}.lr_scheduler_type=cosine",), (*PPO, "critic.optim.lr_scheduler_type=cosine")
CRITIC_COMPUTES = ("critic.ppo_micro_batch_size_per_gpu=1", "critic.model.fsdp_config.param_offload=true")
SCORER_COMPUTES = ("reward_model.micro_batch_size_per_gpu=1", "reward_model.model.fsdp_config.param_offload=true")
AWAY = ("recipe=distill", f"{TEACHER}.endpoint.base_url=http://teacher/v1", f"{TEACHER}.endpoint.model=big")
TEACHERS = tuple((f"{TEACHER}.path={{{teachers}}}",) for teachers in ("a: x, b: y", "b: y, a: x", "a: y, b: x"))
ROPE = f"+{TEACHER}.override_config.rope_theta=5"


@pytest.mark.parametrize(
    ("before", "more", "lines"),
    [
        ((f"{OPTIM}.lr=1e-6",), (f"{OPTIM}.lr=2e-6", f"{ROLLOUT}.n=4", "trainer.max_staleness=2"),
         [f"{OPTIM}.lr: 1e-06 -> 2e-06", f"{ROLLOUT}.n: 8 -> 4", "trainer.max_staleness: 0 -> 2"]),
        # a reward model is told, and how it computes is not; none of its keys has an effect while it is not enabled
        (SCORED, SCORER_COMPUTES, []),
        (SCORED, ("reward_model.max_length=100",), ["reward_model.max_length: null -> 100"]),
        ((), (SCORER,), []),
        # the policy's weights are of use with any teacher; without one its other keys have no effect
        ((), (f"{TEACHER}.path=builtin:tiny-qwen3", ROPE, f"{TEACHER}.trust_remote_code=true"),
         [f"{TEACHER}.{line}" for line in ("path: (not set) -> builtin:tiny-qwen3",
                                           "override_config.rope_theta: (not set) -> 5")]),
        ((), (ROPE, f"{TEACHER}.endpoint.model=big"), []),
        (TEACHERS[0], TEACHERS[1], []),  # a source is the same, wherever it stands
        (TEACHERS[0], TEACHERS[2], [f"{TEACHER}.path.a: x -> y", f"{TEACHER}.path.b: y -> x"]),
        (TEACHERS[0], (f"{TEACHER}.path=null",), [f"{TEACHER}.path.{each} -> (not set)" for each in ("a: x", "b: y")]),
        ((), TEACHERS[0], [f"{TEACHER}.path.{source}" for source in ("a: (not set) -> x", "b: (not set) -> y")]),
        (AWAY, (f"{TEACHER}.endpoint.base_url=http://other/v1",), []),  # an address changes no result
        (AWAY, (f"{TEACHER}.endpoint.model=bigger",), [f"{TEACHER}.endpoint.model: big -> bigger"]),
        # likewise a critic
        (PPO, CRITIC_COMPUTES, []),
        (PPO, ("critic.cliprange_value=0.2", "trainer.critic_warmup=2"),
         ["critic.cliprange_value: 0.5 -> 0.2", "trainer.critic_warmup: 0 -> 2"]),
        ((), ("critic.optim.lr=1e-4",), []),
    ],
)  # fmt: skip
def test_what_is_another_experiment_is_told_as_old_and_new(before: tuple, more: tuple, lines: list[str]) -> None:
    found = changed(before, (*before, *more))
    assert replace(found, experiment=sorted(found.experiment)) == Changes(experiment=sorted(lines))


BLOCKS, STEPS = f"{ROLLOUT}.engine_kwargs.vllm.block_size", "trainer.total_training_steps"


@pytest.mark.parametrize(
    ("before", "more", "line"),
    [
        ((), f"+{BLOCKS}=32", f"{BLOCKS}: (not set) -> 32"),
        ((), f"{ROLLOUT}.max_model_len=200", f"{ROLLOUT}.max_model_len: null -> 200"),
        *(((*rate, f"{STEPS}=30"), f"{STEPS}=9", f"{STEPS}: 30 -> 9") for rate in (COSINE, CRITICS)),
    ],
)
def test_how_the_engine_computes_and_the_length_of_a_schedule_are_shown(before: tuple, more: str, line: str) -> None:
    assert changed(before, (*before, more)) == Changes(shown=[line])


def test_what_null_means_on_another_machine_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of GPUs is without effect on results; the types that follow from it are not."""
    model = "model=hf", "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B"
    types = [
        "actor_rollout_ref.actor.fsdp_config.dtype: fp32 -> bf16",
        "actor_rollout_ref.rollout.dtype: float32 -> bfloat16",
        "actor_rollout_ref.ref.fsdp_config.dtype: fp32 -> bf16",
    ]
    before, on_gpus = as_dict(*model), as_dict(*model, "trainer.n_gpus_per_node=4")
    deterministic = "actor_rollout_ref.rollout.deterministic: true -> false"
    assert compare_configs(before, on_gpus) == Changes(shown=[*types[:2], deterministic, types[2]])
    monkeypatch.setattr("grpo_dist.config.schema_job.has_bf16", lambda: True)
    assert compare_configs(before, as_dict(*model)) == Changes(shown=types)


def test_what_makes_a_checkpoint_meaningless_is_refused() -> None:
    seeds = ("trainer.seed=2", "data.seed=9", "data.shuffle=false")
    weights = (f"{MODEL}.lora_rank=4", f"{FSDP}.model_dtype=bf16", f"+{MODEL}.override_config.attention_dropout=0.5")
    refused = changed((), (*seeds, *weights, "recipe=ppo")).refused
    says(refused, "trainer.seed: 1 -> 2", "drawn", "order")
    says(refused, "data.seed: 1 -> 9", "order")
    says(refused, "data.shuffle: true -> false", "position")
    says(refused, f"{MODEL}.lora_rank: 0 -> 4", "factors")
    says(refused, f"{FSDP}.model_dtype: fp32 -> bf16", "optimizer states")
    says(refused, f"{MODEL}.override_config.attention_dropout: (not set) -> 0.5", "weights")
    says(refused, "critic.enable: (not set) -> true")


def test_another_model_is_refused_and_another_reward_model_only_where_it_trains() -> None:
    """One that is frozen is a part of the experiment; the weights of one that is retrained are in the checkpoint."""
    old = as_dict()
    old["actor_rollout_ref"]["model"]["path"] = "other/model"
    (told,) = compare_configs(old, as_dict()).refused
    says(told, "actor_rollout_ref.model.path: other/model -> builtin:tiny-qwen3", "another model")

    def scored_by(path: str, freq: int) -> dict[str, Any]:
        return {"reward_model": {"enable": True, "model": {"path": path}, "retrain": {"freq": freq}}}

    line = "reward_model.model.path: a -> b"
    assert compare_configs(scored_by("a", -1), scored_by("b", -1)) == Changes(experiment=[line])
    says(compare_configs(scored_by("a", 2), scored_by("b", 2)).refused, line, "another model")
    iterative = ("recipe=deepseekmath_iterative", SCORER)
    rarer, smaller = (f"reward_model.retrain.{key}" for key in ("freq=3", "micro_batch_size_per_gpu=2"))
    says(changed(iterative, (*iterative, rarer)).refused, "reward_model.retrain.freq: 5 -> 3")
    assert changed(iterative, (*iterative, smaller)) == Changes()


# --- commands that train one model -----------------------------------------------------------------------------------
def test_what_a_checkpoint_of_these_commands_survives() -> None:
    meaningless = ["data.seed", "data.shuffle", "engine.model_dtype", "trainer.seed"]  # the first follows the last
    harmless = ("data.micro_batch_size_per_gpu=3", "cluster.world_size=1", "engine.fsdp_size=1")
    others = ("data.max_length=60", "optim.lr=1", "engine.dtype=bf16", "trainer.total_epochs=3")
    overrides = [*harmless, *others, "data.shuffle=false", "engine.model_dtype=bf16", "trainer.seed=7"]
    configs = (saved_config(load_command(given, REWARD_MODEL)[0]) for given in ([], overrides))
    found = config_changes.compare_configs(*map(yaml.safe_load, configs), REWARD_MODEL.schema)
    keys = [sorted(line.partition(":")[0] for line in part) for part in (found.refused, found.experiment, found.shown)]
    assert keys == [meaningless, ["data.max_length", "optim.lr"], ["engine.dtype", "trainer.total_epochs"]]


def test_the_saved_config_has_no_secrets() -> None:
    text = saved_config(config("+custom_reward_function.reward_kwargs.api_key=do-not-keep-this"))
    assert "do-not-keep-this" not in text
    assert yaml.safe_load(text)["custom_reward_function"]["reward_kwargs"] == {"api_key": "***"}


# --- prompts ---------------------------------------------------------------------------------------------------------
def prompts(*questions: str, system: str = "", truth: str = "1", source: str = "d", **more: Any) -> list[Any]:
    begin = [{"role": "system", "content": system}] if system else []
    conversations = [[*begin, {"role": "user", "content": question}] for question in questions]
    return [SimpleNamespace(prompt=Prompt(0, source, each, truth, {}, "", **more)) for each in conversations]


def test_prompts_are_known_by_what_they_ask_and_their_order() -> None:
    same = identify_prompts(prompts("a", "b"))
    assert same["count"] == 2
    assert identify_prompts(prompts("a", "b")) == same
    assert identify_prompts(prompts("a", "b", system="Be kind.")) == same, "positions mean the same rows"
    for other in (prompts("b", "a"), prompts("a", "c"), prompts("a", "b", truth="2"), prompts("a", "b", "c")):
        assert identify_prompts(other) != same
    old, new = (prompts("a", source=file, taken={"data.data_source": file}) for file in ("old", "new"))
    assert identify_prompts(old) == identify_prompts(new), "a file that stands for the source"
    # As in earlier checkpoints: blake2b, 16 bytes, of [data_source, messages, ground_truth] as JSON.
    text = json.dumps(["d", [{"role": "user", "content": "a"}], "1"]).encode()
    expected = {"count": 1, "fingerprint": hashlib.blake2b(text, digest_size=16).hexdigest()}
    assert identify_prompts(prompts("a")) == expected


def checked(tmp_path: Path, saved: str, now: str, *overrides: str) -> list[str]:
    """What is told of a run that goes on with other prompts, each a letter."""
    (tmp_path / "config.yaml").write_text(saved_config(config()))
    state = RunState(1, 1, {}, prompts=identify_prompts(prompts(*saved)))
    return check_changes(tmp_path, state, config(*overrides), identify_prompts(prompts(*now)), {})


def test_other_training_prompts_are_refused_and_all_keys_are_named(tmp_path: Path) -> None:
    assert checked(tmp_path, "ab", "ab", "data.train_files=builtin:arithmetic/test") == []
    with refuses(CheckpointError, "data.train_files: 2 -> 3", "positions"):
        checked(tmp_path, "ab", "abc")
    with refuses(CheckpointError, "data.train_files: 2", "order"):
        checked(tmp_path, "ab", "ba")
    told = ("trainer.seed: 1 -> 2", "data.shuffle: true -> false", "data.train_files: 1", f"{OPTIM}.lr: 0.0001 -> 1.0")
    with refuses(CheckpointError, *told, "undo", "trainer.resume_mode=disable", "trainer.resume_mode=force"):
        checked(tmp_path, "a", "b", "trainer.seed=2", "data.shuffle=false", f"{OPTIM}.lr=1")


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [((), "trainer.experiment_name"), (("trainer.default_local_dir=/elsewhere/mine",), "trainer.default_local_dir")],
)
def test_another_experiment_is_refused_with_the_ways_on(tmp_path: Path, overrides: tuple, remedy: str) -> None:
    with refuses(CheckpointError, f"{OPTIM}.lr: 0.0001 -> 2e-06", remedy, "trainer.resume_mode=force") as caught:
        checked(tmp_path, "a", "a", f"{OPTIM}.lr=2e-6", *overrides)
    assert "undo" not in str(caught.value), "nothing stands against these changes"


NAMED = "resume_mode=resume_path", "resume_from_path=/whoever/names/it/has/chosen/it"


@pytest.mark.parametrize("allowed", [("resume_mode=force",), ("val_only=true",), NAMED])
def test_another_experiment_goes_on_where_that_is_asked_for_or_nothing_is_trained(tmp_path: Path, allowed: Any) -> None:
    more = [f"trainer.{key}" for key in allowed]
    assert checked(tmp_path, "a", "a", f"{OPTIM}.lr=2e-6", *more) == [f"{OPTIM}.lr: 0.0001 -> 2e-06"]
    with refuses(CheckpointError, "actor_rollout_ref.model.lora_rank: 0 -> 4", "factors"):
        checked(tmp_path, "a", "a", "actor_rollout_ref.model.lora_rank=4", *more)


def test_keys_of_a_later_version_count_as_their_defaults(tmp_path: Path) -> None:
    old = as_dict()
    del old["algorithm"]["gamma"], old["trainer"]["critic_warmup"], old["actor_rollout_ref"]["rollout"]["min_p"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    state = RunState(1, 1, {})
    assert check_changes(tmp_path, state, config(), {}, {}) == []
    with refuses(CheckpointError, "algorithm.gamma: 1.0 -> 0.5"):
        check_changes(tmp_path, state, config("algorithm.gamma=0.5"), {}, {})
    (tmp_path / "config.yaml").write_text("a: [")
    with refuses(CheckpointError, "config.yaml", "read"):
        check_changes(tmp_path, state, config(), {}, {})


def resumed_with(tmp_path: Path, *overrides: str) -> Callable[..., list[str]]:
    """A checkpoint of a run; what is told of a config that goes on from it."""
    before = config(*overrides)
    (tmp_path / "config.yaml").write_text(saved_config(before))
    state = RunState(1, 1, {}, code=digest_code(before))

    def told(*now: str) -> list[str]:
        return check_changes(tmp_path, state, config(*now), {}, digest_code(config(*now)))

    return told


def test_code_that_was_edited_is_told(tmp_path: Path) -> None:
    """Files that the config names, alone or with an attribute; another file is a change of the key."""
    reward, loop, other = (tmp_path / name for name in ("reward.py", "loop.py", "other.py"))
    for file in (reward, loop, other):
        file.write_text("a = 1\n")
    keys = ["custom_reward_function.path", "actor_rollout_ref.rollout.agent.default_agent_loop"]
    named = f"{keys[0]}={reward}", f"{keys[1]}={loop}:Calculator"
    assert list(digest_code(config(*named))) == sorted(keys)
    told = resumed_with(tmp_path, *named)
    assert told(*named) == []
    reward.write_text("a = 2\n")
    (edited,) = told(*named)
    says(edited, f"{keys[0]}: {reward}", "edited")
    with refuses(CheckpointError, f"{keys[0]}: {reward} -> {other}"):
        told(f"{keys[0]}={other}", named[1])
    several = config(f"{keys[0]}=[{reward}:f,{{path: {other}:g, weight: 2}}]")
    before = digest_code(several)
    assert list(before) == keys[:1]
    other.write_text("a = 2\n")
    assert digest_code(several) != before, "every file of a list counts"


def test_an_edited_function_object_is_told_by_its_folder(tmp_path: Path) -> None:
    def named(digest: str, name: str = "score") -> str:
        file = tmp_path / "functions" / digest / f"{name}.pkl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return f"custom_reward_function.path={file}:{name}"

    told = resumed_with(tmp_path, named("0123456789ab"))
    assert told(named("0123456789ab")) == []
    (line,) = told(named("0123456789ac"))
    says(line, "custom_reward_function.path", "score.pkl", "edited")
    with refuses(CheckpointError, "custom_reward_function.path"):
        told(named("0123456789ac", "other"))
