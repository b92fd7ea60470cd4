"""The commands that train, a row each: the config that a command takes, its rows, and its trainer.

Everything else is the same for all of them: `main.py` checks the config and shows the plan, `run/run.py`
starts what the table of roles (`plan/roles.py`) says for that config, and trains.
"""

from __future__ import annotations

from typing import Any

from grpo_dist.assets import POLICY_SECTION, TRAINED_MODEL_KEY
from grpo_dist.config.command import CONFIG_DIR, AnyCommand, Command
from grpo_dist.config.schema import RunConfig
from grpo_dist.config.schema_job import JobConfig, RewardModelTrainingConfig, SFTConfig
from grpo_dist.plan import model_rules, placement, rules
from grpo_dist.plan.memory import memory_notes

_TRAINER = "grpo_dist.trainer"
_PLAN = ("the plan, and all that would make a run on this machine fail", "trainer.dry_run=true")

GRPO = Command(
    name="train",
    purpose="Distributed GRPO for language models.",
    examples=(
        ("train the built-in tiny model on arithmetic, on CPU", "algorithm.adv_estimator=grpo"),
        _PLAN,
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
    rules=(
        *(rules.job_rules, rules.between_values, *placement.PLACEMENT_RULES, rules.engine_takes_it),
        *(model_rules.models_take_it, rules.custom_code_exists, rules.packages_are_installed),
    ),
    notes=(
        *(rules.surprises, rules.truncated_samples, rules.engine_notes, model_rules.experts_stay_frozen),
        *(rules.code_is_not_tried, memory_notes, rules.job_notes),
    ),
    load=f"{_TRAINER}.run_prompts:load",
    trainer=f"{_TRAINER}.trainer:GRPOTrainer",
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


# What the commands that train one model on rows with known answers have in common.
_SUPERVISED: dict[str, Any] = {
    "shared": CONFIG_DIR / "commands" / "supervised.yaml",
    "rules": (
        *(rules.job_rules, placement.roles_fit_on_the_gpus, placement.ranks_are_divided),
        *(placement.passes_hold_the_longest_row, model_rules.models_take_it, rules.packages_are_installed),
    ),
    "notes": (memory_notes, rules.job_notes),
    "load": f"{_TRAINER}.supervised.rows:load",
    "trainer": f"{_TRAINER}.supervised.trainer:SupervisedTrainer",
    "chosen": {TRAINED_MODEL_KEY: ("model", "hf"), "data.train_files": ("data", "files")},
}
SFT = Command(
    name="sft",
    purpose="Fine-tunes a language model on conversations (SFT).",
    examples=(
        ("train the built-in tiny model on worked sums, on CPU", ""),
        _PLAN,
        (
            "your model on your conversations, by LoRA, on 8 GPUs",
            "model.path=Qwen/Qwen3-8B model.lora_rank=32 data.train_files=chats.parquet trainer.n_gpus_per_node=8",
        ),
    ),
    file=CONFIG_DIR / "commands" / "sft" / "sft.yaml",
    schema=SFTConfig,
    needed={TRAINED_MODEL_KEY: "Qwen/Qwen3-0.6B, or a folder", "data.train_files": "chats.parquet"},
    lora_section="model",
    **_SUPERVISED,
)
REWARD_MODEL = Command(
    name="reward-model",
    purpose="Trains a reward model on pairs of answers or on labelled steps.",
    examples=(
        ("train the built-in tiny model on pairs of sums, on CPU", ""),
        _PLAN,
        (
            "your model on your pairs, on 8 GPUs",
            "model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet trainer.n_gpus_per_node=8",
        ),
    ),
    file=CONFIG_DIR / "commands" / "reward_model" / "reward_model.yaml",
    schema=RewardModelTrainingConfig,
    needed={TRAINED_MODEL_KEY: "Qwen/Qwen3-0.6B, or a folder", "data.train_files": "pairs.parquet"},
    **_SUPERVISED,
)
COMMANDS: dict[str, AnyCommand] = {command.name: command for command in (GRPO, SFT, REWARD_MODEL)}


def command_of(config: JobConfig) -> AnyCommand:
    """Return the command that this config is of."""
    return next(command for command in COMMANDS.values() if isinstance(config, command.schema))


def load_config(overrides: list[str]) -> tuple[RunConfig, list[str]]:
    """Return the config of `grpo-dist train`, and the notes on it; see `load_command`."""
    from grpo_dist.config.load import load_command  # Hydra: the help of keys does without

    return load_command(overrides, GRPO)
