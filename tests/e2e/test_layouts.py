"""The main job split, with experts, in float16, with images, and on another engine than vLLM: it learns."""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file

from grpo_dist.assets import resolve_model_path
from grpo_dist.tracking.metric_names import validation_accuracy
from tests.chaos.driver import PROCESSES, Fault
from tests.chaos.runs import STEPS, Outcome
from tests.chaos.runs import train as train_with_faults
from tests.e2e.runs import PLAIN, rollouts, sized, train, train_here
from tests.observed import alive_as, command_line

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL = ("algorithm.adv_estimator=grpo", *sized(16), "data.val_max_samples=64")


@pytest.mark.long
def test_sequences_that_two_ranks_split_give_the_same_rewards_losses_and_norms(tmp_path: Path) -> None:
    """Sums over ranks would double if a group's counted twice. The last step is taken by ranks that do not split."""

    def rows(folder: Path, num_steps: int, *overrides: str) -> list[dict[str, Any]]:
        return train(
            folder,
            *(*SMALL, "cluster.actor_world_size=2", "trainer.val_before_train=false", "trainer.test_freq=-1"),
            *(f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.entropy_coeff=0.001", f"{ACTOR}.optim.lr=1e-3"),
            *(f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=512"),
            *(f"trainer.total_training_steps={num_steps}", f"trainer.save_freq={num_steps}", *overrides),
        )

    whole = rows(tmp_path / "whole", 3)
    rows(tmp_path / "split", 2, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    split = rows(tmp_path / "split", 3)
    assert [[row["step"] for row in each] for each in (whole, split)] == [[1, 2, 3]] * 2
    losses = ("actor/loss", "actor/kl_loss", "actor/grad_norm")
    for one, two in zip(whole, split, strict=True):
        for name in ("critic/score/mean", "response_length/mean", "actor/entropy"):
            assert two[name] == pytest.approx(one[name], rel=0.02, abs=0.02), (one["step"], name)
        for name in losses:
            assert two[name] == pytest.approx(one[name], rel=0.05, abs=1e-3), (one["step"], name)
        assert two["training/rollout_probs_diff_max"] < 1e-3
    for name in (*losses, "actor/entropy"):
        assert split[0][name] == pytest.approx(whole[0][name], rel=1e-3, abs=1e-6), f"{name}: from the same samples"


FAULTS = [Fault("engine", "generating", "SIGKILL", 3), Fault("engine", "syncing", "SIGKILL", 5)]


@pytest.mark.long
def test_an_engine_of_two_processes_that_loses_one_is_replaced_and_it_learns(main_run: Outcome, tmp_path: Path) -> None:
    """Two processes add up in another order, so a token may turn over where the draw falls between two: rarely."""
    split_run = train_with_faults(tmp_path / "run", FAULTS, f"{ROLLOUT}.tensor_model_parallel_size=2")
    assert [hit["fault"] for hit in split_run.hits] == [asdict(fault) for fault in FAULTS], split_run.log[-6000:]
    assert [hit["during"] for hit in split_run.hits] == ["generating", "syncing"], "none came too late"
    assert split_run.lives == 1, "the run itself goes on"
    rows = split_run.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[-1]["training/worker_restarts"] == split_run.log.count("replaced a worker") == len(FAULTS)
    since = time.time() - split_run.seconds - 60
    engines = [each for each in psutil.process_iter() if command_line(each).startswith(PROCESSES["engine"])]
    assert [alive_as(each) for each in engines if alive_as(each) and each.create_time() > since] == []
    one, two = main_run.samples(1), split_run.samples(1)
    same = [a["output"] == b["output"] for a, b in zip(one, two, strict=True)]
    assert sum(same) >= 0.9 * len(same), "the same weights, the same seeds"
    rewards = [[score for _, score in run.rewards()] for run in (main_run, split_run)]
    assert sum(rewards[1]) == pytest.approx(sum(rewards[0]), abs=0.1 * STEPS)
    assert sum(rewards[1][-3:]) > sum(rewards[1][:3]), "it learns"
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in rows[1:])


EXPERTS = 4


def upcycled(folder: Path) -> Path:
    """The built-in model with copies of each feed-forward layer, two for a token: at first it computes the same."""
    source = Path(resolve_model_path("builtin:tiny-qwen3"))
    dense = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    entries = {k: v for k, v in dense.config.to_dict().items() if k not in ("model_type", "architectures")}
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": dense.config.intermediate_size}
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**entries | sizes | {"norm_topk_prob": True})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dense.state_dict(), strict=False)
    for old, new in zip(dense.model.layers, model.model.layers, strict=True):
        gate_up = torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight])
        new.mlp.experts.gate_up_proj.data.copy_(gate_up.expand(EXPERTS, -1, -1))
        new.mlp.experts.down_proj.data.copy_(old.mlp.down_proj.weight.expand(EXPERTS, -1, -1))
    model.save_pretrained(folder)
    for file in source.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    ids = torch.arange(3, 40).unsqueeze(0)
    torch.testing.assert_close(model(input_ids=ids).logits, dense(input_ids=ids).logits, atol=1e-3, rtol=0)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("way", ["plain", "tensor parallel", "router replay"])
def test_sampler_and_trainer_agree_on_experts_that_train_apart(tmp_path: Path, way: str) -> None:
    ways = {
        "tensor parallel": [f"{ROLLOUT}.tensor_model_parallel_size=2", "cluster.rollout_world_size=2"],
        "router replay": [f"{ACTOR}.router_replay.mode=R3"],
    }
    rows = train(
        tmp_path / "run",
        *(*SMALL, f"actor_rollout_ref.model.path={upcycled(tmp_path / 'model')}", "cluster.actor_world_size=2"),
        *("trainer.total_training_steps=6", "trainer.test_freq=6", "trainer.save_freq=-1"),
        *(f"actor_rollout_ref.{role}.fsdp_config.dtype=fp32" for role in ("actor", "ref")),
        *(f"{ROLLOUT}.dtype=float32", *ways.get(way, ())),
    )
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row in rows:
        assert row["training/rollout_probs_diff_max"] < 1e-3, "in each step with the weights of the update before"
        assert row["actor/grad_norm"] > 0
        assert row.get("training/router_replay/unknown") == (0.0 if way == "router replay" else None)
    rewards = [row["critic/score/mean"] for row in rows]
    assert sum(rewards[3:]) > sum(rewards[:3]), "it learns"
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "huggingface")
    assert trained.config.model_type == "qwen3_moe"
    stack = trained.model.layers[1].mlp.experts.down_proj
    apart = [(stack[i] - stack[0]).abs().max().item() for i in range(1, EXPERTS)]
    assert all(difference > 1e-6 for difference in apart), "equal at first, they have trained apart"


@pytest.mark.long
def test_it_learns_in_float16(tmp_path: Path) -> None:
    passes = (f"actor_rollout_ref.{role}.fsdp_config.dtype=fp16" for role in ("actor", "ref"))
    job = (*SMALL, *PLAIN, *passes, f"{ROLLOUT}.dtype=float16", "trainer.total_training_steps=8")
    rows = train(tmp_path, *job)
    assert all(row["training/rollout_probs_diff_max"] < 0.05 for row in rows)
    assert 1 <= rows[-1]["actor/loss_scale"] <= 2**16
    assert rows[-1]["actor/skipped_updates"] == 0
    rewards = [row["critic/score/mean"] for row in rows]
    assert sum(rewards[4:]) > sum(rewards[:4])


@pytest.mark.deep
def test_three_steps_with_transformers_as_engine(tmp_path: Path) -> None:
    """A class that nothing in the package knows; its log-probs are the trainer's, with the weights of each sync."""
    engine = Path(__file__).parents[1] / "engines" / "transformers_engine.py"
    settings = (f"{ROLLOUT}.name={engine}:TransformersEngine", *sized(8, n=8), "data.max_response_length=16", *PLAIN)
    steps = train(tmp_path, *settings, "trainer.total_training_steps=3")
    assert len(steps) == 3
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4
    assert any(step["actor/grad_norm"] > 0 for step in steps[:2]), "or the syncs bring nothing new"


# --- the built-in task with images ------------------------------
SQUARES = ("data=squares", "data.train_max_samples=640", "trainer.test_freq=-1")


@pytest.mark.deep
def test_a_policy_learns_to_look(shared_ray: None, tmp_path: Path) -> None:
    end = ("trainer.total_training_steps=16", "trainer.test_freq=16", "trainer.save_freq=-1")
    before, *steps = train_here(tmp_path, *SQUARES, *end)
    assert validation_accuracy(before) == pytest.approx(0.27, abs=0.02)
    assert validation_accuracy(steps[-1]) > 0.5, "it goes through the rows of the board"
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps), "both see the same"
    images = [row["images"] for row in rollouts(tmp_path, 16)]
    assert all(len(of_row) == 1 and of_row[0].startswith("data:image/jpeg;base64,") for of_row in images)
    assert len({of_row[0] for of_row in images}) > 16
    weights = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert {name for name in weights if "vision_model" in name}


@pytest.mark.long
def test_groups_that_wait_in_a_checkpoint_keep_their_pictures(tmp_path: Path) -> None:
    options = (*SQUARES, *sized(8, n=4), "trainer.max_staleness=1", "data.val_files=null")
    options = (*options, f"{ACTOR}.freeze_vision_tower=false", "trainer.total_training_steps=3")
    options = (*options, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3")
    train(tmp_path / "whole", *options)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for done in ("global_step_2", "global_step_3", "huggingface"):
        shutil.rmtree(tmp_path / "again" / done)
    (tmp_path / "again" / "latest_checkpointed_iteration.txt").write_text("1")
    assert list((tmp_path / "again" / "global_step_1" / "groups").glob("*.safetensors"))
    train(tmp_path / "again", *options)
    whole, again = (load_file(tmp_path / name / "huggingface" / "model.safetensors") for name in ("whole", "again"))
    assert all(weight.equal(again[name]) for name, weight in whole.items())
    assert (tmp_path / "whole" / "huggingface" / "processor_config.json").is_file()
