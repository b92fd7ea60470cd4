"""verl's scripts run with the module name changed: keys of ours, renamed ones, ones without effect, refused ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config import keys
from grpo_dist.config.field_types import Resume
from grpo_dist.config.keys import FOREIGN_KEYS, RENAMED, foreign_key, is_free_form, leaf_keys, resume_mark, section_keys
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import GRPO, REWARD_MODEL, SFT, load_config
from scripts.verl_defaults import defaults
from tests.config.refusals import refused
from tests.messages import refuses, says

# Keys of 75 GRPO-like example scripts of verl 0.9.1, with how many scripts use each, most used first.
KEYS = [line.split("\t") for line in (Path(__file__).parents[1] / "golden/verl_grpo_keys.tsv").read_text().splitlines()]
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
USES = {key: int(count) for key, count, _ in KEYS[1:]}


def is_known(key: str) -> bool:
    return key in leaf_keys() or key in section_keys() or is_free_form(key)


def notes(*overrides: str) -> list[str]:
    return load_config([*overrides, "trainer.dry_run=config"])[1]


def test_every_key_and_default_of_verl_has_an_answer(tmp_path: Path) -> None:
    """The 37 most used ones have an effect; none is both ours and foreign."""
    assert [key for key in USES if not (is_known(key) or key in RENAMED or foreign_key(key))] == []
    assert all(is_known(key) for key in [*list(USES)[:37], *RENAMED.values()])
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
    """Of one name the last, as in verl; of two, verl has its own order, so other values are refused."""
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


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "strategy=fsdp2"),
        ("actor_rollout_ref.actor.strategy=megatron", "fsdp or fsdp2"),
        ("actor_rollout_ref.rollout.name=sglang", "vllm"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=nixl", "object_store, broadcast, ipc"),
        ("actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3", "engine_kwargs.vllm"),
        ("data.video_key=films", "text"),
        ("actor_rollout_ref.ref.fsdp_config.model_dtype=fp16", "fp32 or float32 or bf16 or bfloat16"),
        (f"{MODEL}.lora.rank=8", f"{MODEL}.lora_rank"),
        (f"{ROLLOUT}.do_sample=false", "val_kwargs.do_sample"),
        (f"{ROLLOUT}.n_gpus_per_node=4", "cluster.rollout_world_size"),
        (f"{ROLLOUT}.logprobs_mode=raw_logprobs", "processed_logprobs"),
        (f"{ROLLOUT}.multi_turn.max_assistant_turns=3", "rollout.agent.agent_kwargs"),
        ("reward.reward_manager.module.path=mine.py", "custom_reward_function.path"),
        ("trainer.v1.trainer_mode=separate_async", "trainer.max_staleness=K"),
        ("trainer.logger=swanlab", "jsonl"),
        ("ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO", "export"),
        ("reward_model.ulysses_sequence_parallel_size=4", "1"),
        ("reward_model.rollout.name=vllm", "http_reward"),
        ("critic.strategy=megatron", "fsdp or fsdp2"),
        ("critic.model.lora_rank=8", "0"),
        ("critic.megatron.x=1", "critic.strategy=fsdp2"),
        ("distillation.distillation_loss.loss_mode=k1", "actor_rollout_ref.ref.model.path"),
        ("reward_model.enable_resource_pool=true", "cluster.reward_model_world_size"),
        ("actor_rollout_ref.actor.optim.optimizer_impl=bitsandbytes.optim", "torch.optim or torchao.optim"),
        ("reward_model.reward_manager=mine", "naive or dapo or prime or batch"),
        ("trainer.save_on_sigterm=false", "true"),
        ("async_training.staleness_threshold=0.5", "trainer.max_staleness"),
        ("algorithm.rollout_is_threshold=2", "algorithm.rollout_correction.rollout_is_threshold"),
        ("data.custom_cls.path=mine.py", "verl's schema"),
        ("actor_rollout_ref.rollout.multi_turn.enable=true", "rollout.agent.default_agent_loop"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml", "rollout.agent.agent_kwargs.tools"),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml", "default_agent_loop"),
        ("--config-name=ppo_megatron_trainer.yaml", "out"),
    ],
)
def test_what_is_not_here_is_refused_by_name(override: str, advice: str) -> None:
    message = refused(override)
    says(message, override, advice)


LOGGER = "trainer.logger=[console,wandb]"
# What the message tells those to write who come from TRL, OpenRLHF or elsewhere <- what they have written.
TYPED = {
    "custom_reward_function.path=reward.py": "reward_funcs=[mine]",
    "custom_reward_function.weights": "reward_weights=[1,2]",
    "data.train_batch_size": "batch_size=64",
    "trainer.experiment_name": "run_name=first",
    f"{MODEL}.lora_rank=32": "lora=true peft_config=lora.json",
    f"{ROLLOUT}.n": "group_size=16 num_generations=16 n_samples_per_prompt=16",
    LOGGER: "wandb=true report_to=wandb",
    "data.train_files=rows.jsonl": "dataset=rows.jsonl train_dataset=rows.jsonl prompt_data=rows.jsonl",
    "data.val_files=rows.jsonl": "eval_dataset=rows.jsonl",
    f"{ACTOR}.fsdp_config.dtype=bf16": "bf16=true",
    f"{ACTOR}.optim.lr": "learning_rate=1e-6 actor_learning_rate=1e-6 actor.lr=1e-6",
    f"{ACTOR}.kl_loss_coef": "beta=0.04",
    f"{ACTOR}.clip_ratio_c": "delta=4",
    f"{ACTOR}.tau_pos": "sapo_temperature_pos=1",
    f"{ROLLOUT}.agent.max_assistant_turns": "max_tool_calling_iterations=3",
    f"{ROLLOUT}.val_kwargs.n": "num_generations_eval=8",
    "recipe=gspo": "importance_sampling_level=sequence",
    "data.seed": "data_seed=7",
    f"{ACTOR}.clip_ratio": "epsilon=0.2 eps_clip=0.2",
    "data.max_response_length": "max_completion_length=256 generate_max_len=256",
    "data.max_prompt_length": "max_prompt_length=256",
    f"{MODEL}.path": "pretrain=Qwen/Qwen3-0.6B model_name_or_path=Qwen/Qwen3-0.6B",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "per_device_train_batch_size=4 micro_train_batch_size=4",
    f"{ACTOR}.ppo_mini_batch_size": "gradient_accumulation_steps=4",
    f"{MODEL}.enable_gradient_checkpointing": "gradient_checkpointing=true",
    "trainer.total_epochs": "num_train_epochs=3 num_episodes=3",
    "trainer.total_training_steps": "max_steps=100",
    "trainer.default_local_dir": "output_dir=out",
    "trainer.save_freq": "save_steps=10",
    "out": "logging_steps=1",
    "vLLM": "use_vllm=true",
    "algorithm.adv_estimator": "advantage_estimator=rloo",
    "grpo_dist.rewards.http_reward": "remote_rm_url=http://here",
    "cluster.rollout_world_size": "vllm_num_engines=2",
    "algorithm.kl_ctrl.kl_coef": "init_kl_coef=0.01",
    "FSDP2": "zero_stage=3",
    "trainer.project_name": "trainer.project=mine",
    f"{ROLLOUT}.tensor_model_parallel_size": "rollout.tp=2",
}


@pytest.mark.parametrize(("typed", "meant"), [(each, meant) for meant in TYPED for each in TYPED[meant].split()])
def test_names_of_other_libraries_are_answered_with_what_to_write(typed: str, meant: str) -> None:
    message = refused(typed)
    says(message, typed.partition("=")[0], meant)
    assert ("did you mean" in message) == (not message.endswith("leave it out"))
    assert meant not in leaf_keys() or f"did you mean {meant}?" in message


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
    """But below a section whose keys are all free, it is free too."""
    assert resume_mark("actor_rollout_ref.actor.gone", RunConfig) is None
    assert resume_mark("cluster.gone", RunConfig) == Resume.FREE


ORDER = "trainer.seed data.seed data.shuffle"
LENGTH = {"trainer.total_epochs", "trainer.total_training_steps"}
LORA = "model.lora_rank model.lora_alpha model.target_modules model.exclude_modules"


def under(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


# By command: what a checkpoint refuses, what is only shown, and beginnings of keys of which none is free.
MARKED = [
    (
        GRPO,
        [
            ORDER,
            "data.sampler.class_path data.sampler.class_name data.curriculum.enable",
            under("actor_rollout_ref", f"{LORA} model.path model.override_config actor.fsdp_config.model_dtype"),
            under("reward_model", "model.path retrain.freq retrain.model_dtype"),
            under("critic", "enable model.path model.override_config model.fsdp_config.model_dtype"),
        ],
        [
            *(under(f"actor_rollout_ref.{role}.fsdp_config", "dtype use_torch_compile") for role in ("actor", "ref")),
            *(under(f"{model}.model.fsdp_config", "dtype use_torch_compile") for model in ("critic", "reward_model")),
            under("actor_rollout_ref", "model.lora.merge model.head_dtype actor.optim.optimizer"),
            under("actor_rollout_ref.rollout", "dtype deterministic max_model_len engine_kwargs agent.max_attempts"),
            "critic.optim.optimizer",
        ],
        [
            under("algorithm", "adv norm gamma lam gdpo kl use rollout mask min"),
            under("actor_rollout_ref.actor", "optim policy_loss clip kl_loss loss entropy ppo_epochs router_replay."),
            under("actor_rollout_ref.rollout", "n temperature top_ min_ stop agent.agent_kwargs"),
            "critic.optim critic.cliprange_value reward_model.max_length reward_model.retrain.optim.",
            "custom_reward_function reward.overlong_buffer trainer.max_staleness trainer.critic_warmup",
            under("data", "train_batch_size max_ prompt system_prompt apply_chat_template"),
            under("data.curriculum", "exploration decay max_pass_rate"),
        ],
    ),
    (
        SFT,
        [ORDER, LORA, "model.path model.override_config engine.model_dtype"],
        ["engine.dtype engine.use_torch_compile optim.optimizer"],
        ["optim data.train_batch_size data.max_length data.messages_key data.apply_chat_template"],
    ),
    (
        REWARD_MODEL,
        [ORDER, "model.path model.override_config engine.model_dtype"],
        ["engine.dtype engine.use_torch_compile optim.optimizer"],
        ["optim data.train_batch_size data.max_length data.step_"],
    ),
]


@pytest.mark.parametrize(("command", "refused", "shown", "defining"), MARKED, ids=["grpo", "sft", "reward_model"])
def test_the_marks_of_every_key(command: Any, refused: list[str], shown: list[str], defining: list[str]) -> None:
    """A key without a mark is part of the experiment; no key that decides what is trained is marked as free."""
    marks = {key: resume_mark(key, command.schema) for key in leaf_keys(command.schema)}
    kinds = {kind: {key for key, mark in marks.items() if mark and mark.kind == kind} for kind in ("refused", "shown")}
    assert kinds == {"refused": {*" ".join(refused).split()}, "shown": {*" ".join(shown).split()}}
    assert {key for key, mark in marks.items() if mark == Resume.LENGTH} == LENGTH
    assert all(mark.why for mark in marks.values() if mark and mark.kind == "refused")
    for start in " ".join(defining).split():
        keys = [key for key in marks if key.startswith(start)]
        assert keys, start
        assert [key for key in keys if marks[key] == Resume.FREE] == []
