"""A run on fake workers."""

from pathlib import Path

from grpo_dist.plan.commands import load_config
from grpo_dist.plan.plan import make_plan
from grpo_dist.runtime.event_loop import run
from grpo_dist.runtime.group import WorkerGroup
from grpo_dist.runtime.nodes import RestartBudget
from grpo_dist.trainer.run_prompts import load_run_prompts, template_kwargs
from grpo_dist.trainer.trainer import GRPOTrainer
from grpo_dist.workers.actor import ActorGroup
from grpo_dist.workers.gang import ReferenceGroup, TrainedGroup
from grpo_dist.workers.reward import RewardPool
from grpo_dist.workers.roles import Roles
from grpo_dist.workers.rollout import RolloutGroup
from grpo_dist.workers.scorer import RewardSettings
from tests.models import policy_folder
from tests.trainer.recorded import recorded_trainer

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == BAD:
        raise ValueError("no such thing")
    return {"score": float(len(solution_str)), "half": len(solution_str) / 2}
"""


SMALL = (
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4"),
    *("data.val_max_samples=4", "trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.save_freq=2"),
    "trainer.health.agreement.action=off",  # the fakes do not agree
)
Groups = dict[str, WorkerGroup]


def make_trainer(tmp_path: Path, groups: Groups, *overrides: str, length: int = 8, bad: int = -1) -> GRPOTrainer:
    """A trainer of 3 steps with 4 prompts x 4 responses in 2 mini-batches; with a reference where there is a group."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "reward.py").write_text(REWARD.replace("BAD", str(bad)))
    paths = (f"custom_reward_function.path={tmp_path}/reward.py", f"trainer.default_local_dir={tmp_path}/run")
    config, _ = load_config([*SMALL, *paths, *overrides])
    restarts = RestartBudget(config.trainer.max_worker_restarts)
    pool = RewardPool(groups["reward"], restarts)
    plan = make_plan(config, config.trainer.total_training_steps)
    run(pool.start([RewardSettings.of(plan, template_kwargs(config))]))
    groups["rollout"].call_all("test", "set_length", length)
    groups["actor"].call_all("test", "forget")
    rollout = RolloutGroup(groups["rollout"], restarts)
    roles = Roles({"actor": ActorGroup(groups["actor"]), "rollout": rollout, "reward": pool}, restarts)
    if "ref" in groups:
        roles.groups["ref"] = ReferenceGroup(groups["ref"], restarts)
    if config.needs_critic:
        groups["critic"].call_all("test", "forget")
        roles.groups["critic"] = TrainedGroup(groups["critic"])
    prompts, _ = load_run_prompts(config, policy_folder(config))
    return recorded_trainer(plan, roles, prompts)
