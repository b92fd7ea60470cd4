"""Rules between keys: each is broken once, and the message names the keys and values."""

from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.model_rules import looks_like_folder
from tests.config.refusals import broken, refused
from tests.messages import says

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CHECKPOINTING = f"{MODEL}.enable_gradient_checkpointing=true"
BUILTIN_SCORER = ("reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen3")
DYNAMIC_CRITIC = ("recipe=ppo", "critic.use_dynamic_bsz=true")
GPU8 = ("cluster=node8", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64")


def load(*overrides):
    return load_config(list(overrides))[0]


def notes(*overrides):
    return load_config(list(overrides))[1]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        broken(f"{ROLLOUT}.n=1", also=["algorithm.adv_estimator=grpo", "rollout.n to 2"]),
        broken("reward_model.enable=true", also=["reward_model.model.path=null"]),
        broken("reward_model.model.path=./nowhere", also=["folder"], beside=["reward_model.enable=true"]),
        broken(
            "reward_model.model.path=builtin:none", also=["builtin:tiny-qwen3"], beside=["reward_model.enable=true"]
        ),
        broken("reward_model.max_length=100000", also=["max_position_embeddings"], beside=[*BUILTIN_SCORER]),
        broken("reward_model.process.enable=true", also=["reward_model.enable=false"]),
        broken(
            also=["reward_model.process.good=+", "reward_model.process.bad=null"],
            beside=[*BUILTIN_SCORER, "reward_model.process.enable=true", "reward_model.process.good='+'"],
        ),
        broken("custom_reward_function.path=grpo_dist.rewards.reward_model", also=["reward_model.enable=false"]),
        broken(
            also=["reward_model.enable=false", "grpo_dist.rewards.reward_model"],
            beside=[
                "custom_reward_function.path=grpo_dist.rewards.weighted",
                "custom_reward_function.reward_kwargs={functions: [{path: grpo_dist.rewards.reward_model}]}",
            ],
        ),
        broken("critic.enable=true", also=["algorithm.adv_estimator=grpo", "gae"]),
        broken("critic.model.path=./nowhere", also=["folder"], beside=["recipe=ppo"]),
        broken(
            also=["critic.model.path=builtin:tiny-qwen3", "100 positions", "critic.model.override_config"],
            beside=["recipe=ppo", "+critic.model.override_config.max_position_embeddings=100"],
        ),
        broken(
            "critic.ppo_mini_batch_size=5",
            also=["data.train_batch_size=32", "ppo_mini_batch_size=4"],
            beside=["recipe=ppo"],
        ),
        broken(
            "cluster.critic_world_size=3",
            also=["critic.ppo_mini_batch_size=32", "3 critic ranks"],
            beside=["recipe=ppo"],
        ),
        broken(
            "critic.model.fsdp_config.fsdp_size=3",
            also=["cluster.critic_world_size=null", "2 critic ranks"],
            beside=["recipe=ppo"],
        ),
        broken(
            "critic.ppo_max_token_len_per_gpu=100",
            also=["128"],
            beside=[*DYNAMIC_CRITIC, "critic.forward_max_token_len_per_gpu=200"],
        ),
        broken("critic.forward_max_token_len_per_gpu=100", also=["128"], beside=[*DYNAMIC_CRITIC]),
        broken(f"{ROLLOUT}.min_tokens=65", also=["data.max_response_length=64", "long"]),
        broken(
            f"{ROLLOUT}.val_kwargs.do_sample=true",
            also=[f"{ROLLOUT}.val_kwargs.temperature=0.0", "do_sample=false"],
            beside=[f"{ROLLOUT}.val_kwargs.temperature=0"],
        ),
        broken(
            "trainer.resume_mode=resume_path",
            also=["trainer.resume_from_path=null", "global_step_N", "resume_mode=auto"],
        ),
    ],
)
def test_each_rule(overrides, parts):
    says(refused(*overrides), *parts)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=64"],
        ["cluster.actor_world_size=1"],
        [f"{ROLLOUT}.val_kwargs.n=4", f"{ROLLOUT}.val_kwargs.do_sample=true"],
        [f"{ROLLOUT}.max_model_len=128"],
        [f"{ACTOR}.ppo_max_token_len_per_gpu=1"],
        [f"{ACTOR}.fsdp_config.fsdp_size=1"],
        [f"{ACTOR}.fsdp_config.fsdp_size=2"],
        [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=128"],
        [f"{ROLLOUT}.n=2"],
        ["cluster=single_gpu"],
        [*GPU8, "cluster.actor_world_size=4", "cluster.rollout_world_size=2", "cluster.ref_world_size=2"],
        ["cluster=node8", "trainer.n_gpus_per_node=2", f"{ACTOR}.use_kl_loss=false"],
        ["algorithm.adv_estimator=my.module:single", f"{ROLLOUT}.n=1"],
        ["data.prompt_template='{question}'", "data.prompt_key=prompt"],
        [f"{ROLLOUT}.min_tokens=64", "data.max_response_length=64"],
        ["reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=64", "data.max_response_length=64"],
        [f"{ROLLOUT}.max_model_len=96", "data.max_prompt_length=32", "data.max_response_length=64"],
    ],
)
def test_legal_settings_pass(overrides):
    assert load(*overrides).trainer.total_training_steps == 25


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("data.train_files", "gone.jsonl", "file"),
        ("data.val_files", "gone.parquet", "file"),
        ("actor_rollout_ref.model.path", "./gone", "folder"),
        ("actor_rollout_ref.model.path", "a/b/gone", "folder"),
        ("custom_reward_function.path", "gone.py", "file"),
        ("custom_reward_function.path", "gone/reward.py", "file"),
        ("data.train_files", "gone", "folder"),
        ("algorithm.adv_estimator", "gone.py:mine", "file"),
        (f"{ACTOR}.kl_loss_type", "gone.py:mine", "file"),
    ],
)
def test_missing_files_are_problems_in_a_run_and_notes_in_a_dry_run_of_the_config(key, value, what):
    missing = f"{key}={value}", "data=arithmetic"
    for run in ("trainer.dry_run=false", "trainer.dry_run=true"):
        says(refused(*missing, run), f"{key}={value.partition(':')[0]}", what, Path.cwd())
        says(notes(*missing, "trainer.dry_run=config"), f"{key}=", what)


def test_a_dry_run_of_the_config_says_that_it_does_not_try_code(tmp_path):
    (tmp_path / "mine.py").touch()
    named = f"algorithm.adv_estimator={tmp_path}/mine.py:mine"
    says(notes(named, "data=arithmetic", "trainer.dry_run=config"), named, "trainer.dry_run=true")
    assert named not in notes(named, "data=arithmetic")
    functions = [f"{tmp_path}/mine.py:{name}" for name in ("right", "short")]
    listed = f"custom_reward_function.path=[{','.join(functions)}]"
    says(notes(listed, "data=arithmetic", "trainer.dry_run=config"), *functions)
    assert "trainer.dry_run=true" not in notes("data=arithmetic", "trainer.dry_run=config")
    told = notes("cluster=multi_node", "data=arithmetic")
    says(told, "trainer.nnodes=2", "trainer.default_local_dir=outputs/grpo_dist/run")
    assert "default_local_dir" not in notes(
        "cluster=multi_node", "data=arithmetic", f"trainer.default_local_dir={tmp_path}"
    )


def test_all_missing_files_of_a_list(tmp_path):
    there = tmp_path / "a.jsonl"
    there.write_text("")
    with pytest.raises(ConfigError) as caught:
        load(f"data.train_files=[{there},b.jsonl,c.jsonl]")
    says(caught, "b.jsonl:", "c.jsonl:")
    assert "a.jsonl" not in str(caught.value)


def test_data_of_an_unknown_kind():
    told = refused("data.train_files=rows.csv", "data=arithmetic")
    says(told, "data.train_files=rows.csv", ".parquet, .jsonl or .json")


def test_a_sampler_has_a_path_and_a_name():
    keys = "data.sampler.class_path", "data.sampler.class_name"
    says(refused(f"{keys[0]}=my.module"), f"{keys[0]}=my.module", f"{keys[1]}=null")
    says(refused(f"{keys[1]}=Mine"), f"{keys[0]}=null", f"{keys[1]}=Mine")
    says(refused(f"{keys[0]}=gone.py", f"{keys[1]}=Mine"), f"{keys[0]}=gone.py:", "file")
    load(f"{keys[0]}=pkg://my.module", f"{keys[1]}=Mine")
    both = refused(f"{keys[0]}=my.module:Mine", "data.curriculum.enable=true")
    says(both, f"{keys[0]}=my.module:Mine", "data.curriculum.enable=true", "null", "false")


@pytest.mark.parametrize(
    "setting", ["decay=0", "decay=1.5", "exploration=-0.1", "exploration=1.1", "max_pass_rate=0", "enable=pools"]
)
def test_shares_of_the_curriculum(setting):
    says(refused(f"data.curriculum.{setting}"), f"data.curriculum.{setting}")


def test_the_file_of_an_agent_loop_is_there(tmp_path):
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    says(refused(f"{key}=gone.py:Loop"), f"{key}=gone.py", "file")
    says(refused(f"{key}=tool_agnt"), f"{key}=tool_agnt", "single_turn_agent", "tool_agent")
    (tmp_path / "loop.py").write_text("")
    load(f"{key}={tmp_path}/loop.py:Loop", "actor_rollout_ref.rollout.agent.agent_kwargs={depth: 2}")
    plain = "data.apply_chat_template=false"
    load(plain)
    says(refused(f"{key}=external", plain), f"{key}=external", plain)


def test_hub_data_needs_the_library(monkeypatch):
    overrides = "data.train_files=hf:openai/gsm8k/main:train", "data=arithmetic"
    load(*overrides)
    monkeypatch.setattr("grpo_dist.config.data_files.find_spec", lambda name: None)
    says(refused(*overrides), overrides[0], "pip install -e '.[datasets]'")


def test_a_folder_without_a_model(tmp_path):
    says(refused(f"actor_rollout_ref.model.path={tmp_path}"), f"actor_rollout_ref.model.path={tmp_path}", "config.json")


def test_an_unknown_builtin_model():
    message = refused("actor_rollout_ref.model.path=builtin:huge")
    assert message.startswith("actor_rollout_ref.model.path=builtin:huge")


def test_resume_folder_must_exist(tmp_path):
    told = refused("trainer.resume_mode=resume_path", "trainer.resume_from_path=gone")
    says(told, "trainer.resume_from_path=gone", "folder")
    load("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")


def test_hub_names_are_not_looked_up():
    load("actor_rollout_ref.model.path=Qwen/Qwen3-0.6B")
    assert not looks_like_folder("Qwen/Qwen3-0.6B")
    assert not looks_like_folder("gpt2")
    assert all(looks_like_folder(path) for path in ("/models/x", "./x", "../x", "~/x", "outputs/run/hf"))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([f"{ACTOR}.kl_loss_type=k1"], f"{ACTOR}.kl_loss_type=k1"),
        ([f"{ACTOR}.kl_loss_type=kl"], f"{ACTOR}.kl_loss_type=kl"),
        (["reward_model.model.path=some/model"], "reward_model.enable=false"),
        (["recipe=ppo", "critic.enable=false"], "critic.enable=false"),
        ([f"{ROLLOUT}.min_p=0.1"], f"{ROLLOUT}.min_p=0.1"),
        ([f"{ROLLOUT}.min_tokens=5"], f"{ROLLOUT}.min_tokens=5"),
        ([f"{ROLLOUT}.top_k=20"], f"{ROLLOUT}.top_k=20"),
        (["trainer.resume_from_path=x"], "resume_mode=auto"),
        (["cluster=single_gpu", f"{ROLLOUT}.gpu_memory_utilization=0.8"], "actor"),
        (["trainer.max_staleness=2", "algorithm.rollout_correction.rollout_is=null"], "trainer.max_staleness=2"),
        ([f"{ROLLOUT}.over_sample_rate=0.2"], "over_sample_rate=0.2"),
    ],
)
def test_notes(overrides, part):
    (note,) = notes(*overrides)
    says(note, part)


STALE = "trainer.max_staleness=2"


def test_sampling_ahead_with_its_defaults_has_no_notes():
    assert notes(STALE) == []
    assert notes(STALE, f"{ROLLOUT}.partial_rollout=false", f"{ROLLOUT}.clear_kv_cache_on_update=false") == []


def test_the_reference_does_not_move_under_groups_sampled_ahead():
    told = refused(STALE, "actor_rollout_ref.ref.ref_model_sync_steps=2")
    says(told, STALE, "actor_rollout_ref.ref.ref_model_sync_steps=2")


def test_two_ways_to_sample_more_prompts_are_refused():
    told = refused(f"{ROLLOUT}.over_sample_rate=0.5", "algorithm.filter_groups.enable=true")
    says(told, f"{ROLLOUT}.over_sample_rate=0.5", "algorithm.filter_groups.enable=true")


def test_the_default_run_has_no_notes():
    assert notes() == []
    assert notes(f"{ACTOR}.kl_loss_type=k1", f"{ACTOR}.use_kl_loss=false") == []


def test_a_missing_vllm_is_told_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("grpo_dist.plan.rules.find_spec", lambda name: None)
    says(refused(), f"{ROLLOUT}.name=vllm", "pip install -e '.[cpu]'", "'.[gpu]'")
    says(notes("trainer.dry_run=config"), "vLLM", "installed")
    load("ray_kwargs.ray_init.address=10.0.0.1:6379")


NEED_TORCHAO = [
    f"{ACTOR}.optim.optimizer=AdamW8bit",
    f"{ACTOR}.fsdp_config.model_dtype=bf16",
    "critic.optim.optimizer=AdamW8bit",
    "reward_model.retrain.model_dtype=bf16",
]


@pytest.mark.parametrize("setting", NEED_TORCHAO)
def test_a_missing_torchao_is_told_before_anything_starts(setting, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    load(setting)
    monkeypatch.setattr("grpo_dist.plan.rules.find_spec", lambda name: None if name == "torchao" else name)
    says(refused(setting), setting, "torchao", "pip install 'torchao>=0.18,<0.19'")
    says(notes(setting, "trainer.dry_run=config"), setting, "torchao")
    load(setting, "ray_kwargs.ray_init.address=10.0.0.1:6379")
    load()


def test_a_group_trains_with_some_of_its_responses_and_with_two_where_they_are_compared():
    key = "algorithm.min_group_size"
    says(refused(f"{key}=9"), f"{key}=9", f"{ROLLOUT}.n=8", "8", "null")
    says(refused(f"{key}=1"), f"{key}=1", "algorithm.adv_estimator=grpo", "2 or more")
    for fitting in ((f"{key}=2",), (f"{key}=8",), (f"{key}=1", "algorithm.adv_estimator=remax")):
        assert load(*fitting)


def test_agents_have_credit_of_their_own_where_there_are_some_and_the_estimator_compares_them():
    loop = f"{ROLLOUT}.agent.default_agent_loop=tool_agent", f"{ROLLOUT}.agent.agent_kwargs={{tools: [math:sqrt]}}"
    key = "algorithm.credit=agent"
    says(refused(key), key, "single_turn_agent", "episode")
    says(refused(key, *loop, "algorithm.adv_estimator=remax"), key, "algorithm.adv_estimator=remax", "episode")
    assert load(key, *loop, "algorithm.adv_estimator=grpo_process")
    says(refused("algorithm.adv_estimator=gigpo"), "algorithm.adv_estimator=gigpo", "single_turn_agent", "grpo")
    assert load("algorithm.adv_estimator=gigpo", *loop)


def test_the_exact_kl_needs_an_output_layer_without_factors():
    lora = "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj,lm_head]"
    told = refused(*lora, f"{ACTOR}.kl_loss_type=full")
    says(told, f"{ACTOR}.kl_loss_type=full", lora[1], "low_var_kl", "lm_head out")
    load(*lora)
    load(*lora, f"{ACTOR}.kl_loss_type=full", "actor_rollout_ref.model.exclude_modules=[lm_head]")


def test_a_critic_comes_with_gae_and_gae_without_one():
    assert load("recipe=ppo").needs_critic
    assert load("algorithm.adv_estimator=gae").needs_critic
    assert not load("algorithm.adv_estimator=gae", "critic.enable=false").needs_critic
    assert not load().needs_critic


def test_a_critic_follows_the_actor_where_its_own_keys_are_not_set():
    critic = load("recipe=ppo", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true", "critic.ppo_epochs=3").critic
    assert (critic.ppo_epochs, critic.shuffle, critic.model.path) == (3, True, "builtin:tiny-qwen3")
