"""Models beside the policy: `grpo-dist reward-model`, two iterations of DeepSeekMath's algorithm 1, teachers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from grpo_dist.assets import resolve_model_path
from grpo_dist.main import reward_model as job
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.tasks import arithmetic
from tests.e2e.runs import PLAIN, Rows, metrics, sized, train, train_here, write_rows
from tests.models import another_builtin_model, builtin_reward_model
from tests.trainer.metrics_page import PAGE, undocumented

pytestmark = [pytest.mark.usefixtures("shared_ray"), pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, VALIDATED = 4, 20


def train_scorer(folder: Path, *overrides: str) -> Rows:
    data = ("train_max_samples=48", "train_batch_size=12", f"val_max_samples={VALIDATED}")
    usual = (*(f"data.{key}" for key in data), "optim.lr=1e-4", "trainer.save_freq=2", "trainer.test_freq=2")
    return train_here(folder, *usual, *overrides, job=job)


def trained_file(folder: Path) -> Path:
    return folder / "huggingface" / "model.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run on two ranks."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    train_scorer(folder, "cluster.world_size=2")
    return folder


@pytest.mark.deep
def test_each_step_is_on_record_and_validation_where_it_is_due(finished: Path) -> None:
    rows = metrics(finished)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["step"] for row in rows if "val/reward_model/accuracy" in row] == [0, 2, 4]
    for name in ("reward_model/loss", "reward_model/accuracy", "reward_model/grad_norm", "perf/throughput"):
        assert all(name in row for row in rows[1:]), name
    assert undocumented({name for row in rows for name in row} - {"step"}, PAGE.read_text()) == []
    assert (finished / "latest_checkpointed_iteration.txt").read_text() == f"{STEPS}"


@pytest.mark.deep
def test_the_exported_folder_scores_pairs_as_the_validation_did(finished: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(finished / "huggingface").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished / "huggingface")

    def score(prompt: list[dict[str, str]], answer: str) -> float:
        whole = [*prompt, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(whole, return_dict=False)
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits.item())

    pairs = arithmetic.pairs("validation")[:VALIDATED]
    margins = [score(pair["prompt"], pair["chosen"]) - score(pair["prompt"], pair["rejected"]) for pair in pairs]
    told = metrics(finished)[-1]
    assert told["val/reward_model/margin"] == pytest.approx(sum(margins) / VALIDATED, abs=1e-4)
    assert min(map(abs, margins)) > 1e-4, "no pair is undecided"
    accuracy = sum(margin > 0 for margin in margins) / VALIDATED
    assert told["val/reward_model/accuracy"] == pytest.approx(accuracy)


@pytest.mark.deep
def test_resumed_in_the_middle_it_ends_in_the_same_file(finished: Path, tmp_path: Path) -> None:
    half = f"trainer.resume_from_path={finished}/global_step_2"
    rows = train_scorer(tmp_path / "resumed", "cluster.world_size=2", "trainer.resume_mode=resume_path", half)
    assert trained_file(tmp_path / "resumed").read_bytes() == trained_file(finished).read_bytes()
    names = ("step", "reward_model/loss", "reward_model/accuracy", "reward_model/grad_norm", "reward_model/lr")
    last = [{name: row[name] for name in names} for row in metrics(finished)[-2:]]
    assert [{name: row[name] for name in names} for row in rows] == last


@pytest.mark.deep
def test_one_rank_with_other_passes_trains_the_same_model(finished: Path, tmp_path: Path) -> None:
    """To rounding, which AdamW turns into real steps where a gradient is near 0: all weights are compared at once."""
    passes = ("data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=128")
    alone, whole = (
        train_scorer(tmp_path / "alone", "cluster.world_size=1", "trainer.save_freq=-1", *passes),
        metrics(finished),
    )
    for name in ("reward_model/loss", "reward_model/margin", "val/reward_model/loss"):
        found, expected = ([row[name] for row in rows if name in row] for rows in (alone, whole))
        assert found == pytest.approx(expected, abs=1e-3), name
    assert alone[1]["reward_model/loss"] == pytest.approx(whole[1]["reward_model/loss"], rel=1e-5)
    start = load_file(Path(resolve_model_path("builtin:tiny-qwen3")) / "model.safetensors")
    one, two = (load_file(trained_file(folder)) for folder in (tmp_path / "alone", finished))
    assert one.keys() == two.keys()
    backbone = [name for name in one if name in start]
    assert len(backbone) == len(start), "the head is new, and the output layer of the causal LM is tied"
    apart = sum(float((one[name] - two[name]).square().sum()) for name in one)
    moved = sum(float((two[name] - start[name]).square().sum()) for name in backbone)
    assert moved > 0
    assert apart < 1e-3 * moved


# --- a policy's reward model that learns with it ------------------------------
# The built-in task's own scorer judges steps; spaces are between them.
PROCESS = (
    "algorithm.adv_estimator=grpo_process",
    "reward_model.process.enable=true",
    "reward.step_separator=' '",
    "custom_reward_function.reward_kwargs={functions: [{path: grpo_dist.rewards.reward_model}, "
    "{path: grpo_dist.tasks.worked_sums, weight: 0.0, label: rule}]}",
)


def iterate(folder: Path, *overrides: str) -> Rows:
    scorer = builtin_reward_model(folder.parent / "scorer", template=None)
    retraining = ("freq=2", "optim.lr=1e-3", "train_batch_size=16")
    return train_here(
        folder,
        *("recipe=deepseekmath_iterative", *sized(4, n=4), f"reward_model.model.path={scorer}"),
        *(*(f"reward_model.retrain.{key}" for key in retraining), "reward_model.replay_share=0.5"),
        *("data.val_max_samples=8", "trainer.total_training_steps=4", "trainer.save_freq=3", *overrides),
    )


def weights(folder: Path) -> dict[str, Any]:
    """The digests of the tensors in the last checkpoint, by role and file, and the exported policy."""
    files = json.loads((folder / "global_step_4" / "manifest.json").read_text())["files"]
    roles = {name: digest for name, digest in files.items() if name.endswith(".distcp")}
    assert {name.partition("/")[0] for name in roles} == {"actor", "ref", "reward_model"}
    return roles | {"policy": (folder / "huggingface" / "model.safetensors").read_bytes()}


@pytest.mark.long
@pytest.mark.parametrize("process", [(), PROCESS], ids=["outcome", "process"])
def test_two_iterations_whole_and_resumed_inside_the_second(tmp_path: Path, process: tuple[str, ...]) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    rows = iterate(whole, *process)
    retrained = [row for row in rows if "reward_model/loss" in row]
    assert [(row["step"], row["reward_model/replayed_rows"] > 0) for row in retrained] == [(2, False), (4, True)]
    kl = {row["step"]: row["actor/kl_loss"] for row in rows if "actor/kl_loss" in row}
    assert kl[1] == pytest.approx(0, abs=1e-6) == kl[3], "the reference has become the policy"
    assert kl[2] > 1e-6 < kl[4]
    assert all("reward_extra/rule/mean" in row for row in rows[1:])
    assert undocumented({name for row in rows for name in row} - {"step"}, PAGE.read_text()) == []
    iterate(resumed, *process, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_3")
    assert weights(resumed) == weights(whole)


@pytest.mark.long
def test_ranks_and_passes_change_nothing(tmp_path: Path) -> None:
    """To rounding: the scores of the third step are those of the model that was retrained before."""
    sizes = ("cluster.reward_model_world_size=2", "reward_model.retrain.micro_batch_size_per_gpu=3")
    short = ("trainer.total_training_steps=3", "trainer.save_freq=-1")
    one, two = iterate(tmp_path / "one", *short), iterate(tmp_path / "two", *sizes, *short)
    for name in ("reward_model/loss", "reward_model/accuracy", "reward_model/grad_norm"):
        assert two[2][name] == pytest.approx(one[2][name], rel=1e-3), name
    assert two[3]["reward_extra/rm_score/mean"] == pytest.approx(one[3]["reward_extra/rm_score/mean"], abs=2e-3)


# --- teachers ------------------------------
LORA = "actor_rollout_ref.model.lora_rank=4"


@pytest.mark.long
def test_it_is_taught_and_a_stop_changes_no_bit(tmp_path: Path) -> None:
    """With LoRA, by prompts without ground truths; after a stop the teacher and its output layer are loaded again."""
    teacher = another_builtin_model(tmp_path / "teacher", tie_word_embeddings=False, vocab_size=264)
    rows = [{"prompt": row["prompt"]} for row in arithmetic.rows("train")[:12]]
    settings = [
        *("recipe=distill", "data=arithmetic", f"actor_rollout_ref.ref.model.path={teacher}"),
        *(write_rows(tmp_path / "prompts.jsonl", rows), "data.val_max_samples=8", *sized(4, n=2)),
        *(LORA, "actor_rollout_ref.actor.optim.lr=1e-3"),
        *("trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.test_freq=2"),
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    rows = train_here(whole, *settings)
    assert [row["step"] for row in rows] == list(range(5))
    assert all(row["actor/kl_loss"] > 1 and row["actor/grad_norm"] > 0 for row in rows[1:]), "far from its teacher"
    assert all(row["critic/advantages/max"] == row["critic/score/max"] == 0 for row in rows[1:])
    assert rows[0]["val-core/arithmetic/acc/mean@1"] > 0, "rows with a ground truth are scored"
    half = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_2")
    train_here(resumed, *settings, *half)
    for row, other in zip(metrics(whole)[-2:], metrics(resumed)[-2:], strict=True):
        assert row["actor/kl_loss"] == other["actor/kl_loss"]
    one, other = ((folder / "huggingface" / "model.safetensors").read_bytes() for folder in (whole, resumed))
    assert one == other
    assert not (whole / "global_step_2" / "ref").exists()


@pytest.mark.long
def test_a_teacher_that_is_the_policy_itself_says_what_the_policy_says(tmp_path: Path) -> None:
    """On a server: in the first step the KL is 0 and the masses are the same; no ranks hold a reference."""
    serve = [sys.executable, "-m", "grpo_dist", "serve", "builtin:tiny-qwen3", "actor_rollout_ref.rollout.dtype=fp32"]
    environment = os.environ | {"VLLM_API_KEY": "token"}
    with subprocess.Popen([*serve, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            told = "".join(line for _, line in zip(range(3), server.stdout, strict=False))
            found = re.search(r"http://127.0.0.1:\d+", told)
            assert found, told
            endpoint = "actor_rollout_ref.ref.model.endpoint"
            (step,) = train(
                tmp_path / "run",
                *("recipe=distill", f"{endpoint}.base_url={found[0]}/v1", f"{endpoint}.model=policy"),
                *(f"{endpoint}.headers_env=TEACHER_HEADERS", "trainer.total_training_steps=1", *PLAIN, *sized(4)),
                TEACHER_HEADERS='{"Authorization": "Bearer token"}',
            )
        finally:
            server.kill()
    assert abs(step["actor/kl_loss"]) < 1e-4
    assert 0.9 < step["actor/teacher_top_mass"] <= 1.0001
    assert step["actor/policy_top_mass"] == pytest.approx(step["actor/teacher_top_mass"], abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("shown", ["successes", "texts"])
def test_the_policy_teaches_itself(tmp_path: Path, shown: str) -> None:
    """By successes of its groups, of which some have none, and a teacher that moves; with LoRA by a text of the row."""
    hint = {"extra_info": {"hint": arithmetic.worked_answer(1, 2)}}
    key = "algorithm.self_distillation"
    texts = [
        write_rows(tmp_path / "rows.jsonl", [row | hint for row in arithmetic.rows("train")[:16]]),
        *(f"{key}.success_threshold=null", f"{key}.feedback_name=hint", "actor_rollout_ref.rollout.n=1"),
        *(LORA, "actor_rollout_ref.ref.ref_model_sync_steps=-1"),
    ]
    settings = ["recipe=sdpo", *sized(8), *PLAIN, "trainer.total_training_steps=2"]
    for row in train_here(tmp_path / "run", *settings, *(texts if shown == "texts" else ()))[-2:]:
        fraction = row["actor/self_distilled_fraction"]
        assert (fraction == 1) if shown == "texts" else (0 < fraction < 1)
        assert row["actor/kl_loss"] > 0
        assert row["actor/grad_norm"] > 0
    if shown == "successes":
        data = read_parquet(tmp_path / "run" / "rollouts" / "1.parquet")
        told = data["teacher_prompts"].lengths > 0
        for uid in set(data["uid"]):
            rows = [i for i, other in enumerate(data["uid"]) if other == uid]
            successes = [i for i in rows if data["score"][i] >= 1]
            assert [bool(told[i]) for i in rows] == [bool(set(successes) - {i}) for i in rows]
        assert (data["teacher_prompts"].lengths > data["prompts"].lengths)[told].all()
