"""`grpo-dist reward-model` on real ranks and the built-in task, from its start to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from grpo_dist.assets import resolve_model_path
from grpo_dist.main import reward_model as job
from grpo_dist.tasks import arithmetic
from tests.e2e.runs import Rows, metrics, train_here
from tests.trainer.metrics_page import PAGE, undocumented

pytestmark = [
    pytest.mark.usefixtures("shared_ray"),
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.deep,
]

STEPS, VALIDATED = 4, 20


def train(folder: Path, *overrides: str) -> Rows:
    data = ("train_max_samples=48", "train_batch_size=12", f"val_max_samples={VALIDATED}")
    usual = (*(f"data.{key}" for key in data), "optim.lr=1e-4", "trainer.save_freq=2", "trainer.test_freq=2")
    return train_here(folder, *usual, *overrides, job=job)


def trained_file(folder: Path) -> Path:
    return folder / "huggingface" / "model.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run on two ranks."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    train(folder, "cluster.world_size=2")
    return folder


def test_each_step_is_on_record_and_validation_where_it_is_due(finished: Path) -> None:
    rows = metrics(finished)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["step"] for row in rows if "val/reward_model/accuracy" in row] == [0, 2, 4]
    for name in ("reward_model/loss", "reward_model/accuracy", "reward_model/grad_norm", "perf/throughput"):
        assert all(name in row for row in rows[1:]), name
    assert undocumented({name for row in rows for name in row} - {"step"}, PAGE.read_text()) == []
    assert (finished / "latest_checkpointed_iteration.txt").read_text() == f"{STEPS}"


def test_the_exported_folder_scores_pairs_as_the_validation_did(finished: Path) -> None:
    """Read by transformers, and each conversation alone."""
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


def test_resumed_in_the_middle_it_ends_in_the_same_file(finished: Path, tmp_path: Path) -> None:
    """In a folder of its own, from the checkpoint that the whole run wrote after half of its steps."""
    half = f"trainer.resume_from_path={finished}/global_step_2"
    rows = train(tmp_path / "resumed", "cluster.world_size=2", "trainer.resume_mode=resume_path", half)
    assert trained_file(tmp_path / "resumed").read_bytes() == trained_file(finished).read_bytes()
    names = ("step", "reward_model/loss", "reward_model/accuracy", "reward_model/grad_norm", "reward_model/lr")
    last = [{name: row[name] for name in names} for row in metrics(finished)[-2:]]
    assert [{name: row[name] for name in names} for row in rows] == last


def test_one_rank_with_other_passes_trains_the_same_model(finished: Path, tmp_path: Path) -> None:
    """To rounding, which AdamW turns into real steps where a gradient is near 0: all weights are compared at once."""
    passes = ("data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=128")
    alone, whole = train(tmp_path / "alone", "cluster.world_size=1", "trainer.save_freq=-1", *passes), metrics(finished)
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
