"""The printed plan and its short form; batch arithmetic by hand."""

import json
import re

import pytest
import yaml

from grpo_dist.config.load import load_command
from grpo_dist.plan.commands import COMMANDS, REWARD_MODEL, load_config
from grpo_dist.plan.text import batch_arithmetic, format_plan, format_summary
from tests.messages import says
from tests.plan.asked import load, overrides
from tests.plan.test_memory import SMOLLM2_135M

MEMORY = "memory per process (estimate)"
MICRO_BATCHES = "micro-batches per actor rank and mini-batch"
OLD = "old log-prob passes per actor rank"


def plan(*runs: str) -> str:
    return format_plan(*load_config(overrides(*runs)))


def summary(*runs: str) -> str:
    return format_summary(*load_config(overrides(*runs)))


def batch(*runs: str) -> dict[str, str]:
    return dict(batch_arithmetic(load(*runs)))


def supervised_plan(*settings: str) -> str:
    return format_plan(*load_command([*settings], REWARD_MODEL))


def row(text: str, block: str, label: str) -> str:
    """A line of a block of the plan, without its label."""
    _, _, rest = text.partition(f"\n{block}\n")
    (line,) = (line for line in rest.partition("\n\n")[0].splitlines() if line.strip().startswith(f"{label}  "))
    return line.strip().removeprefix(label).strip()


# --- the batch -------------------------------------------------------------------------------------------------------
def test_batch_arithmetic_on_eight_gpus():
    sizes = "data.train_batch_size=1024  actor.ppo_mini_batch_size=256  actor.ppo_micro_batch_size_per_gpu=24"
    assert batch("cluster=node8  actor.ppo_epochs=2", sizes) == {
        "prompts per training step": "1,024",
        "sequences per training step": "1,024 prompts * n=8 = 8,192",
        "tokens per training step": "at most 8,192 * 128 = 1,048,576",
        "sequences per engine": "2,048 (256 at once)",
        "mini-batches per pass": "4 of 256 prompts = 2,048 sequences",
        "optimizer steps per training step": "4 * ppo_epochs=2 = 8",
        "sequences per actor rank and mini-batch": "512",
        MICRO_BATCHES: "22 of 24 sequences",
        OLD: "16 of 128 sequences",
        "reference passes per ref rank": "16 of 128 sequences",
    }
    assert "reference passes per ref rank" not in batch("actor.use_kl_loss=false")


def test_ranks_that_split_sequences_count_as_one():
    """On eight GPUs four ranks train: two groups, which have a quarter of 64 prompts with 8 responses twice."""
    rows = batch(run := "GPU8  ulysses=2  actor.use_dynamic_bsz=true")
    assert rows["sequences per actor rank and mini-batch"] == "256"
    for label in (MICRO_BATCHES, "reference passes per ref rank"):
        assert rows[label] == "as many as needed with 32,768 tokens each"
    says(plan(run), "4 ranks in 2 groups")


@pytest.mark.parametrize(
    ("run", "label", "passes"),
    [
        ("actor.ppo_micro_batch_size_per_gpu=12", MICRO_BATCHES, "16 of 8 sequences (whole groups of 8)"),
        ("actor.ppo_micro_batch_size_per_gpu=5", MICRO_BATCHES, "32 of 4 sequences"),  # halves of them
        ("actor.use_dynamic_bsz=true", MICRO_BATCHES, "as many as needed with 16,384 tokens each"),
        ("actor.ppo_epochs=1", OLD, "none: on-policy, so the update computes them"),
        ("correction.bypass_mode=true", OLD, "none: the rollout log-probs are used (bypass_mode)"),
    ],
)
def test_passes_hold_whole_groups_or_tokens_or_there_are_none(run, label, passes):
    assert batch(run)[label] == passes
    if label == MICRO_BATCHES:
        says(summary(run), "16,384 tokens" if "tokens" in passes else passes)


# --- placement and memory --------------------------------------------------------------------------------------------
def test_what_a_gpu_holds_in_all():
    eight = "model=qwen3_8b  cluster=node8  data=arithmetic  trainer.dry_run=config"
    text = plan(eight, "cluster.gpu_memory_gib=80")
    assert (shared := re.search(r"a GPU with actor and ref  +([\d.]+) of 80 GiB\n", text))
    assert 40 < float(shared[1]) < 80
    assert re.search(r"a GPU with rollout  +64.0 of 80 GiB\n", text), "0.8 of it"
    says(text, "KV cache:", "80%")
    assert "GiB, too much" in plan(eight, "cluster.gpu_memory_gib=40")
    unknown = plan(eight)
    assert re.search(rf"a GPU with actor and ref  +{shared[1]} GiB\n", unknown), "of a size that nobody has said"
    says(unknown, "cluster.gpu_memory_gib=null", "cluster.gpu_memory_gib=79.1")


def test_plan_of_a_local_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    text = plan(f"model.path={tmp_path}  actors=2  trainer.dry_run=config  adv=x.py:f")
    says(text, "  algorithm:\n    adv_estimator: x.py:f\n", "23,301", "algorithm.adv_estimator=x.py", "model=hf")
    says(row(text, "placement", "actor"), "2 ranks", "weights fp32", "compute fp32")
    says(row(text, "placement", "ref"), "1 rank", "fp32")
    parts = "weights 0.251 + gradients 0.251 + optimizer 0.501 + gathered weights 0.132 + activations 0.0371 + "
    says(row(text, MEMORY, "actor"), parts, " = 1.4 GiB")
    says(text, "checkpoint 0.752 = 1.25 GiB")


def test_sizes_that_are_not_known_are_not_guessed(monkeypatch):
    run = "model.path=someone/something  data=gsm8k  cluster=node8  trainer.dry_run=config"
    text = plan(run)
    says(text, "unknown:", "8 of 8", "4 engines", "TP=1", "bfloat16", "deterministic=false")
    assert "output layer" not in text
    text = plan(run, "model.head_dtype=fp32")
    for role in ("actor", "ref", "rollout"):
        says(row(text, "placement", role), "output layer fp32")
    memory = plan("recipe=distill  ref.model.path=some/teacher  trainer.dry_run=config").partition(MEMORY)[2]
    assert re.findall(r"(\w+) +unknown: its config.json", memory) == ["ref"], "which alone runs"
    monkeypatch.setattr("grpo_dist.plan.text.model_config_at_hand", lambda path: None)
    says(row(supervised_plan("model.path=some/model"), MEMORY, "all roles"), "unknown", "config.json")


def test_idle_gpus_are_said_and_roles_that_are_not_started():
    says(plan("cluster=node8  actors=4  engines=2  refs=1"), "7 of 8", "1 idle")
    text = supervised_plan("model.path=Qwen/Qwen3-0.6B", "trainer.n_gpus_per_node=4", "cluster.world_size=3")
    says(row(text, "placement", "GPUs"), "3 of 4", "1 idle")
    says(row(plan("model.lora_rank=4"), "placement", "ref"), "not started:", "LoRA")


def test_plan_of_several_machines_says_what_each_holds():
    text = plan("cluster=multi_node  nodes=3  actors=8  engines=7  refs=1")
    held = [row(text, "placement", f"machine {number}") for number in range(3)]
    assert held == ["actor 0-7", "rollout 0-6, ref 0", "reward 0"]
    assert "machine 0" not in plan("cluster=node8")


def test_roles_that_share_gpus():
    says(plan("cluster=single_gpu"), "1 of 1", "share")
    says(summary("cluster=single_gpu"), "1 actor", "1 rollout", "1 ref", "1 GPU", "share")
    says(summary("cluster=node8"), "4 actor", "4 rollout", "4 ref", "8 GPUs", "share")
    separate = summary("cluster=node8  actor.use_kl_loss=false")
    says(separate, "4 actor", "4 rollout", "no ref", "8 GPUs")
    assert "share" not in separate


# --- all of it -------------------------------------------------------------------------------------------------------
def test_the_printed_config_has_no_secrets():
    text = plan("custom_reward_function.reward_kwargs={api_key: SECRET123, n: 7}")
    assert "SECRET123" not in text
    says(text, "api_key: '***'", "n: 7")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_printed_config_is_the_whole_config(command):
    config, notes = load_command(["trainer.seed=5"], command)
    printed = format_plan(config, notes).split("\n\n")[0].partition("\n")[2]
    assert command.schema.model_validate(yaml.safe_load(printed)) == config


def test_summary_is_short_and_keeps_the_notes():
    text = summary("actor.kl_loss_type=k1")
    assert len(text.splitlines()) == 10
    says(text, "32 prompts * n=8 = 256 sequences", "1 optimizer step", "2 actor", "1 rollout", "1 ref", "CPU")
    says(text, "note: actor_rollout_ref.actor.kl_loss_type=k1")
    assert "resolved config" not in text


def test_a_run_that_trains_one_model():
    text = supervised_plan("trainer.resume_from_path=x")
    says(row(text, "run", "algorithm"), "reward_model", "lr 0.001")
    assert row(text, "run", "model") == "builtin:tiny-qwen3"
    says(row(text, "run", "train data"), "builtin:arithmetic_pairs/train")
    assert row(text, "run", "length") == "1 epoch"
    assert row(text, "run", "logs") == "jsonl, console, tensorboard"
    assert row(text, "batch", "rows per training step") == "64"
    says(row(text, "batch", "passes of a reward_model rank"), 128, 64)
    says(row(text, "placement", "reward_model"), "2 ranks", "weights fp32", "compute fp32")
    says(row(text, MEMORY, "reward_model"), "weights", "gradients", "optimizer", "GiB")
    says(row(text, MEMORY, "reward_model, CPU memory"), "GiB")
    says(text.partition("\nnotes\n")[2], "trainer.resume_from_path=x")
    assert "optimizer" not in row(supervised_plan("trainer.val_only=true"), MEMORY, "reward_model")
    short = format_summary(*load_command([], REWARD_MODEL))
    says(short, "64 rows", 128, 64, "2 reward_model", "CPU")
    assert len(short.splitlines()) < 12


def test_steps_tokens_and_gpus_of_one_model():
    more = ("trainer.total_training_steps=7", "data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=32768")
    text = supervised_plan("model.path=Qwen/Qwen3-0.6B", "trainer.n_gpus_per_node=8", "data.val_files=null", *more)
    says(row(text, "run", "algorithm"), "lr 1e-05")
    assert (row(text, "run", "length"), row(text, "run", "validation data")) == ("7 training steps", "none")
    says(row(text, "placement", "reward_model"), "8 ranks", "weights fp32", "compute bf16")
    says(row(text, "placement", "GPUs"), "8 of 8")
    says(row(text, "batch", "passes of a reward_model rank"), "32,768")
