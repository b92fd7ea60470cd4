"""What parts of the config reach what parts of the run."""

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.config.command import AnyCommand
from grpo_dist.config.keys import leaf_keys
from grpo_dist.config.load import load_command
from grpo_dist.config.schema import RunConfig
from grpo_dist.plan import roles
from grpo_dist.plan.commands import COMMANDS, GRPO, REWARD_MODEL, SFT
from grpo_dist.plan.plan import Plan, make_plan
from grpo_dist.plan.roles import reference_columns, table_of
from grpo_dist.run.build import time_limits
from grpo_dist.trainer.run_prompts import template_kwargs, workers_agent
from grpo_dist.workers.scorer import RewardSettings
from tests.adapters import write_adapter
from tests.plan.asked import load
from tests.worker_settings import agent

WEIGHTED = (
    "custom_reward_function.path=grpo_dist.rewards.weighted  "
    "custom_reward_function.reward_kwargs={functions: [{path: grpo_dist.rewards.reward_model}, {path: null}]}"
)
DISTILLED = "recipe=distill  TEACHER"


def ranks(run: str, role: str) -> Any:
    """What the ranks of a role are built from, in a run of ten steps."""
    return make_plan(load(run), 10).ranks(role)


def planned(*runs: str) -> Plan[RunConfig]:
    return make_plan(load(*runs))


def reward_settings(*runs: str) -> Any:
    plan = planned(*runs)
    return RewardSettings.of(plan, template_kwargs(plan.config))


# --- engines ---------------------------------------------------------------------------------------------------------
def test_what_engines_get_of_lora() -> None:
    apart, rank = "model.lora.merge=false  model.lora_alpha=8", "model.lora_rank=4"
    for run, sends in (("", False), (apart, False), (rank, False), (f"{apart}  {rank}", True)):
        assert ranks(run, "actor").model.sends_factors == sends
        lora = planned(run).engine(0).lora
        assert (lora and (lora.lora_rank, lora.lora_alpha)) == ((4, 8.0) if sends else None)


def test_sampling_arrives() -> None:
    """What ends or forbids text holds for validation too, what cuts the distribution does not."""
    plan = planned("rollout.min_p=0.1  rollout.min_tokens=3  rollout.stop=END  rollout.bad_words=[x,y]")
    training, validation = plan.sampling, plan.val_sampling
    assert (training.n, training.min_p, training.min_tokens, training.max_tokens) == (8, 0.1, 3, 64)
    assert (training.stop, training.bad_words) == (("END",), ("x", "y"))
    assert (validation.n, validation.temperature, validation.min_p, validation.min_tokens) == (1, 0.0, 0.0, 3)
    assert (validation.stop, validation.seed) == (training.stop, None)
    keys = ("do_sample=true", "n=2", "temperature=1.5", "top_k=3", "top_p=0.5")
    sampled = planned(*(f"rollout.val_kwargs.{each}" for each in keys)).val_sampling
    assert (sampled.n, sampled.temperature, sampled.top_k, sampled.top_p, sampled.seed) == (2, 1.5, 3, 0.5, 1)
    assert planned("rollout.val_kwargs.temperature=1.5").val_sampling.temperature == 0, "without do_sample"
    assert (plan.engine(0).needs_tokenizer, planned().engine(0).needs_tokenizer) == (True, False)


def test_an_agent_loop_arrives_with_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = "from grpo_dist.agents import AgentLoop\n\nclass Mine(AgentLoop):\n    def __init__(self, depth): ...\n"
    (tmp_path / "loop.py").write_text(f"{loop}    async def run(self, episode): ...\n")
    config = load("loop=loop.py:Mine  rollout.agent.agent_kwargs={depth: 2}  rollout.agent.timeout_s=7")
    settings = make_plan(config).engine(0, workers_agent(config))
    assert settings.rollout.agent == agent(f"{tmp_path}/loop.py:Mine", {"depth": 2}, timeout_s=7)
    assert settings.needs_tokenizer, "turns end at texts"


def test_long_context_settings_arrive_at_the_engine_and_the_trainer() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}
    run = "data.max_response_length=3072  rollout.max_model_len=4096  rollout.max_num_batched_tokens=2048  "
    run += "rollout.max_num_seqs=16  model.override_config.max_position_embeddings=4096  "
    run += f"model.override_config.rope_parameters={{{', '.join(f'{name}: {value}' for name, value in rope.items())}}}"
    engine, policy = planned(run).engine(0), ranks(run, "actor").model
    assert (engine.max_model_len, engine.rollout.max_num_batched_tokens) == (4096, 2048)
    assert engine.rollout.enable_chunked_prefill
    wanted = {"max_position_embeddings": 4096, "rope_parameters": rope}
    assert engine.model.override_config == policy.model.override_config == wanted


def test_how_weights_reach_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no two processes on one GPU, and Linux under Windows has no memory that processes share."""
    expected = {
        "": "object_store",
        "cluster=single_gpu": "ipc",
        "cluster=node8  sync.backend=naive": "broadcast",
        "cluster=node8  sync.backend=object_store": "object_store",
        "sync.backend=nccl": "broadcast",
    }
    assert {run: planned(run).transport for run in expected} == expected
    monkeypatch.setattr(roles, "is_wsl", lambda: True)
    assert planned("cluster=single_gpu").transport == "object_store"


# --- ranks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("run", "objective", "reference"),
    [
        ("", "advantages ref_log_probs", "ref_log_probs"),
        ("actor.ppo_epochs=2", "old_log_probs advantages ref_log_probs", "ref_log_probs"),
        ("actor.use_kl_loss=false", "advantages", ""),
        ("actor.kl_loss_type=full", "advantages ref_hidden_states", "ref_hidden_states"),
        ("actor.kl_loss_type=full  algorithm.use_kl_in_reward=true",
         "old_log_probs advantages ref_hidden_states", "ref_log_probs ref_hidden_states"),
        ("actor.use_kl_loss=false  correction.rollout_is=token  loss=kl_cov",
         "old_log_probs advantages rollout_is_weights selected_tokens", ""),
    ],
)  # fmt: skip
def test_columns_follow_the_objective(run: str, objective: str, reference: str) -> None:
    plan = planned(run)
    assert plan.objective.columns == tuple(objective.split())
    assert reference_columns(plan.config) == tuple(reference.split())
    assert plan.config.needs_reference == bool(reference)


def test_the_roles_get_what_they_need() -> None:
    run = "actor.top_entropy_quantile=0.2  actor.kl_loss_type=full  fsdp_size=1"
    actor, ref = ranks(run, "actor"), ranks(run, "ref")
    assert actor.columns == ("old_log_probs", "old_entropies")
    assert (actor.keeps_output_layer, ref.keeps_output_layer, ref.optimizer) == (True, False, None)
    sizes = [rank.model.fsdp_config.fsdp_size for rank in (actor, ref)]
    assert sizes == [1, -1], "copies of the weights are the actor's matter"
    actor = ranks("adv=optimal_token_baseline", "actor")
    assert actor.columns == ("old_log_probs", "old_gradient_norms")
    assert ranks("sync.update_weights_bucket_megabytes=4096", "actor").weight_bucket_bytes == 4 << 30


def test_activations_of_what_trains_are_offloaded() -> None:
    run = "recipe=ppo  model.enable_gradient_checkpointing=true  model.enable_activation_offload=true"
    policy, critic, ref = (ranks(run, role).model.layers for role in ("actor", "critic", "ref"))
    assert (policy.enable_activation_offload, critic.enable_activation_offload, ref) == (True, True, None)


@pytest.mark.parametrize("lora", ["", "model.lora_rank=2"])
def test_a_teacher_is_another_model_beside_any_policy(lora: str) -> None:
    own = "+ref.model.override_config.rope_theta=5  +model.override_config.attention_dropout=0.5"
    run = f"{DISTILLED}  {own}  {lora}"
    actor, ref, plan = ranks(run, "actor"), ranks(run, "ref"), planned(run)
    assert (plan.place.world_sizes["ref"], plan.config.actor_is_reference) == (1, False)
    assert (actor.reference_columns, actor.keeps_output_layer) == ((), False), "the teacher sends its own"
    assert (ref.columns, ref.model.lora, ref.optimizer) == (("ref_hidden_states",), None, None)
    section = "actor_rollout_ref.ref.model"
    assert (ref.model.key, ref.model.section) == (f"{section}.path", section)
    assert ref.model.model.override_config == {"rope_theta": 5}
    assert not ref.model.model.trust_remote_code
    assert actor.model.model.override_config == {"attention_dropout": 0.5}


def test_the_reward_model_is_another_model_that_only_runs_forward() -> None:
    run = "SCORER  reward_model.max_length=300  reward_model.model.input_tokenizer=null"
    found = ranks(f"{run}  model.lora_rank=2  model.enable_gradient_checkpointing=true", "reward_model")
    assert (found.model.num_labels, found.model.key) == (1, "reward_model.model.path")
    assert (found.model.lora, found.optimizer, found.model.layers) == (None, None, None)
    assert (found.section.max_length, found.model.max_model_len) == (300, 300)
    tokenizers = [settings.section.model.input_tokenizer for settings in (found, ranks("SCORER", "reward_model"))]
    assert tokenizers == [None, "builtin:tiny-qwen3"]


def test_the_critic_trains_whole_with_an_optimizer_and_limits_of_its_own() -> None:
    run = "recipe=ppo  critic.ppo_mini_batch_size=8  critic.optim.lr_warmup_steps_ratio=0.5  critic.grad_clip=2  "
    run += "critic.cliprange_value=0.3  critic.loss_agg_mode=token-sum  critic.ppo_micro_batch_size_per_gpu=5  "
    run += "critic.forward_micro_batch_size_per_gpu=7  model.lora_rank=2  "
    run += "critic.model.enable_gradient_checkpointing=true  critic.model.fsdp_config.optimizer_offload=true"
    found = ranks(run, "critic")
    model = found.model
    assert (model.num_labels, model.small_new_head, model.new_head_seed, model.key) == (1, True, 1, "critic.model.path")
    assert (model.lora, model.layers.enable_gradient_checkpointing, model.optimizer_offload) == (None, True, True)
    assert (found.columns, found.grad_clip) == (("values",), 2)
    assert (found.update.micro_batch_size, found.forward.micro_batch_size) == (5, 7)
    assert found.update.max_token_len is found.forward.max_token_len is None
    assert (found.total_steps, found.optimizer.warmup_steps(40)) == (40, 20), "4 mini-batches a step"
    plan = planned(run)
    loss = plan.value_objective
    assert (loss.section.cliprange_value, loss.section.loss_agg_mode, loss.loss_scale_factor) == (0.3, "token-sum", 64)
    assert (plan.targets.has_values, planned("recipe=ppo  critic.enable=false").targets.has_values) == (True, False)


DYNAMIC = "actor.use_dynamic_bsz=true  actor.ppo_max_token_len_per_gpu=4000"


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("", (None, None, None)),
        (DYNAMIC, (4000, 4000, 4000)),
        (f"{DYNAMIC}  rollout.log_prob_max_token_len_per_gpu=9000", (4000, 9000, 4000)),
        (f"{DYNAMIC}  ref.log_prob_use_dynamic_bsz=false", (4000, 4000, None)),
        ("ref.log_prob_use_dynamic_bsz=true", (None, None, 16384)),
    ],
)
def test_token_budgets_follow_the_actors_unless_set(run: str, expected: tuple[int | None, ...]) -> None:
    actor, ref = ranks(run, "actor"), ranks(run, "ref")
    assert (actor.update.max_token_len, actor.forward.max_token_len, ref.forward.max_token_len) == expected


def test_the_layout_is_the_same_for_all_roles() -> None:
    shown = {"": "shared", "actor.use_prefix_grouper=false": "packed", "model.use_remove_padding=false": "padded"}
    for run, layout in shown.items():
        assert {ranks(run, role).model.layout for role in ("actor", "ref")} == {layout}


def test_the_policy_and_its_own_start_replay_experts_and_a_teacher_does_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    replay = f"actor.router_replay.mode=R3  model.path={tmp_path}"
    for run, actor, ref in (("", False, False), (replay, True, True), (f"{replay}  TEACHER", True, False)):
        found = [ranks(run, role).model.replays_routes for role in ("actor", "ref")]
        assert [*found, planned(run).engine(0).records_routes] == [actor, ref, actor]


# --- rewards ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("run", "needed", "function"),
    [
        ("", True, None),
        ("SCORER", False, "grpo_dist.rewards.reward_model"),
        (f"SCORER  {WEIGHTED}", True, "grpo_dist.rewards.weighted"),
        (DISTILLED, False, "grpo_dist.rewards.optional"),
        (f"{DISTILLED}  {WEIGHTED}  SCORER", True, "grpo_dist.rewards.weighted"),
        (f"{DISTILLED}  adv=grpo", True, None),
    ],
)
def test_rows_need_a_ground_truth_where_a_built_in_scorer_scores(run: str, needed: bool, function: str | None) -> None:
    assert (load(run).needs_ground_truth, reward_settings(run).function_path) == (needed, function)


def test_what_a_policy_that_teaches_itself_gives_to_whom() -> None:
    run = "recipe=sdpo  +data.apply_chat_template_kwargs.enable_thinking=false"
    objective, reward = planned(run).objective, reward_settings(run)
    assert objective.teaches_itself
    assert {"ref_hidden_states", "teacher_mask"} <= {*objective.columns}
    assert (reward.self_distillation.longest_prompt, reward.template_kwargs) == (None, {"enable_thinking": False})
    limited = reward_settings("recipe=sdpo  algorithm.self_distillation.longest_prompt=99").self_distillation
    assert limited.longest_prompt == 99
    assert (reward_settings().self_distillation, planned().objective.teaches_itself) == (None, False)


def test_what_else_the_scorer_is_told() -> None:
    assert (reward_settings().overlong_penalty, reward_settings().by_turn) == (None, False)
    penalty = reward_settings("reward.overlong_buffer.enable=true  reward.overlong_buffer.len=16").overlong_penalty
    assert (penalty.max_length, penalty.buffer, penalty.factor) == (64, 16, 1.0)
    url = "rollout.agent.agent_kwargs={url: 'http://127.0.0.1:1/x'}"
    assert reward_settings("loop=external  algorithm.adv_estimator=gigpo", url).by_turn


# --- targets and losses ----------------------------------------------------------------------------------------------
def test_options_of_losses_and_targets_arrive() -> None:
    loss = planned("actor.tau_pos=2  actor.policy_loss.dro_beta=0.5").objective
    wanted = {"tau_pos": 2, "dro_beta": 0.5, "clip_ratio": 0.2, "clip_ratio_low": None}
    assert {name: loss.options[name] for name in wanted} == wanted
    assert loss.actor.loss_scale_factor == 64, "the longest response"
    assert planned("actor.loss_scale_factor=100").objective.actor.loss_scale_factor == 100
    targets = planned(
        "adv=gdpo  gdpo_reward_keys=[format,acc]  gdpo_reward_weights=[1,0.5]",
        "correction.rollout_rs=token_k1  correction.rollout_rs_threshold=2  algorithm.mask_truncated_responses=true",
    ).targets
    gdpo = [targets.options[f"gdpo_reward_{name}"] for name in ("keys", "weights")]
    assert gdpo == [("format", "acc"), (1.0, 0.5)]
    assert (targets.rollout_correction["rollout_rs"], targets.mask_truncated) == ("token_k1", True)
    assert (targets.kl_penalty, planned("algorithm.use_kl_in_reward=true").targets.kl_penalty) == (None, "kl")


@pytest.mark.parametrize(
    ("more", "loss_mode", "corrects"),
    [
        ("", "vanilla", False),
        ("correction.rollout_rs=token_k1  correction.rollout_rs_threshold=2", "vanilla", True),
        ("correction.loss_type=reinforce  correction.rollout_is=token", "gpg", True),
    ],
)
def test_bypass_mode_corrects_in_the_objective(more: str, loss_mode: str, corrects: bool) -> None:
    objective = planned("correction.bypass_mode=true", more).objective
    assert (objective.actor.policy_loss.loss_mode, objective.correction is not None) == (loss_mode, corrects)
    assert not objective.weighted


def test_masks_by_advantage_arrive() -> None:
    """M2PO's needs the old log-probs before the update, the other one the sampler's during it."""
    plain, bounded = planned(), planned("correction.m2_threshold=0.04")
    assert (plain.config.on_policy, plain.targets.m2_threshold) == (True, None)
    assert plain.objective.off_policy_threshold is None
    assert bounded.config.old_log_probs_from == "actor"
    assert (bounded.targets.m2_threshold, bounded.objective.weighted) == (0.04, True)
    assert "rollout_is_weights" in bounded.objective.columns
    assert "m2_threshold" not in bounded.targets.rollout_correction
    for mode in ("false", "true"):
        masked = planned(f"correction.off_policy_mask_threshold=0.5  correction.bypass_mode={mode}").objective
        assert (masked.off_policy_threshold, masked.weighted) == (0.5, False)
        assert "rollout_log_probs" in masked.columns


def test_a_batch_of_one_optimizer_step_is_corrected_in_the_objective() -> None:
    stale = planned("trainer.max_staleness=1  actor.use_kl_loss=false").objective
    bounds = {"rollout_is_threshold": 2.0, "rollout_rs": None, "rollout_rs_threshold": None}
    assert stale.correction == {"rollout_is": "token"} | bounds
    assert stale.columns == ("advantages", "rollout_log_probs")
    several = planned("trainer.max_staleness=1  actor.ppo_epochs=2").objective
    assert (several.correction, several.weighted) == (None, True)


def test_time_limits_by_stage() -> None:
    stages = "trainer.stage_timeout_s.generate=7  trainer.stage_timeout_s.update=null"
    limits = time_limits(load("trainer.worker_timeout_s=100", stages))
    assert [limits.of(stage) for stage in ("generate", "update", "start")] == [7.0, 100.0, 900.0]


# --- the tables of roles, and ranks of a command that trains one model
ALL = ("recipe=ppo", "reward_model.enable=true", "reward_model.model.path=builtin:tiny-qwen3")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_key_of_the_advice_is_one_of_the_command(command: AnyCommand) -> None:
    config, _ = load_command(list(ALL) if command is GRPO else [], command)
    advised = [
        make_plan(config).model(row, row.model(config)).room
        for row in table_of(config).values()
        if (row.present(config) or command is GRPO) and row.model(config) is not None
    ]
    assert len(advised) == (4 if command is GRPO else 1)
    for advice in advised:
        keys = re.findall(r"\w+(?:\.\w+)+", advice)
        assert len(keys) >= 2
        assert set(keys) <= set(leaf_keys(command.schema))


# --- ranks -----------------------------------------------------------------------------------------------------------
def settings(*overrides: str, command: Any = REWARD_MODEL) -> Any:
    config = load_command([*overrides], command)[0]
    return make_plan(config, 100).ranks(config.role)


def test_the_head_of_a_reward_model_is_drawn_with_the_runs_seed_and_sft_may_train_factors(tmp_path: Path) -> None:
    model = settings("trainer.seed=7", "data.seed=9").model
    assert (model.num_labels, model.new_head_seed, model.small_new_head, model.lora) == (1, 7, False, None)
    assert (model.key, model.section) == ("model.path", "model")
    model = settings(command=SFT).model
    assert (model.num_labels, model.new_head_seed, model.lora) == (0, None, None)
    lora = settings("model.lora_rank=4", "model.lora_alpha=8", command=SFT).model.lora
    assert (lora.lora_rank, lora.lora_alpha, lora.targets, lora.lora_adapter_path) == (4, 8.0, "all-linear", None)
    adapter = f"model.lora_adapter_path={write_adapter(tmp_path)}"
    lora = settings(adapter, "model.path=owner/name", command=SFT).model.lora
    assert (lora.lora_adapter_path, lora.path) == (str(tmp_path), "owner/name")


@pytest.mark.parametrize(("steps", "ratio", "warmup"), [(-1, 0.25, 25), (3, 0.25, 3), (0, 0.25, 0), (-1, 0, 0)])
def test_warmup(steps: int, ratio: float, warmup: int) -> None:
    found = settings(f"optim.lr_warmup_steps={steps}", f"optim.lr_warmup_steps_ratio={ratio}")
    assert (found.optimizer.warmup_steps(found.total_steps), found.total_steps) == (warmup, 100)


def test_numbers_of_the_optimizer_of_passes_and_of_memory() -> None:
    found = settings(
        *("optim.lr=3e-4", "optim.betas=[0.8,0.95]", "optim.clip_grad=0.5", "data.micro_batch_size_per_gpu=6"),
        *("engine.param_offload=true", "engine.optimizer_offload=true", "engine.defer_grad_sync=true"),
        *("engine.dtype=bf16", "engine.fsdp_size=1"),
    )
    assert (found.optimizer.lr, found.optimizer.betas, found.grad_clip) == (3e-4, (0.8, 0.95), 0.5)
    assert (found.update.micro_batch_size, found.update.max_token_len) == (6, None)
    model, shards = found.model, found.model.fsdp_config
    assert (shards.param_offload, model.optimizer_offload, shards.defer_grad_sync) == (True, True, True)
    assert (model.model_dtype, model.compute_dtype, shards.fsdp_size) == ("fp32", "bf16", 1)
    by_tokens = settings("data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=99")
    assert by_tokens.update.max_token_len == 99
    layouts = [settings(f"model.use_remove_padding={value}").model.layout for value in ("true", "false")]
    assert layouts == ["shared", "padded"]
