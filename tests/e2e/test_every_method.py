"""Every estimator, KL type, aggregation and policy loss trains a step on real workers, which start once."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.plugins.names import ADV_ESTIMATORS, KL_LOSS_TYPES, LOSS_AGG_MODES, LOSS_MODES
from grpo_dist.run.build import spawn_roles, start_roles
from grpo_dist.trainer.run_prompts import load_run_prompts
from grpo_dist.workers.roles import Roles
from tests.e2e.runs import PLAIN, sized
from tests.models import policy_folder
from tests.trainer.recorded import history, recorded_trainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"
SMALL = (*sized(4, n=4), *PLAIN, "trainer.log_rollouts=false", "trainer.total_training_steps=1")
# Together they make the roles give log-probs, entropies, hidden states and step masks.
EVERY_COLUMN = (
    "algorithm.adv_estimator=grpo_process",
    "algorithm.use_kl_in_reward=true",
    f"{ACTOR}.kl_loss_type=full",
    f"{ACTOR}.top_entropy_quantile=0.5",
)
DOORS = {
    # gigpo needs an agent (test_branches.py), and these actors give no gradient norms
    "algorithm.adv_estimator": [name for name in ADV_ESTIMATORS if name not in ("gigpo", "optimal_token_baseline")],
    f"{ACTOR}.kl_loss_type": KL_LOSS_TYPES,
    f"{ACTOR}.loss_agg_mode": LOSS_AGG_MODES,
    # from the second on: geo_mean beside an estimator that gives a response one advantage
    f"{ACTOR}.policy_loss.loss_mode": [*LOSS_MODES[1:], LOSS_MODES[0]],
}
# The built-in scorers declare no components; these roles have no critic.
NEEDED = {
    "algorithm.adv_estimator=gdpo": ("algorithm.gdpo_reward_keys=[acc]",),
    "algorithm.adv_estimator=gae": ("critic.enable=false",),
    "algorithm.adv_estimator=distill": ("actor_rollout_ref.ref.model.path=builtin:tiny-qwen3",),
}
# By estimator, what its row has beside the names of the doors.
BESIDE = {
    "grpo": (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_2.0"),
    "maxrl": (
        *(f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold=0.1"),
        f"{ACTOR}.entropy_coeff=0.01",
    ),
    "lite_ppo": (f"{CORRECTION}.m2_threshold=0.04", f"{CORRECTION}.off_policy_mask_threshold=0.5"),
    "a2po": (f"{ACTOR}.top_entropy_quantile=0.2",),
    "rloo": ("algorithm.filter_groups.enable=true", "algorithm.mask_truncated_responses=true"),
    "reinforce_plus_plus": (BYPASS, f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=2.0"),
    "remax": (BYPASS, f"{CORRECTION}.off_policy_mask_threshold=0.5"),
    "gae": ("actor_rollout_ref.ref.ref_model_sync_steps=1",),
    "rae": ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", f"{ACTOR}.use_kl_loss=false"),
}
WEIGHT_VERSIONS = [-1]  # that the engines have held
# The i-th name of each door, round and round: every name is there, in company.
ROWS = [
    [f"{key}={names[i % len(names)]}" for key, names in DOORS.items()] for i in range(max(map(len, DOORS.values())))
]
CASES = [[*row, *BESIDE.get(row[0].partition("=")[2], ())] for row in ROWS]
CASES.append([BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=token"])


@pytest.fixture(scope="module")
def roles(local_ray: None) -> Iterator[Roles]:
    config, _ = load_config([*SMALL, *EVERY_COLUMN])
    with ExitStack() as stack:
        plan = make_plan(config, len(CASES))
        started = spawn_roles(plan, stack)
        start_roles(plan, started)
        yield started


@pytest.mark.parametrize("overrides", CASES, ids=lambda overrides: ",".join(o.rpartition(".")[2] for o in overrides))
def test_one_step(roles: Roles, overrides: list[str], tmp_path: Path) -> None:
    needed = [more for override in overrides for more in NEEDED.get(override, ())]
    config, _ = load_config([*SMALL, f"trainer.default_local_dir={tmp_path}", *overrides, *needed])
    prompts, _ = load_run_prompts(config, policy_folder(config))
    trainer = recorded_trainer(make_plan(config, 1), roles, prompts)
    trainer.weight_version = WEIGHT_VERSIONS[-1]  # the engines take newer weights only
    trainer.fit()
    WEIGHT_VERSIONS.append(trainer.weight_version)
    step = history(trainer)[-1]
    assert step["step"] == 1
    assert all(math.isfinite(value) for value in step.values()), step
    bypass = config.algorithm.rollout_correction.bypass_mode
    difference = abs(step["actor/ppo_kl"]) if bypass else step["training/rollout_probs_diff_max"]
    assert difference < 1e-3, "the sampler had the trainer's weights"
    assert step["actor/grad_norm"] > 0 or step["critic/zero_variance_groups"] == 1
    assert ("actor/kl_loss" in step) == config.actor_rollout_ref.actor.use_kl_loss
