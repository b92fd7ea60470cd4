"""The plan: batch arithmetic by hand, memory of models whose size is known, the printed text."""

import json
import re

import pytest
import transformers
import yaml

from grpo_dist.config.load import load_command
from grpo_dist.plan.commands import COMMANDS, REWARD_MODEL, load_config
from grpo_dist.plan.memory import kv_cache_tokens, memory_estimate
from grpo_dist.plan.model_shape import model_config_at_hand, model_shape
from grpo_dist.plan.text import batch_arithmetic, format_plan, format_summary
from grpo_dist.sizes import GIB
from tests.messages import says
from tests.worker_settings import lora

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2_135M = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def load(*overrides):
    return load_config(list(overrides))


def test_batch_arithmetic_on_eight_gpus():
    config, _ = load(
        "cluster=node8",
        "data.train_batch_size=1024",
        f"{ACTOR}.ppo_mini_batch_size=256",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=24",
        f"{ACTOR}.ppo_epochs=2",
    )
    assert dict(batch_arithmetic(config)) == {
        "prompts per training step": "1,024",
        "sequences per training step": "1,024 prompts * n=8 = 8,192",
        "tokens per training step": "at most 8,192 * 128 = 1,048,576",
        "sequences per engine": "2,048 (256 at once)",
        "mini-batches per pass": "4 of 256 prompts = 2,048 sequences",
        "optimizer steps per training step": "4 * ppo_epochs=2 = 8",
        "sequences per actor rank and mini-batch": "512",
        "micro-batches per actor rank and mini-batch": "22 of 24 sequences",
        "old log-prob passes per actor rank": "16 of 128 sequences",
        "reference passes per ref rank": "16 of 128 sequences",
    }


def test_ranks_that_split_sequences_count_as_one():
    """On eight GPUs four ranks train: two groups, which have a quarter of 64 prompts with 8 responses twice."""
    split = f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.use_dynamic_bsz=true"
    config, _ = load("cluster=node8", "data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64", *split)
    rows = dict(batch_arithmetic(config))
    assert rows["sequences per actor rank and mini-batch"] == "256"
    assert rows["micro-batches per actor rank and mini-batch"] == "as many as needed with 32,768 tokens each"
    assert rows["reference passes per ref rank"] == "as many as needed with 32,768 tokens each"
    plan = format_plan(config, [])
    says(plan, "4 ranks in 2 groups")


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=12"], "16 of 8 sequences (whole groups of 8)"),  # whole groups of n=8
        ([f"{ACTOR}.ppo_micro_batch_size_per_gpu=5"], "32 of 4 sequences"),  # halves of them
        ([f"{ACTOR}.use_dynamic_bsz=true"], "as many as needed with 16,384 tokens each"),
    ],
)
def test_passes_hold_whole_groups_or_tokens(overrides, passes):
    config, notes = load(*overrides)
    assert dict(batch_arithmetic(config))["micro-batches per actor rank and mini-batch"] == passes
    says(format_summary(config, notes), "16,384 tokens" if "tokens" in passes else passes)


def test_no_reference_row_without_reference():
    config, _ = load(f"{ACTOR}.use_kl_loss=false")
    assert "reference passes per ref rank" not in dict(batch_arithmetic(config))


@pytest.mark.parametrize(("model", "billions"), [(QWEN3_8B, 8.1907), (SMOLLM2_135M, 0.134515)])
def test_parameters_of_known_models(model, billions):
    # transformers counts 8,190,735,360 and 134,515,008; Qwen3's q and k norms are left out here.
    assert model_shape(model).num_parameters == pytest.approx(billions * 1e9, rel=1e-4)


def test_parameters_of_experts():
    # Qwen3-30B-A3B; transformers counts 30,532,122,624.
    model = QWEN3_8B | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
        "moe_intermediate_size": 768,
    }  # fmt: skip
    assert model_shape(model).num_parameters == pytest.approx(30.53e9, rel=1e-3)


def test_other_architectures_are_unknown():
    assert model_shape({"n_embd": 768, "n_layer": 12}) is None
    assert memory_estimate(load()[0], None) is None


def test_memory_of_qwen3_8b_on_eight_gpus():
    config, _ = load("model=qwen3_8b", "cluster=node8", "data.train_batch_size=32")
    actor, rollout, ref = memory_estimate(config, QWEN3_8B)
    count = model_shape(QWEN3_8B).num_parameters
    assert dict(actor.parts)["weights"] == pytest.approx(count * 4 / 4 / GIB)
    copies, *_ = memory_estimate(
        load("model=qwen3_8b", "cluster=node8", "data.train_batch_size=32", f"{ACTOR}.fsdp_config.fsdp_size=2")[0],
        QWEN3_8B,
    )
    assert dict(copies.parts)["weights"] == pytest.approx(count * 4 / 2 / GIB)
    assert dict(actor.parts)["optimizer"] == pytest.approx(count * 8 / 4 / GIB)
    assert actor.host["a copy for a checkpoint"] == pytest.approx(count * 12 / 4 / GIB)
    assert rollout.parts["weights"] == pytest.approx(count * 2 / GIB)
    assert rollout.parts["KV cache of one sequence"] == pytest.approx(128 * 144 * 2**10 / GIB)
    says(format_plan(config, []), "KV cache:", "80%")
    assert ref.parts["weights"] == pytest.approx(count * 2 / 4 / GIB), "it has as many ranks as the actor"
    config, _ = load("model=qwen3_8b", "cluster=node8", "data.train_batch_size=32", "cluster.ref_world_size=1")
    *_, ref = memory_estimate(config, QWEN3_8B)
    assert ref.parts["weights"] == pytest.approx(count * 2 / GIB)
    assert kv_cache_tokens(config, QWEN3_8B) is None


def test_what_a_gpu_holds_in_all():
    """With the actor's worst moment, and the share of an engine; "too much" where that is more than there is."""
    eight = ["model=qwen3_8b", "cluster=node8", "data=arithmetic", "trainer.dry_run=config"]
    text = format_plan(*load(*eight, "cluster.gpu_memory_gib=80"))
    assert (shared := re.search(r"a GPU with actor and ref  +([\d.]+) of 80 GiB\n", text))
    assert 40 < float(shared[1]) < 80
    assert re.search(r"a GPU with rollout  +64.0 of 80 GiB\n", text), "0.8 of it"
    assert "GiB, too much" in format_plan(*load(*eight, "cluster.gpu_memory_gib=40"))
    unknown = format_plan(*load(*eight))
    assert re.search(rf"a GPU with actor and ref  +{shared[1]} GiB\n", unknown), "of a size that nobody has said"
    says(unknown, "cluster.gpu_memory_gib=null", "cluster.gpu_memory_gib=79.1")


def test_kv_cache_of_a_given_size():
    config, _ = load("cluster=node8", f"{ROLLOUT}.kv_cache_memory_gib=9", f"{ROLLOUT}.tensor_model_parallel_size=2")
    # 2 (key, value) * 36 layers * 8 heads * 128 values * 2 bytes = 144 KiB per token, on two GPUs.
    assert kv_cache_tokens(config, QWEN3_8B) == 2 * 9 * 2**30 // (144 * 2**10)


def test_memory_with_lora_is_that_of_its_factors(tmp_path):
    """Gradients and optimizer states only for what is trained: 2 matrices of rank 4 beside each one that peft finds."""
    from grpo_dist.engines.train.lora import add_lora
    from tests.models import random_model

    folder = random_model("Llama", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    whole = sum(parameter.numel() for parameter in model.parameters())
    add_lora(model, lora())
    factors = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    changes = ("actor_rollout_ref.model.lora_rank=4", f"actor_rollout_ref.model.path={folder}")
    config, _ = load(*changes, "cluster.actor_world_size=1")
    actor, *others = memory_estimate(config, json.loads((tmp_path / "config.json").read_text()))
    found = {name: round(gib * GIB / 4) for name, gib in actor.states.items()}
    assert found["weights"] == whole + factors
    assert found["gradients"] == factors
    assert found["optimizer"] == 2 * factors
    assert [role.role for role in others] == ["rollout"], "the actor without its factors is the reference"
    says(format_plan(config, []), "not started:", "LoRA")


@pytest.mark.parametrize(
    ("override", "passes"),
    [
        (f"{ACTOR}.ppo_epochs=1", "none: on-policy, so the update computes them"),
        ("algorithm.rollout_correction.bypass_mode=true", "none: the rollout log-probs are used (bypass_mode)"),
    ],
)
def test_where_old_log_probs_come_from(override, passes):
    assert dict(batch_arithmetic(load(override)[0]))["old log-prob passes per actor rank"] == passes


def test_numbers_of_the_engines_are_the_engines():
    from grpo_dist.engines.train import lm_head
    from grpo_dist.engines.vllm import arguments
    from grpo_dist.plan.memory import CHUNK_LOGITS, CPU_KV_CACHE_GIB

    assert arguments.CPU_KV_CACHE_GIB == CPU_KV_CACHE_GIB
    assert lm_head.CHUNK_LOGITS == CHUNK_LOGITS


def test_plan_of_a_local_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2_135M))
    path, two = f"actor_rollout_ref.model.path={tmp_path}", "cluster.actor_world_size=2"
    config, notes = load(path, two, "trainer.dry_run=config", "data.val_files=x.json")
    text = format_plan(config, notes)
    for part in (
        "  algorithm:\n    adv_estimator: grpo\n",
        "actor               2 ranks, weights fp32, compute fp32",
        "ref                 1 rank, fp32",
        "weights 0.251 + gradients 0.251 + optimizer 0.501 + gathered weights 0.132 + activations 0.0371 + ",
        " = 1.4 GiB",
        "checkpoint 0.752 = 1.25 GiB",
        "23,301",
        "data.val_files=x.json",
        "model=hf",
    ):
        says(text, part)


def test_only_a_role_that_runs_has_an_unknown_size():
    teacher = "actor_rollout_ref.ref.model.path=some/teacher"
    config, notes = load("recipe=distill", teacher, "trainer.dry_run=config")
    memory = format_plan(config, notes).partition(MEMORY)[2]
    assert re.findall(r"(\w+) +unknown: its config.json", memory) == ["ref"]


def test_plan_without_the_models_sizes():
    path = "actor_rollout_ref.model.path=someone/something"
    config, notes = load(path, "data=gsm8k", "cluster=node8", "trainer.dry_run=config")
    text = format_plan(config, notes)
    says(text, "unknown:", "8 of 8", "4 engines", "TP=1", "bfloat16", "deterministic=false")
    assert "output layer" not in text
    head = "actor_rollout_ref.model.head_dtype=fp32"
    text = format_plan(*load(path, "data=gsm8k", "cluster=node8", "trainer.dry_run=config", head))
    for role in ("actor", "ref", "rollout"):
        says(row(text, "placement", role), "output layer fp32")


def test_idle_gpus_are_said():
    config, notes = load("cluster=node8", "cluster.actor_world_size=4", "cluster.rollout_world_size=2",
                         "cluster.ref_world_size=1")  # fmt: skip
    says(format_plan(config, notes), "7 of 8", "1 idle")
    text = supervised_plan("model.path=Qwen/Qwen3-0.6B", "trainer.n_gpus_per_node=4", "cluster.world_size=3")
    says(row(text, "placement", "GPUs"), "3 of 4", "1 idle")


def test_plan_of_several_machines_says_what_each_holds():
    sizes = [f"cluster.{role}_world_size={size}" for role, size in (("actor", 8), ("rollout", 7), ("ref", 1))]
    text = format_plan(*load("cluster=multi_node", "trainer.nnodes=3", *sizes))
    assert "machine 0   actor 0-7\n" in text
    assert "machine 1   rollout 0-6, ref 0\n" in text
    assert "machine 2   reward 0\n" in text
    assert "machine 0" not in format_plan(*load("cluster=node8"))


def test_plan_of_one_shared_gpu():
    config, notes = load("cluster=single_gpu")
    says(format_plan(config, notes), "1 of 1", "share")
    says(format_summary(config, notes), "1 actor", "1 rollout", "1 ref", "1 GPU", "share")
    text = format_summary(*load("cluster=node8"))
    says(text, "4 actor", "4 rollout", "4 ref", "8 GPUs", "share")
    separate = format_summary(*load("cluster=node8", "actor_rollout_ref.actor.use_kl_loss=false"))
    says(separate, "4 actor", "4 rollout", "no ref", "8 GPUs")
    assert "share" not in separate


def test_the_printed_config_has_no_secrets():
    config, notes = load("custom_reward_function.reward_kwargs={api_key: SECRET123, n: 7}")
    text = format_plan(config, notes)
    assert "SECRET123" not in text
    says(text, "api_key: '***'", "n: 7")


def test_summary_is_short_and_keeps_the_notes():
    config, notes = load(f"{ACTOR}.kl_loss_type=k1")
    text = format_summary(config, notes)
    assert len(text.splitlines()) == 10
    says(text, "32 prompts * n=8 = 256 sequences", "1 optimizer step", "2 actor", "1 rollout", "1 ref", "CPU")
    says(text, "actor_rollout_ref.actor.kl_loss_type=k1")


def test_sizes_of_hub_models(tmp_path, monkeypatch):
    """From the hub's cache if it is there, else from known_models.json; nothing is downloaded."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert model_config_at_hand("Qwen/Qwen3-8B") == QWEN3_8B
    assert model_config_at_hand("/models/Qwen3-8B") == QWEN3_8B
    assert model_config_at_hand("someone/something") is None
    snapshot = tmp_path / "hub/models--someone--something/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SMOLLM2_135M))
    assert model_config_at_hand("someone/something") == SMOLLM2_135M


@pytest.mark.parametrize(("alpha", "held"), [(0.1, 4), (1.0, 2)])
def test_a_reference_that_moves_by_shares_is_held_in_fp32(alpha, held):
    ref = "actor_rollout_ref.ref"
    config, _ = load(f"{ref}.fsdp_config.dtype=bf16", f"{ref}.ref_model_sync_steps=2",
                     f"{ref}.ref_model_mixup_alpha={alpha}", "cluster.ref_world_size=2")  # fmt: skip
    memory = next(role for role in memory_estimate(config, QWEN3_8B) if role.role == "ref")
    count = model_shape(QWEN3_8B).num_parameters
    assert dict(memory.parts)["weights"] == pytest.approx(count * held / 2 / GIB)


# --- of commands that train one model -----------------------------------------------------------------------------
MEMORY = "memory per process (estimate)"


def supervised_plan(*overrides):
    return format_plan(*load_command([*overrides], REWARD_MODEL))


def row(text: str, block: str, label: str) -> str:
    """A line of a block of the plan, without its label."""
    _, _, rest = text.partition(f"\n{block}\n")
    (line,) = (line for line in rest.partition("\n\n")[0].splitlines() if line.strip().startswith(f"{label}  "))
    return line.strip().removeprefix(label).strip()


def test_a_run_that_trains_one_model():
    text = supervised_plan()
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
    summary = format_summary(*load_command([], REWARD_MODEL))
    says(summary, "64 rows", 128, 64, "2 reward_model", "CPU")
    assert len(summary.splitlines()) < 12


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_printed_config_is_the_whole_config(command):
    config, notes = load_command(["trainer.seed=5"], command)
    printed = format_plan(config, notes).split("\n\n")[0].partition("\n")[2]
    assert command.schema.model_validate(yaml.safe_load(printed)) == config


def test_steps_tokens_and_gpus_of_one_model():
    more = ("trainer.total_training_steps=7", "data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=32768")
    text = supervised_plan("model.path=Qwen/Qwen3-0.6B", "trainer.n_gpus_per_node=8", "data.val_files=null", *more)
    says(row(text, "run", "algorithm"), "lr 1e-05")
    assert row(text, "run", "length") == "7 training steps"
    says(row(text, "placement", "reward_model"), "8 ranks", "weights fp32", "compute bf16")
    says(row(text, "placement", "GPUs"), "8 of 8")
    says(row(text, "batch", "passes of a reward_model rank"), "32,768")
    assert row(text, "run", "validation data") == "none"


def test_sizes_of_one_model_that_are_not_known_are_not_guessed(monkeypatch):
    monkeypatch.setattr("grpo_dist.plan.text.model_config_at_hand", lambda path: None)
    says(row(supervised_plan("model.path=some/model"), MEMORY, "all roles"), "unknown", "config.json")


def test_notes_are_shown_in_the_plan_and_in_the_summary():
    config, notes = load_command(["trainer.resume_from_path=x"], REWARD_MODEL)
    assert len(notes) == 1
    assert notes[0] in format_plan(config, notes)
    summary = format_summary(config, notes)
    assert f"note: {notes[0]}" in summary
    assert "resolved config" not in summary


def test_validation_alone_holds_weights_alone():
    text = row(supervised_plan("trainer.val_only=true"), MEMORY, "reward_model")
    says(text, "weights", "GiB")
    assert "optimizer" not in text
