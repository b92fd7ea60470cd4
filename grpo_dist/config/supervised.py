"""The configs of the commands that train one model on rows with known answers, and their rules."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.assets import TRAINED_MODEL_KEY
from grpo_dist.config.command import CONFIG_DIR, Command
from grpo_dist.config.model_rules import max_positions
from grpo_dist.config.model_shape import model_config_at_hand
from grpo_dist.config.notes import notes_of_a_job
from grpo_dist.config.problems import Problem, problem_between
from grpo_dist.config.rules import (
    adapter_folder_exists,
    data_files_exist,
    model_folder_exists,
    resume_path_is_set,
    something_to_validate,
)
from grpo_dist.config.schema_supervised import RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from grpo_dist.config.supervised_memory import memory_problems

_FOLDER = CONFIG_DIR / "commands"
_CHOSEN = {TRAINED_MODEL_KEY: ("model", "hf"), "data.train_files": ("data", "files")}


def the_model_exists(config: SupervisedConfig) -> Iterator[Problem]:
    """The model is there, and the adapter to go on from."""
    yield from model_folder_exists(TRAINED_MODEL_KEY, config.model.path)
    if isinstance(config, SFTConfig):
        yield from adapter_folder_exists("model", config.model.lora_adapter_path)


def every_rank_has_a_gpu(config: SupervisedConfig) -> Iterator[Problem]:
    """A rank has a GPU of its own, and copies of the weights lie on equally many ranks."""
    asked, size = config.cluster.world_size, config.engine.fsdp_size
    if config.num_gpus and asked is not None and asked > config.num_gpus:
        why = f"every rank has a GPU of its own, and there are {config.num_gpus}; lower it, or leave it null"
        yield problem_between(config, why, "cluster.world_size", "trainer.nnodes", "trainer.n_gpus_per_node")
    if size > 0 and config.world_size % size:
        why = f"{config.world_size} ranks do not split into copies of {size}; set a divisor, or -1"
        yield problem_between(config, why, "engine.fsdp_size", "cluster.world_size")


def passes_hold_the_longest_row(config: SupervisedConfig) -> Iterator[Problem]:
    """The token budget holds at least the longest conversation."""
    budget = config.data.max_token_len
    if budget is not None and budget < config.data.max_length:
        why = "a pass must hold the longest conversation; raise the first or lower the second"
        yield problem_between(config, why, "data.max_token_len_per_gpu", "data.max_length")


def the_model_takes_it(config: SupervisedConfig) -> Iterator[Problem]:
    """What the model's config.json rules out, where that is at hand."""
    found = {**(model_config_at_hand(config.model.path) or {}), **config.model.override_config}
    positions = max_positions(found)
    if positions is not None and config.data.max_length > positions[1]:
        why = f"the model has {positions[1]} positions ({positions[0]} in its config.json); lower it"
        yield problem_between(config, why, "data.max_length", TRAINED_MODEL_KEY)
    gib = config.cluster.gpu_memory_gib if config.num_gpus else None
    yield from memory_problems(config, found, gib, None, valid=is_valid)


def is_valid(config: SupervisedConfig) -> bool:
    """Whether the numbers of a changed config fit each other."""
    return not any(problem for rule in (every_rank_has_a_gpu, passes_hold_the_longest_row) for problem in rule(config))


RULES = (
    something_to_validate,
    resume_path_is_set,
    data_files_exist,
    the_model_exists,
    every_rank_has_a_gpu,
    passes_hold_the_longest_row,
    the_model_takes_it,
)


def notes(config: SupervisedConfig) -> list[str]:
    """What the user may not expect of a valid config."""
    found = []
    if config.data.val_files and config.trainer.test_freq < 0 and not config.trainer.val_only:
        before = "only before the first step" if config.trainer.val_before_train else "never"
        found.append(f"trainer.test_freq=-1: data.val_files are used {before}")
    if config.num_gpus > config.world_size:
        found.append(
            f"cluster.world_size={config.world_size}: {config.num_gpus - config.world_size} of {config.num_gpus} GPUs "
            "are idle"
        )
    engine = config.engine
    offloads = {
        "engine.param_offload": engine.param_offload,
        "engine.optimizer_offload": engine.optimizer_offload,
    }
    timeout = ("trainer.nccl_timeout", config.trainer.nccl_timeout)
    return [*found, *notes_of_a_job(config, ("optim", config.optim), offloads, timeout)]


REWARD_MODEL = Command(
    module="grpo_dist.reward_model",
    purpose="Trains a reward model on pairs of answers or on labelled steps.",
    examples=(
        ("train the built-in tiny model on pairs of sums, on CPU", ""),
        ("the plan, and all that would make a run on this machine fail", "trainer.dry_run=true"),
        (
            "your model on your pairs, on 8 GPUs",
            "model.path=Qwen/Qwen3-0.6B data.train_files=pairs.parquet trainer.n_gpus_per_node=8",
        ),
    ),
    file=_FOLDER / "reward_model/reward_model.yaml",
    shared=_FOLDER / "supervised.yaml",
    schema=RewardModelTrainingConfig,
    rules=RULES,
    notes=notes,
    chosen=_CHOSEN,
    needed={TRAINED_MODEL_KEY: "Qwen/Qwen3-0.6B, or a folder", "data.train_files": "pairs.parquet"},
)

SFT = Command(
    module="grpo_dist.sft",
    purpose="Fine-tunes a language model on conversations (SFT).",
    examples=(
        ("train the built-in tiny model on worked sums, on CPU", ""),
        ("the plan, and all that would make a run on this machine fail", "trainer.dry_run=true"),
        (
            "your model on your conversations, by LoRA, on 8 GPUs",
            "model.path=Qwen/Qwen3-8B model.lora_rank=32 data.train_files=chats.parquet trainer.n_gpus_per_node=8",
        ),
    ),
    file=_FOLDER / "sft/sft.yaml",
    shared=_FOLDER / "supervised.yaml",
    schema=SFTConfig,
    rules=RULES,
    notes=notes,
    chosen=_CHOSEN,
    needed={TRAINED_MODEL_KEY: "Qwen/Qwen3-0.6B, or a folder", "data.train_files": "chats.parquet"},
    lora_section="model",
)
