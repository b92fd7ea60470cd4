"""What parts of the config reach what parts of the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_roles import OptimConfig
from grpo_dist.plan import roles
from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import Plan, make_plan
from grpo_dist.plan.roles import reference_columns
from grpo_dist.run.build import time_limits
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.trainer.run_prompts import template_kwargs, workers_agent
from grpo_dist.workers.scorer import RewardSettings
from tests.engines.vllm.test_engine import PROMPTS, generate, tokens
from tests.worker_settings import agent

ACTOR = "actor_rollout_ref.actor"


def test_what_engines_get_of_lora() -> None:
    """The actor and the engines must agree."""
    apart = ("actor_rollout_ref.model.lora.merge=false", "actor_rollout_ref.model.lora_alpha=8")
    rank = "actor_rollout_ref.model.lora_rank=4"
    for overrides, sends in (((), False), (apart, False), ((rank,), False), ((*apart, rank), True)):
        config = load(*overrides)
        assert ranks(config, "actor").model.sends_factors == sends
        lora = make_plan(config).engine(0).lora
        assert (lora and (lora.lora_rank, lora.lora_alpha)) == ((4, 8.0) if sends else None)


SCORER = "reward_model.model.path=builtin:tiny-qwen3"
WEIGHTED = (
    "custom_reward_function.path=grpo_dist.rewards.weighted",
    "custom_reward_function.reward_kwargs={functions: [{path: grpo_dist.rewards.reward_model}, {path: null}]}",
)
TAUGHT = ("recipe=distill", "actor_rollout_ref.ref.model.path=builtin:tiny-qwen3")


def load(*overrides: str):
    return load_config(list(overrides))[0]


def ranks(config: RunConfig, role: str) -> Any:
    """What the ranks of a role are built from, in a run of ten steps."""
    return make_plan(config, 10).ranks(role)


def planned(*overrides: str) -> Plan[RunConfig]:
    return make_plan(load(*overrides))


def reward_settings(config: RunConfig) -> RewardSettings:
    return RewardSettings.of(make_plan(config), template_kwargs(config))


@pytest.mark.parametrize(
    ("overrides", "objective", "reference"),
    [
        ([], ("advantages", "ref_log_probs"), ("ref_log_probs",)),
        ([f"{ACTOR}.ppo_epochs=2"], ("old_log_probs", "advantages", "ref_log_probs"), ("ref_log_probs",)),
        ([f"{ACTOR}.use_kl_loss=false"], ("advantages",), ()),
        ([f"{ACTOR}.kl_loss_type=full"], ("advantages", "ref_hidden_states"), ("ref_hidden_states",)),
        (
            [f"{ACTOR}.kl_loss_type=full", "algorithm.use_kl_in_reward=true"],
            ("old_log_probs", "advantages", "ref_hidden_states"),
            ("ref_log_probs", "ref_hidden_states"),
        ),
        (
            [
                f"{ACTOR}.use_kl_loss=false",
                "algorithm.rollout_correction.rollout_is=token",
                f"{ACTOR}.policy_loss.loss_mode=kl_cov",
            ],
            ("old_log_probs", "advantages", "rollout_is_weights", "selected_tokens"),
            (),
        ),
    ],
)
def test_columns_follow_the_objective(overrides: list, objective: tuple, reference: tuple) -> None:
    config = load(*overrides)
    assert make_plan(config).objective.columns == objective
    assert reference_columns(config) == reference
    assert config.needs_reference == bool(reference)


def test_sampling_arrives() -> None:
    """What ends or forbids text holds for validation too, what cuts the distribution does not."""
    rollout = "actor_rollout_ref.rollout"
    config = load(
        f"{rollout}.min_p=0.1", f"{rollout}.min_tokens=3", f"{rollout}.stop=END", f"{rollout}.bad_words=[x,y]"
    )
    training, validation = make_plan(config).sampling, make_plan(config).val_sampling
    assert (training.n, training.min_p, training.min_tokens, training.max_tokens) == (8, 0.1, 3, 64)
    assert (training.stop, training.bad_words) == (("END",), ("x", "y"))
    assert (validation.n, validation.temperature, validation.min_p, validation.min_tokens) == (1, 0.0, 0.0, 3)
    assert validation.stop == training.stop
    assert make_plan(config).engine(0).needs_tokenizer
    assert not planned().engine(0).needs_tokenizer


def test_an_agent_loop_arrives_with_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = "from grpo_dist.agents import AgentLoop\n\nclass Mine(AgentLoop):\n    def __init__(self, depth): ...\n"
    (tmp_path / "loop.py").write_text(f"{loop}    async def run(self, episode): ...\n")
    key = "actor_rollout_ref.rollout.agent"
    config = load(f"{key}.default_agent_loop=loop.py:Mine", f"{key}.agent_kwargs={{depth: 2}}", f"{key}.timeout_s=7")
    settings = make_plan(config).engine(0, workers_agent(config))
    assert settings.rollout.agent == agent(f"{tmp_path}/loop.py:Mine", {"depth": 2}, timeout_s=7)
    assert settings.needs_tokenizer, "turns end at texts"


def test_activations_of_what_trains_are_offloaded() -> None:
    config = load(
        *("recipe=ppo", f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.model.enable_gradient_checkpointing=true"),
        "actor_rollout_ref.model.enable_activation_offload=true",
    )
    policy, ref = ranks(config, "actor"), ranks(config, "ref")
    critic = ranks(config, "critic")
    assert [made.model.layers.enable_activation_offload for made in (policy, critic)] == [True, True]
    assert ref.model.layers is None


def test_each_engine_has_a_folder_for_its_profiles_if_there_are_to_be_any() -> None:
    assert planned().engine(0).profile_dir is None
    config = load("trainer.profile_steps=[3]", "trainer.default_local_dir=/runs/mine")
    engines = [make_plan(config).engine(index).profile_dir for index in (0, 1)]
    assert engines == ["/runs/mine/profiles/.rollout0", "/runs/mine/profiles/.rollout1"]


def test_long_context_settings_arrive_at_the_engine_and_the_trainer() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}
    config = load(
        *("data.max_response_length=3072", "actor_rollout_ref.rollout.max_model_len=4096"),
        *("actor_rollout_ref.rollout.max_num_batched_tokens=2048", "actor_rollout_ref.rollout.max_num_seqs=16"),
        "actor_rollout_ref.model.override_config.max_position_embeddings=4096",
        "actor_rollout_ref.model.override_config.rope_parameters={rope_type: yarn, rope_theta: 10000.0, factor: 8.0, "
        "original_max_position_embeddings: 512}",
    )
    engine = make_plan(config).engine(0)
    assert (engine.max_model_len, engine.rollout.max_num_batched_tokens, engine.rollout.enable_chunked_prefill) == (
        4096,
        2048,
        True,
    )
    policy = ranks(config, "actor").model
    wanted = {"max_position_embeddings": 4096, "rope_parameters": rope}
    assert engine.model.override_config == policy.model.override_config == wanted


def test_the_roles_get_what_they_need() -> None:
    config = load(f"{ACTOR}.top_entropy_quantile=0.2", f"{ACTOR}.kl_loss_type=full")
    actor, ref = ranks(config, "actor"), ranks(config, "ref")
    assert actor.columns == ("old_log_probs", "old_entropies")
    assert actor.keeps_output_layer
    assert not ref.keeps_output_layer
    assert ref.optimizer is None
    actor = ranks(load("algorithm.adv_estimator=optimal_token_baseline"), "actor")
    assert actor.columns == ("old_log_probs", "old_gradient_norms")


@pytest.mark.parametrize("lora", [(), ("actor_rollout_ref.model.lora_rank=2",)])
def test_a_teacher_is_another_model_beside_any_policy(lora: tuple[str, ...]) -> None:
    """With LoRA too: the policy without its factors is not the reference then."""
    teacher = "actor_rollout_ref.ref.model"
    config = load(
        *("recipe=distill", f"{teacher}.path=builtin:tiny-qwen3", f"+{teacher}.override_config.rope_theta=5", *lora),
        "+actor_rollout_ref.model.override_config.attention_dropout=0.5",
    )
    actor, ref = ranks(config, "actor"), ranks(config, "ref")
    assert make_plan(config).place.world_sizes["ref"] == 1
    assert not config.actor_is_reference
    assert (actor.reference_columns, actor.keeps_output_layer) == ((), False), "the teacher sends its own"
    assert (ref.columns, ref.model.lora, ref.optimizer) == (("ref_hidden_states",), None, None)
    assert (ref.model.key, ref.model.section) == (f"{teacher}.path", teacher)
    assert ref.model.model.override_config == {"rope_theta": 5}
    assert not ref.model.model.trust_remote_code
    assert actor.model.model.override_config == {"attention_dropout": 0.5}


def test_what_a_policy_that_teaches_itself_gives_to_whom() -> None:
    """The template has its variables, and prompts no limit unless it is set."""
    shown = "algorithm.self_distillation"
    config = load("recipe=sdpo", "+data.apply_chat_template_kwargs.enable_thinking=false")
    assert make_plan(config).objective.teaches_itself
    assert {"ref_hidden_states", "teacher_mask"} <= {*make_plan(config).objective.columns}
    turns = ("actor_rollout_ref.rollout.agent.default_agent_loop=external", "algorithm.adv_estimator=gigpo")
    url = "actor_rollout_ref.rollout.agent.agent_kwargs={url: 'http://127.0.0.1:1/x'}"
    assert [reward_settings(load(*more)).by_turn for more in ((), (*turns, url))] == [False, True]
    reward = reward_settings(config)
    assert reward.self_distillation is not None
    assert reward.self_distillation.longest_prompt is None
    assert reward.template_kwargs == {"enable_thinking": False}
    limited = reward_settings(load("recipe=sdpo", f"{shown}.longest_prompt=99")).self_distillation
    assert limited is not None
    assert limited.longest_prompt == 99
    plain = load()
    assert (reward_settings(plain).self_distillation, make_plan(plain).objective.teaches_itself) == (None, False)


def test_the_reward_model_is_another_model_that_only_runs_forward() -> None:
    config = load(
        *("reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen3", "reward_model.max_length=300"),
        "reward_model.model.input_tokenizer=null",
        "actor_rollout_ref.model.lora_rank=2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    )
    found = ranks(config, "reward_model")
    assert (found.model.num_labels, found.model.key) == (1, "reward_model.model.path")
    assert (found.model.lora, found.optimizer, found.model.layers) == (None, None, None)
    assert (found.section.max_length, found.model.max_model_len, found.section.model.input_tokenizer) == (
        300,
        300,
        None,
    )
    rendered = load("reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen3")
    assert ranks(rendered, "reward_model").section.model.input_tokenizer == "builtin:tiny-qwen3"


def test_the_critic_trains_whole_with_an_optimizer_and_limits_of_its_own() -> None:
    config = load(
        *("recipe=ppo", "critic.ppo_mini_batch_size=8", "critic.optim.lr_warmup_steps_ratio=0.5"),
        *("critic.grad_clip=2", "critic.cliprange_value=0.3", "critic.loss_agg_mode=token-sum"),
        *("critic.ppo_micro_batch_size_per_gpu=5", "critic.forward_micro_batch_size_per_gpu=7"),
        *("actor_rollout_ref.model.lora_rank=2", "critic.model.enable_gradient_checkpointing=true"),
        "critic.model.fsdp_config.optimizer_offload=true",
    )
    found = ranks(config, "critic")
    model = found.model
    assert (model.num_labels, model.small_new_head, model.new_head_seed, model.key) == (1, True, 1, "critic.model.path")
    assert (model.lora, model.layers.enable_gradient_checkpointing, model.optimizer_offload) == (None, True, True)
    assert (found.columns, found.grad_clip) == (("values",), 2)
    assert (found.update.micro_batch_size, found.forward.micro_batch_size) == (5, 7)
    assert found.update.max_token_len is found.forward.max_token_len is None
    assert isinstance(found.optimizer, OptimConfig)
    assert (found.total_steps, found.optimizer.warmup_steps(40)) == (40, 20), "4 mini-batches a step"
    loss = make_plan(config).value_objective
    assert (loss.section.cliprange_value, loss.section.loss_agg_mode, loss.loss_scale_factor) == (0.3, "token-sum", 64)
    assert make_plan(config).targets.has_values
    assert not planned("recipe=ppo", "critic.enable=false").targets.has_values


@pytest.mark.parametrize(
    ("overrides", "needed", "function"),
    [
        ((), True, None),
        (("reward_model.enable=true", SCORER), False, "grpo_dist.rewards.reward_model"),
        (("reward_model.enable=true", SCORER, "custom_reward_function.path=json"), False, "json"),
        (("reward_model.enable=true", SCORER, *WEIGHTED), True, "grpo_dist.rewards.weighted"),
        (TAUGHT, False, "grpo_dist.rewards.optional"),
        ((*TAUGHT, "custom_reward_function.path=json"), False, "json"),
        ((*TAUGHT, *WEIGHTED, "reward_model.enable=true", SCORER), True, "grpo_dist.rewards.weighted"),
        ((*TAUGHT, "algorithm.adv_estimator=grpo"), True, None),
    ],
)
def test_rows_need_a_ground_truth_where_a_built_in_scorer_scores(
    overrides: tuple, needed: bool, function: str | None
) -> None:
    config = load(*overrides)
    assert (config.needs_ground_truth, reward_settings(config).function_path) == (needed, function)


def test_copies_of_the_weights_are_the_actors_matter() -> None:
    config = load(f"{ACTOR}.fsdp_config.fsdp_size=1")
    assert ranks(config, "actor").model.fsdp_config.fsdp_size == 1
    assert ranks(config, "ref").model.fsdp_config.fsdp_size == -1


DYNAMIC = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=4000")
REF, ROLLOUT = "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (None, None, None)),
        (DYNAMIC, (4000, 4000, 4000)),
        ((*DYNAMIC, f"{ROLLOUT}.log_prob_max_token_len_per_gpu=9000"), (4000, 9000, 4000)),
        ((*DYNAMIC, f"{REF}.log_prob_use_dynamic_bsz=false"), (4000, 4000, None)),
        ((f"{REF}.log_prob_use_dynamic_bsz=true",), (None, None, 16384)),
    ],
)
def test_token_budgets_follow_the_actors_unless_set(overrides: tuple, expected: tuple) -> None:
    config = load(*overrides)
    actor, ref = ranks(config, "actor"), ranks(config, "ref")
    assert (actor.update.max_token_len, actor.forward.max_token_len, ref.forward.max_token_len) == expected


@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        ((), "shared"),
        ((f"{ACTOR}.use_prefix_grouper=false",), "packed"),
        (("actor_rollout_ref.model.use_remove_padding=false",), "padded"),
    ],
)
def test_the_layout_is_the_same_for_all_roles(overrides: tuple, layout: str) -> None:
    config = load(*overrides)
    assert ranks(config, "actor").model.layout == layout
    assert ranks(config, "ref").model.layout == layout


def test_the_policy_and_its_own_start_replay_experts_and_a_teacher_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    replay, policy = f"{ACTOR}.router_replay.mode=R3", f"actor_rollout_ref.model.path={tmp_path}"
    for overrides, actor, ref in (
        ((), False, False),
        ((replay, policy), True, True),
        ((replay, policy, "actor_rollout_ref.ref.model.path=builtin:tiny-qwen3"), True, False),
    ):
        config = load(*overrides)
        found = (ranks(config, "actor").model.replays_routes, ranks(config, "ref").model.replays_routes)
        assert found == (actor, ref)
        assert make_plan(config).engine(0).records_routes == actor


def test_the_overlong_buffer_is_off_unless_asked_for() -> None:
    assert reward_settings(load()).overlong_penalty is None
    penalty = reward_settings(
        load("reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=16")
    ).overlong_penalty
    assert (penalty.max_length, penalty.buffer, penalty.factor) == (64, 16, 1.0)


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        ([], "object_store"),
        (["cluster=single_gpu"], "ipc"),  # NCCL takes no two processes on one GPU
        (["actor_rollout_ref.rollout.checkpoint_engine.backend=ipc"], "ipc"),
        (["cluster=node8"], "broadcast"),
        (["cluster=node8", "actor_rollout_ref.rollout.checkpoint_engine.backend=naive"], "broadcast"),
        (["cluster=node8", "actor_rollout_ref.rollout.checkpoint_engine.backend=object_store"], "object_store"),
        (["actor_rollout_ref.rollout.checkpoint_engine.backend=broadcast"], "broadcast"),
        (["actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"], "broadcast"),
    ],
)
def test_how_weights_reach_the_engines(overrides: list[str], transport: str) -> None:
    config = load(*overrides)
    assert make_plan(config).transport == transport


def test_linux_under_windows_has_no_memory_that_processes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "is_wsl", lambda: True)
    config = load("cluster=single_gpu")
    assert make_plan(config).transport == "object_store"


def test_the_size_of_a_bucket() -> None:
    config = load("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=4096")
    assert ranks(config, "actor").weight_bucket_bytes == 4 << 30


def test_time_limits_by_stage() -> None:
    stages = "trainer.stage_timeout_s"
    limits = time_limits(load("trainer.worker_timeout_s=100", f"{stages}.generate=7", f"{stages}.update=null"))
    assert [limits.of(stage) for stage in ("generate", "update", "start")] == [7.0, 100.0, 900.0]


@pytest.mark.deep
@pytest.mark.ray
def test_a_real_engine_validates_as_val_kwargs_say(rollouts: WorkerGroup) -> None:
    def validated(*options: str) -> list[list[int]]:
        validation = planned(*(f"actor_rollout_ref.rollout.val_kwargs.{each}" for each in options)).val_sampling
        return tokens(generate(rollouts, 0, PROMPTS, replace(validation, max_tokens=20)))

    greedy = validated()
    assert len(greedy) == len(PROMPTS)
    twice = [row for row in greedy for _ in range(2)]
    sampled = ("do_sample=true", "n=2", "temperature=1.5")
    assert validated(*sampled, "top_k=1") == validated(*sampled, "top_p=1e-6") == twice
    assert validated(*sampled) != twice
    assert validated("temperature=1.5") == greedy, "without do_sample"


def test_the_scale_of_seq_mean_token_sum_norm_is_the_longest_response() -> None:
    assert planned().objective.actor.loss_scale_factor == 64
    assert planned(f"{ACTOR}.loss_scale_factor=100").objective.actor.loss_scale_factor == 100


def test_options_of_the_loss_arrive() -> None:
    options = planned(f"{ACTOR}.tau_pos=2", f"{ACTOR}.policy_loss.dro_beta=0.5").objective.options
    assert (options["tau_pos"], options["dro_beta"], options["clip_ratio"], options["clip_ratio_low"]) == (
        2,
        0.5,
        0.2,
        None,
    )


def test_options_of_the_targets_arrive() -> None:
    targets = planned(
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[format,acc]",
        "algorithm.gdpo_reward_weights=[1,0.5]",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
        "algorithm.mask_truncated_responses=true",
    ).targets
    assert targets.options["gdpo_reward_keys"] == ("format", "acc")
    assert targets.options["gdpo_reward_weights"] == (1.0, 0.5)
    assert targets.kl_penalty is None
    assert planned("algorithm.use_kl_in_reward=true").targets.kl_penalty == "kl"
    assert targets.rollout_correction["rollout_rs"] == "token_k1"
    assert targets.mask_truncated


@pytest.mark.parametrize(
    ("overrides", "loss_mode", "corrects"),
    [
        ((), "vanilla", False),
        (("bypass_mode=true",), "vanilla", False),
        (("bypass_mode=true", "rollout_rs=token_k1", "rollout_rs_threshold=2"), "vanilla", True),
        (("bypass_mode=true", "loss_type=reinforce", "rollout_is=token"), "gpg", True),
    ],
)
def test_bypass_mode_corrects_in_the_objective(overrides: tuple, loss_mode: str, corrects: bool) -> None:
    plan = planned(*(f"algorithm.rollout_correction.{override}" for override in overrides))
    objective = plan.objective
    assert (objective.actor.policy_loss.loss_mode, objective.correction is not None, objective.weighted) == (
        loss_mode,
        corrects,
        False,
    )


def test_masks_by_advantage_arrive() -> None:
    """M2PO's needs the old log-probs before the update, the other one the sampler's during it."""
    key = "algorithm.rollout_correction"
    plain = planned()
    assert (plain.config.on_policy, plain.targets.m2_threshold) == (True, None)
    assert plain.objective.off_policy_threshold is None
    bounded = planned(f"{key}.m2_threshold=0.04")
    targets, objective = bounded.targets, bounded.objective
    assert bounded.config.old_log_probs_from == "actor"
    assert (targets.m2_threshold, objective.weighted) == (0.04, True)
    assert "rollout_is_weights" in objective.columns
    for mode in ("false", "true"):
        masked = planned(f"{key}.off_policy_mask_threshold=0.5", f"{key}.bypass_mode={mode}").objective
        assert (masked.off_policy_threshold, masked.weighted) == (0.5, False)
        assert "rollout_log_probs" in masked.columns
    assert "m2_threshold" not in targets.rollout_correction


def test_a_batch_of_one_optimizer_step_is_corrected_in_the_objective() -> None:
    stale = planned("trainer.max_staleness=1", f"{ACTOR}.use_kl_loss=false").objective
    assert stale.correction == {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    assert stale.columns == ("advantages", "rollout_log_probs")
    several = planned("trainer.max_staleness=1", f"{ACTOR}.ppo_epochs=2").objective
    assert (several.correction, several.weighted) == (None, True)
