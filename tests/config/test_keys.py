"""verl's scripts run with the module name changed: keys of ours, renamed ones, ones without effect, refused ones."""

from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import keys
from grpo_dist.config.field_types import Resume
from grpo_dist.config.keys import ELSEWHERE, FOREIGN_KEYS, RENAMED, foreign_key, is_free_form, leaf_keys, resume_mark
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT, load_config
from scripts.verl_defaults import defaults
from tests.config.refusals import problems, refused
from tests.messages import refuses, says

# Keys of 75 GRPO-like example scripts of verl 0.9.1, most used first.
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
TABLE = Path(__file__).parents[1] / "golden/verl_grpo_keys.tsv"
USED = [line.split("\t")[0] for line in TABLE.read_text().splitlines()[1:]]


def is_known(key: str) -> bool:
    return key in leaf_keys() or key in keys.section_keys() or is_free_form(key)


def notes(*overrides: str) -> list[str]:
    return load_config([*overrides, "trainer.dry_run=config"])[1]


def test_every_key_and_default_of_verl_has_an_answer(tmp_path: Path) -> None:
    """The 37 most used ones have an effect; none is both ours and foreign."""
    assert [key for key in USED if not (is_known(key) or key in RENAMED or foreign_key(key))] == []
    assert all(is_known(key) for key in [*USED[:37], *RENAMED.values()])
    assert not set(leaf_keys()) & {*FOREIGN_KEYS, *RENAMED}
    # All of verl's keys that are none here, on one line; and the nulls of those that are, on another.
    theirs = {key: value for key, value in keys.verl_defaults().items() if not (is_known(key) or key in RENAMED)}
    said = [note for note in load_config([*theirs.items()])[1] if note.startswith("no effect here: ")]
    assert len(said) == len(theirs) > 650
    nulls = [key for key, value in keys.verl_defaults().items() if value is None and key not in theirs]
    notes(*(f"{key}=null" for key in nulls))
    (file := tmp_path / "verl/trainer/config/ppo_trainer.yaml").parent.mkdir(parents=True)
    file.write_text("data: {length: 512, kwargs: {}}\nactor: {length: '${data.length}'}\n")
    assert dict(defaults(tmp_path)) == {"data.length": 512, "data.kwargs": {}, "actor.length": 512}


def test_names_and_values_of_verl_take_effect() -> None:
    given = (
        f"{ACTOR}.optim.lr_scheduler_type=cosine {ACTOR}.optim.warmup_style=null {ACTOR}.optim.clip_grad=0.5 "
        "algorithm.adv_estimator=rloo_vectorized trainer.logger=[console,file,swanlab,jsonl] reward_model.enable=null "
        f"custom_reward_function.name=mine custom_reward_function.name=null {ACTOR}.policy_loss.tau_pos=0.5 "
        f"reward.reward_model.model_path=org/judge {MODEL}.lora_alpha=0"
    )
    config, _ = load_config([*given.split(), "trainer.dry_run=config"])
    actor = config.actor_rollout_ref.actor
    assert (actor.optim.lr_scheduler_type, actor.grad_clip, actor.tau_pos) == ("cosine", 0.5, 0.5)
    assert (config.algorithm.adv_estimator, config.trainer.logger) == ("rloo", ("console", "jsonl"))
    assert (config.custom_reward_function.name, config.reward_model.model.path) == ("compute_score", "org/judge")
    says(refused(f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=0"), f"{MODEL}.lora_alpha=0", "lora_rank=8")


def test_settings_of_the_optimizer_by_name_are_those_without_a_key() -> None:
    key = f"{ACTOR}.optim.override_optimizer_config"
    config, _ = load_config([f"{key}.eps=1e-6", "trainer.dry_run=config"])
    assert config.actor_rollout_ref.actor.optim.override_optimizer_config == {"eps": 1e-6}
    says(refused(f"{key}={{eps:1e-6,lr:1,betas:[0.9,0.99]}}"), key, "lr, betas", "key")
    with refuses(ConfigError, "optim.override_optimizer_config", "clip_grad"):
        load_command(["optim.override_optimizer_config.clip_grad=1", "data.train_files=x"], SFT)


def test_keys_that_are_given_twice() -> None:
    notes(f"{ACTOR}.strategy=megatron", f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.tau_pos=2", f"{ACTOR}.tau_pos=1")
    says(refused(f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.strategy=megatron"), f"{ACTOR}.strategy=megatron", "fsdp2")
    pair = [f"{ACTOR}.grad_clip=1", f"{ACTOR}.optim.clip_grad=0.5"]
    assert all(says(refused(*line), *pair) is None for line in (pair, pair[::-1]))
    # Without data.max_prompt_length both are verl's 512.
    copy, key = f"{ROLLOUT}.prompt_length", "data.max_prompt_length"
    assert f"no effect here: {copy}=512: {key} is what to set" in notes(f"{copy}=512")
    assert f"no effect here: {copy}=32: {key} is what to set" in notes(f"{copy}=32", f"{key}=32")
    says(refused(f"{copy}=2048"), f"{copy}=2048", key, "512")
    says(refused(f"{key}=32", f"{copy}=512"), f"{copy}=512", key, "32")


def test_a_renamed_key_takes_effect() -> None:
    key = "reward_model.reward_kwargs.overlong_buffer_cfg"
    config, said = load_config([f"+{key}.enable=true", f"+{key}.len=16", f"+{key}.penalty_factor=0.5"])
    buffer = config.reward.overlong_buffer
    assert (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 16, 0.5)
    says(said, f"{key}.len", "reward.overlong_buffer.len")
    config, said = load_config(["+global_profiler.steps=[2,5]", "+global_profiler.tool=nsys"])
    assert config.trainer.profile_steps == (2, 5)
    says(said, "global_profiler.tool", "trainer.profile_steps")


WITHOUT_A_MEANING = """
    trainer.max_critic_ckpt_to_keep=2 trainer.save_on_sigterm=true
    actor_rollout_ref.actor.strategy=fsdp2 +actor_rollout_ref.actor.profiler.enable=true
    actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim actor_rollout_ref.actor.fsdp_config.offload_policy=True
    critic.model.tokenizer_path=some/policy critic.model.lora_rank=0 critic.optim.optimizer_impl=torch.optim
    +critic.model.fsdp_config.wrap_policy.min_num_params=0
    reward_model.ulysses_sequence_parallel_size=1 reward_model.model.use_remove_padding=True
    reward_model.reward_manager=dapo
""".split()


@pytest.mark.parametrize("hdfs", ["null", "None"])
def test_keys_without_a_meaning_are_said_once(hdfs: str) -> None:
    executable = "ray_kwargs.ray_init.runtime_env.py_executable='uv -v run --frozen'"
    overrides = [*WITHOUT_A_MEANING, f"trainer.default_hdfs_dir={hdfs}", executable]
    said = [note for note in notes(*overrides) if note.startswith("no effect here: ")]
    assert len(said) == len(overrides)
    assert [override for override in overrides if not any(override.lstrip("+") in note for note in said)] == []


def test_every_key_of_others_is_refused_with_its_reason_and_what_it_may_be() -> None:
    given = {key.replace("*", "x"): entry for key, entry in FOREIGN_KEYS.items() if entry.refused or entry.only}
    found = problems(*(f"{key}=other" for key in given))
    assert len(found) == len(given) > 100
    for line, (key, entry) in zip(found, given.items(), strict=True):
        says(line, f"{key}=other", *([" or ".join(entry.only)] if entry.only else []))
        assert line.endswith(entry.why)


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        (f"{ROLLOUT}.name=sglang", "vllm"),
        (f"{ROLLOUT}.checkpoint_engine.backend=nixl", "object_store, broadcast, ipc"),
        (f"{ROLLOUT}.logprobs_mode=raw_logprobs", "processed_logprobs"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "strategy=fsdp2"),
        ("trainer.logger=swanlab", "jsonl"),
        ("trainer.save_on_sigterm=false", "true"),
        ("critic.model.lora_rank=8", "0"),
        ("reward_model.ulysses_sequence_parallel_size=4", "1"),
        ("--config-name=ppo_megatron_trainer.yaml", "out"),
    ],
)
def test_what_is_not_here_is_refused_by_name(override: str, advice: str) -> None:
    says(refused(override), override, advice)


def test_every_name_of_other_libraries_is_answered_with_what_to_write() -> None:
    found, of_ours = problems(*(f"{name}=1" for name in ELSEWHERE)), set[str]()
    assert len(found) == len(ELSEWHERE) > 100
    for line, (name, entry) in zip(found, ELSEWHERE.items(), strict=True):
        assert line.startswith(f"{name}: no such key; ")
        here = [each for each in entry.write if each.partition("=")[0] in leaf_keys()]
        assert ("did you mean" in line) == bool(entry.write)
        assert f"did you mean {here[0]}?" in line if here else entry.write or line.endswith(entry.why)
        of_ours |= {name} if here else set()
    known = {key for command in (GRPO, REWARD_MODEL, SFT) for key in leaf_keys(command.schema)}
    assert {each.partition("=")[0] for entry in ELSEWHERE.values() for each in entry.write} <= known
    assert all(entry.write or entry.why for entry in ELSEWHERE.values())
    assert not {key.partition(".")[2] for key in leaf_keys()} & of_ours
    for typed, meant in (("trainer.project=x", "trainer.project_name"), ("rollout.tp=2", f"{ROLLOUT}.tensor_model")):
        assert f"did you mean {meant}" in refused(typed), "what is alike, and by the last part"


def test_a_command_is_told_of_its_own_keys_and_the_longest_section_answers() -> None:
    for command in (SFT, REWARD_MODEL):
        with refuses(ConfigError, "pretrain", "model.path", "bf16", "engine.dtype=bf16"):
            load_command(["pretrain=x", "bf16=true"], command)
    with refuses(ConfigError, "lora", "model.lora_rank=32"):
        load_command(["lora=true"], SFT)
    assert foreign_key("actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype") is not None
    assert foreign_key("critic.checkpoint.save_contents") is FOREIGN_KEYS["critic.checkpoint.*"]
    assert foreign_key("critic.megatron.x") is FOREIGN_KEYS["critic.megatron.*"]
    assert foreign_key("data.train_batch_size") is None


# --- whole scripts ---------------------------------------------------------------------------------------------------
# By script a table of overrides: a section, and what is set below it. "grpo" has the 37 most used keys, as a script on
# Qwen3-8B and GSM8K sets them; the others come behind these.
SCRIPTS = {
    "grpo": """
        algorithm adv_estimator=grpo use_kl_in_reward=False
        data train_files=/data/gsm8k/train.parquet val_files=/data/gsm8k/test.parquet train_batch_size=1024
        data max_prompt_length=512 max_response_length=1024 filter_overlong_prompts=True truncation='error'
        actor_rollout_ref.model path=Qwen/Qwen3-8B use_remove_padding=True enable_gradient_checkpointing=True
        actor_rollout_ref.actor optim.lr=1e-6 ppo_mini_batch_size=256 ppo_micro_batch_size_per_gpu=32 use_kl_loss=True
        actor_rollout_ref.actor kl_loss_coef=0.001 kl_loss_type=low_var_kl entropy_coeff=0
        actor_rollout_ref.actor.fsdp_config param_offload=False optimizer_offload=False
        actor_rollout_ref.rollout name=vllm n=5 tensor_model_parallel_size=2 gpu_memory_utilization=0.6
        actor_rollout_ref.rollout log_prob_micro_batch_size_per_gpu=32
        actor_rollout_ref.ref log_prob_micro_batch_size_per_gpu=32 fsdp_config.param_offload=True
        trainer critic_warmup=0 logger=["console","wandb"] n_gpus_per_node=8 nnodes=1 save_freq=20 test_freq=5
        trainer total_epochs=15 project_name='verl_grpo_example_gsm8k' experiment_name='qwen3_8b_function_rm'
    """,
    "remax": """
        algorithm adv_estimator=remax use_kl_in_reward=True kl_penalty=kl kl_ctrl.kl_coef=0.001
        actor_rollout_ref.actor use_kl_loss=False ppo_micro_batch_size=80 loss_agg_mode=token-mean kl_loss_type=mse
        actor_rollout_ref.actor policy_loss.loss_mode=gpg strategy=fsdp2 use_torch_compile=False
        actor_rollout_ref.rollout n=4 temperature=0.8 log_prob_micro_batch_size=160 load_format=safetensors
        actor_rollout_ref.rollout enforce_eager=False free_cache_engine=True enable_chunked_prefill=False
        actor_rollout_ref.ref log_prob_micro_batch_size=160 strategy=fsdp2
        +actor_rollout_ref.actor.profiler enable=False
        trainer balance_batch=True default_hdfs_dir=null
    """,
    "dapo": """
        data prompt_key=prompt truncation='left' max_prompt_length=2048 max_response_length=20480 gen_batch_size=1536
        data train_batch_size=512
        algorithm kl_ctrl.kl_coef=0.0
        algorithm.filter_groups enable=True max_num_gen_batches=10 metric=acc
        actor_rollout_ref.actor use_kl_loss=False kl_loss_coef=0.0 clip_ratio_low=0.2 clip_ratio_high=0.28
        actor_rollout_ref.actor clip_ratio_c=10.0 use_dynamic_bsz=True ppo_max_token_len_per_gpu=22528
        actor_rollout_ref.actor ppo_mini_batch_size=32 grad_clip=1.0 loss_agg_mode=token-mean
        actor_rollout_ref.actor ulysses_sequence_parallel_size=1 fsdp_config.fsdp_size=-1
        actor_rollout_ref.actor.optim lr_warmup_steps=10 weight_decay=0.1
        actor_rollout_ref.ref log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=22528
        +actor_rollout_ref.model.override_config attention_dropout=0. embd_pdrop=0. resid_pdrop=0.
        actor_rollout_ref.rollout n=16 log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=22528
        actor_rollout_ref.rollout enable_chunked_prefill=True max_num_batched_tokens=22528
        actor_rollout_ref.rollout temperature=1.0 top_p=1.0 top_k=-1
        actor_rollout_ref.rollout.val_kwargs temperature=1.0 top_p=0.7 top_k=-1 do_sample=True n=1
        reward_model reward_manager=dapo
        +reward_model.reward_kwargs.overlong_buffer_cfg enable=True len=4096 penalty_factor=1.0 log=False
        +reward_model.reward_kwargs max_resp_len=20480
        trainer val_before_train=True resume_mode=auto log_val_generations=10 total_training_steps=200
        trainer default_local_dir=/tmp/ckpts/DAPO
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_overrides_pass(name: str) -> None:
    table = (line.split() for text in dict.fromkeys(("grpo", name)) for line in SCRIPTS[text].strip().splitlines())
    overrides = [f"{section}.{each}" for section, *given in table for each in given]
    config, notes = load_config([*overrides, "trainer.dry_run=config"])
    assert config.algorithm.adv_estimator == ("grpo" if name == "dapo" else name)
    assert (config.data.train_files, config.num_gpus) == (("/data/gsm8k/train.parquet",), 8)
    if name == "dapo":
        assert (config.data.gen_batch_size, config.reward.overlong_buffer.len) == (1536, 4096)
        assert config.algorithm.filter_groups.enable
        assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28
        assert not config.needs_reference
        silent = [note for note in notes if note.startswith("no effect here")]
        assert len(silent) == 3, silent


# --- what a checkpoint does with another value of each key ------------------------------------------------------------
def test_a_key_that_the_schema_no_longer_has_is_part_of_the_experiment() -> None:
    assert resume_mark("actor_rollout_ref.actor.gone", RunConfig) is None
    assert resume_mark("cluster.gone", RunConfig) == Resume.FREE


# By command the beginnings of keys that decide what is trained. What is refused, shown or told of each by a checkpoint:
# tests/trainer/checkpoint/test_config_changes.py.
GRPOS = """
    algorithm.adv algorithm.norm algorithm.gamma algorithm.lam algorithm.gdpo algorithm.kl algorithm.use
    algorithm.rollout algorithm.mask algorithm.min custom_reward_function reward.overlong_buffer
    actor_rollout_ref.actor.optim actor_rollout_ref.actor.policy_loss actor_rollout_ref.actor.clip
    actor_rollout_ref.actor.kl_loss actor_rollout_ref.actor.loss actor_rollout_ref.actor.entropy
    actor_rollout_ref.actor.ppo_epochs actor_rollout_ref.actor.router_replay. actor_rollout_ref.rollout.n
    actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.top_ actor_rollout_ref.rollout.min_
    actor_rollout_ref.rollout.stop actor_rollout_ref.rollout.agent.agent_kwargs actor_rollout_ref.model.lora_rank
    actor_rollout_ref.model.path critic.model.path critic.optim critic.cliprange_value reward_model.max_length
    reward_model.retrain.optim. trainer.max_staleness trainer.critic_warmup trainer.seed data.seed data.shuffle
    data.train_batch_size data.max_ data.prompt data.system_prompt data.apply_chat_template data.sampler.
    data.curriculum.exploration data.curriculum.decay data.curriculum.max_pass_rate
"""
DEFINING = [
    (GRPO, GRPOS),
    (SFT, "model.lora_rank optim data.train_batch_size data.max_length data.messages_key data.apply_chat_template"),
    (REWARD_MODEL, "model.path optim data.train_batch_size data.max_length data.step_ trainer.seed data.shuffle"),
]


@pytest.mark.parametrize(("command", "starts"), DEFINING, ids=["grpo", "sft", "reward_model"])
def test_no_key_that_decides_what_is_trained_is_marked_as_free(command: Any, starts: str) -> None:
    marks = {key: resume_mark(key, command.schema) for key in leaf_keys(command.schema)}
    lengths = {key for key, mark in marks.items() if mark == Resume.LENGTH}
    assert lengths == {"trainer.total_epochs", "trainer.total_training_steps"}
    assert all(mark.why for mark in marks.values() if mark and mark.kind == "refused")
    for start in starts.split():
        assert {key for key in marks if key.startswith(start)}, start
        assert [key for key, mark in marks.items() if key.startswith(start) and mark == Resume.FREE] == []
