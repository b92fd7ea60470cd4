"""The config of `python -m grpo_dist.main`."""

from __future__ import annotations

from grpo_dist.assets import POLICY_SECTION
from grpo_dist.config.command import CONFIG_DIR, Command
from grpo_dist.config.notes import config_notes
from grpo_dist.config.rules import RULES
from grpo_dist.config.schema import RunConfig

GRPO = Command(
    module="grpo_dist.main",
    purpose="Distributed GRPO for language models.",
    examples=(
        ("train the built-in tiny model on arithmetic, on CPU", "algorithm.adv_estimator=grpo"),
        (
            "the plan, and all that would make a run on this machine fail",
            "trainer.dry_run=true",
        ),
        ("your model on your data", "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B data.train_files=my.parquet"),
        ("Qwen3-8B on GSM8K with 8 GPUs", "model=qwen3_8b data=gsm8k cluster=node8"),
        ("your reward", "custom_reward_function.path=reward.py custom_reward_function.name=compute_score"),
        (
            "no KL term, another group size, log to W&B",
            "actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.rollout.n=16 trainer.logger=wandb",
        ),
    ),
    file=CONFIG_DIR / "grpo.yaml",
    schema=RunConfig,
    rules=RULES,
    notes=config_notes,
    chosen={
        "actor_rollout_ref.model.path": ("model", "hf"),
        "data.train_files": ("data", "files"),
        "trainer.n_gpus_per_node": ("cluster", "node8"),
    },
    needed={
        "actor_rollout_ref.model.path": "Qwen/Qwen3-0.6B, or a folder",
        "data.train_files": "data/gsm8k/train.parquet",
    },
    takes_verls_keys=True,
    lora_section=POLICY_SECTION,
)
