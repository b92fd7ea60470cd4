"""Rules between keys: each is broken once, and the message names the keys and values."""

import pytest

from grpo_dist.config.load import load_config
from grpo_dist.config.rules import looks_like_folder
from grpo_dist.errors import ConfigError
from tests.config.refusals import refused

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
GPU8 = ("cluster=node8", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64")


def load(*overrides):
    return load_config(list(overrides))[0]


def notes(*overrides):
    return load_config(list(overrides))[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{ROLLOUT}.n=1"],
            f"{ROLLOUT}.n=1, algorithm.adv_estimator=grpo: the estimator compares the responses "
            "of one prompt; "
            "set rollout.n to 2 or more",
        ),
        (
            [f"{ROLLOUT}.min_tokens=65"],
            f"{ROLLOUT}.min_tokens=65, data.max_response_length=64: no response can be that long",
        ),
        (
            [f"{ROLLOUT}.val_kwargs.n=4"],
            f"{ROLLOUT}.val_kwargs.n=4, {ROLLOUT}.val_kwargs.do_sample=false: greedy responses "
            "are all the same; "
            "set do_sample=true or n=1",
        ),
        (
            [f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=0"],
            f"{ROLLOUT}.val_kwargs.do_sample=true, {ROLLOUT}.val_kwargs.temperature=0.0: "
            "sampling needs a positive "
            "temperature; for greedy set do_sample=false",
        ),
        (
            ["trainer.resume_mode=resume_path"],
            "trainer.resume_mode=resume_path, trainer.resume_from_path=null: set resume_from_path to a "
            "global_step_N folder, or resume_mode=auto",
        ),
    ],
)  # fmt: skip
def test_each_rule(overrides, message):
    assert refused(*overrides) == message


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
    ],
)
def test_legal_settings_pass(overrides):
    assert load(*overrides).trainer.total_training_steps == 25


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
            f"{CORRECTION}.bypass_mode=true, {CORRECTION}.rollout_is=token: with the sampler's log-probs",
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is_batch_normalize=true"],
            f"{CORRECTION}.bypass_mode=true, {CORRECTION}.rollout_is_batch_normalize=true: these weights change",
        ),
        (
            [f"{CORRECTION}.loss_type=reinforce"],
            f"{CORRECTION}.loss_type=reinforce, {CORRECTION}.bypass_mode=false: reinforce is a loss of bypass_mode",
        ),
        (
            [
                f"{CORRECTION}.bypass_mode=true",
                f"{CORRECTION}.loss_type=reinforce",
                f"{ACTOR}.policy_loss.loss_mode=gspo",
                f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
            ],
            f"{CORRECTION}.loss_type=reinforce, {ACTOR}.policy_loss.loss_mode=gspo: two losses",
        ),
        (
            [f"{CORRECTION}.rollout_rs=token_k1"],
            f"{CORRECTION}.rollout_rs=token_k1, {CORRECTION}.rollout_rs_threshold=null: set both or none",
        ),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.top_entropy_quantile=0.2"],
            f"{ACTOR}.top_entropy_quantile=0.2, {CORRECTION}.bypass_mode=true: entropies come from the pass",
        ),
        (
            ["trainer.health.kl.action=stop", f"{ACTOR}.use_kl_loss=false"],
            f"trainer.health.kl.action=stop, {ACTOR}.use_kl_loss=false: without a reference there is no KL to it",
        ),
        (
            ["trainer.health.rollout_mismatch.action=stop", f"{CORRECTION}.bypass_mode=true"],
            f"trainer.health.rollout_mismatch.action=stop, {CORRECTION}.bypass_mode=true: this mode computes no",
        ),
        (
            ["trainer.health.entropy.action=stop", f"{CORRECTION}.bypass_mode=true"],
            f"trainer.health.entropy.action=stop, {CORRECTION}.bypass_mode=true, {ACTOR}.entropy_coeff=0.0: entropy",
        ),
        (
            [f"{ACTOR}.top_entropy_quantile=0.2", f"{ACTOR}.policy_loss.loss_mode=geo_mean"],
            f"{ACTOR}.top_entropy_quantile=0.2, {ACTOR}.policy_loss.loss_mode=geo_mean: the loss has one ratio",
        ),
    ],
)
def test_corrections_and_selections_that_do_not_go_together(overrides, message):
    assert refused(*overrides).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("data.train_files", "gone.jsonl", "no such file"),
        ("data.val_files", "gone.parquet", "no such file"),
        ("actor_rollout_ref.model.path", "./gone", "no such folder"),
        ("actor_rollout_ref.model.path", "a/b/gone", "no such folder"),
        ("custom_reward_function.path", "gone.py", "no such file"),
        ("custom_reward_function.path", "gone/reward.py", "no such file"),
        ("data.train_files", "gone", "no such folder"),
        ("algorithm.adv_estimator", "gone.py:mine", "no such file"),
        (f"{ACTOR}.kl_loss_type", "gone.py:mine", "no such file"),
    ],
)
def test_missing_files_are_problems_in_a_run_and_notes_in_a_dry_run_of_the_config(key, value, what):
    missing = f"{key}={value}", "data=arithmetic"
    for run in ("trainer.dry_run=false", "trainer.dry_run=true"):
        assert refused(*missing, run).startswith(f"{key}={value.partition(':')[0]}: {what} (looked in ")
    assert any(f"{key}=" in note and what in note for note in notes(*missing, "trainer.dry_run=config"))


def test_all_missing_files_of_a_list(tmp_path):
    there = tmp_path / "a.jsonl"
    there.write_text("")
    with pytest.raises(ConfigError) as caught:
        load(f"data.train_files=[{there},b.jsonl,c.jsonl]")
    assert "b.jsonl: no such file" in str(caught.value)
    assert "c.jsonl: no such file" in str(caught.value)
    assert "a.jsonl" not in str(caught.value)


def test_data_of_an_unknown_kind():
    assert "data.train_files=rows.csv: must end in .parquet, .jsonl or .json" in refused(
        "data.train_files=rows.csv", "data=arithmetic"
    )


def test_a_sampler_has_a_path_and_a_name():
    keys = "data.sampler.class_path", "data.sampler.class_name"
    assert refused(f"{keys[0]}=my.module") == f"{keys[0]}=my.module, {keys[1]}=null: set both or none"
    assert refused(f"{keys[1]}=Mine") == f"{keys[0]}=null, {keys[1]}=Mine: set both or none"
    assert refused(f"{keys[0]}=gone.py", f"{keys[1]}=Mine").startswith(f"{keys[0]}=gone.py: no such file")
    load(f"{keys[0]}=pkg://my.module", f"{keys[1]}=Mine")


def test_the_file_of_an_agent_loop_is_there(tmp_path):
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    assert refused(f"{key}=gone.py:Loop").startswith(f"{key}=gone.py: no such file")
    assert "not one of single_turn_agent" in refused(f"{key}=tool_agent")
    (tmp_path / "loop.py").write_text("")
    load(f"{key}={tmp_path}/loop.py:Loop", "actor_rollout_ref.rollout.agent.agent_kwargs={depth: 2}")


def test_hub_data_needs_the_library(monkeypatch):
    overrides = "data.train_files=hf:openai/gsm8k/main:train", "data=arithmetic"
    load(*overrides)
    monkeypatch.setattr("grpo_dist.config.data_files.find_spec", lambda name: None)
    message = refused(*overrides)
    assert message.endswith("needs the datasets library: pip install -e '.[datasets]'")


def test_a_folder_without_a_model(tmp_path):
    assert "no such config.json in the folder" in refused(f"actor_rollout_ref.model.path={tmp_path}")


def test_an_unknown_builtin_model():
    message = refused("actor_rollout_ref.model.path=builtin:huge")
    assert message.startswith("actor_rollout_ref.model.path=builtin:huge")


def test_resume_folder_must_exist(tmp_path):
    assert "no such folder" in refused("trainer.resume_mode=resume_path", "trainer.resume_from_path=gone")
    load("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")


def test_hub_names_are_not_looked_up():
    load("actor_rollout_ref.model.path=Qwen/Qwen3-0.6B")
    assert not looks_like_folder("Qwen/Qwen3-0.6B")
    assert not looks_like_folder("gpt2")
    assert all(looks_like_folder(path) for path in ("/models/x", "./x", "../x", "~/x", "outputs/run/hf"))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([f"{ACTOR}.kl_loss_type=k1"], "regularises nothing"),
        ([f"{ACTOR}.kl_loss_type=kl"], "regularises nothing"),
        ([f"{ACTOR}.kl_loss_coef=0"], "only to report KL"),
        ([f"{ACTOR}.optim.lr_warmup_steps=3", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"], "has no effect"),
        ([f"{ACTOR}.optim.min_lr_ratio=0.1"], "has no effect with lr_scheduler_type=constant"),
        ([f"{ACTOR}.fsdp_config.param_offload=true"], "param_offload=true has no effect on CPU"),
        ([f"{ROLLOUT}.min_p=0.1"], "rollout.min_p: samples come from a part of the distribution"),
        ([f"{ROLLOUT}.min_tokens=5"], "rollout.min_tokens: samples come from a part of the distribution"),
        ([f"{ROLLOUT}.top_k=20"], "rollout.top_k: samples come from a part of the distribution"),
        (["trainer.save_freq=50"], "one checkpoint, after the last step"),
        (["data.val_files=null"], "no validation"),
        ([f"{ROLLOUT}.free_cache_engine=true"], "free_cache_engine=true has no effect on CPU"),
        (["cluster=node8", f"{ROLLOUT}.free_cache_engine=true"], "has no effect where engines have GPUs of their own"),
        (["data.sampler.class_path=json", "data.sampler.class_name=A"], "no effect on the order"),
        (["trainer.resume_from_path=x"], "has no effect with resume_mode=auto"),
        (["custom_reward_function.reward_kwargs.a=1"], "has no effect"),
        (["cluster=single_gpu", f"{ROLLOUT}.gpu_memory_utilization=0.8"], "the actor shares the GPU"),
    ],
)
def test_notes(overrides, part):
    (note,) = notes(*overrides)
    assert part in note


STALE = "trainer.max_staleness=2"


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([STALE, f"{CORRECTION}.rollout_is=null"], "responses may be 2 updates old"),
        ([f"{ROLLOUT}.over_sample_rate=0.2"], "the slowest groups are ended"),
        ([f"{ROLLOUT}.partial_rollout=false"], "partial_rollout=false has no effect with trainer.max_staleness=0"),
        ([f"{ROLLOUT}.clear_kv_cache_on_update=false"], "clear_kv_cache_on_update=false has no effect"),
    ],
)
def test_notes_on_sampling_ahead(overrides, part):
    (note,) = notes(*overrides)
    assert part in note


def test_sampling_ahead_with_its_defaults_has_no_notes():
    assert notes(STALE) == []
    assert notes(STALE, f"{ROLLOUT}.partial_rollout=false", f"{ROLLOUT}.clear_kv_cache_on_update=false") == []


def test_the_reference_does_not_move_under_groups_sampled_ahead():
    told = refused(STALE, "actor_rollout_ref.ref.ref_model_sync_steps=2")
    assert "trainer.max_staleness=2, actor_rollout_ref.ref.ref_model_sync_steps=2: groups sampled ahead" in told


def test_two_ways_to_sample_more_prompts_are_refused():
    told = refused(f"{ROLLOUT}.over_sample_rate=0.5", "algorithm.filter_groups.enable=true")
    assert f"{ROLLOUT}.over_sample_rate=0.5, algorithm.filter_groups.enable=true: dynamic sampling has" in told


def test_the_default_run_has_no_notes():
    assert notes() == []
    assert notes(f"{ACTOR}.kl_loss_type=k1", f"{ACTOR}.use_kl_loss=false") == []


def test_a_missing_vllm_is_told_before_anything_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("grpo_dist.config.rules.find_spec", lambda name: None)
    assert refused() == (
        f"{ROLLOUT}.name=vllm: vLLM is not installed here; pip install -e '.[cpu]', or '.[gpu]' on a GPU machine"
    )
    assert any("vLLM is not installed" in note for note in notes("trainer.dry_run=config"))
    load("ray_kwargs.ray_init.address=10.0.0.1:6379")


def test_the_best_checkpoint_is_found_by_validating():
    best = "trainer.keep_best_metric=val-core/x"
    text = refused(best, "trainer.test_freq=-1")
    assert (
        "trainer.keep_best_metric=val-core/x, trainer.test_freq=-1: the best checkpoint is found by validating" in text
    )
    assert "set data.val_files and trainer.test_freq" in refused(best, "data.val_files=null")
    assert notes(best, "trainer.test_freq=5", "trainer.save_freq=10") == []
    assert notes(best, "trainer.save_freq=-1", "trainer.save_interval_minutes=5") == []
    (note,) = notes(best, "trainer.test_freq=5", "trainer.save_freq=7")
    assert "only checkpoints that are validated can be the best; with save_freq=7 and test_freq=5 some are not" in note


def test_the_exact_kl_needs_an_output_layer_without_factors():
    lora = "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_proj,lm_head]"
    told = refused(*lora, f"{ACTOR}.kl_loss_type=full")
    assert f"{ACTOR}.kl_loss_type=full, actor_rollout_ref.model.target_modules=[q_proj,lm_head]: the exact KL" in told
    assert "choose low_var_kl or leave lm_head out" in told
    load(*lora)
    load(*lora, f"{ACTOR}.kl_loss_type=full", "actor_rollout_ref.model.exclude_modules=[lm_head]")
