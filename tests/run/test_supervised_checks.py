"""A command that trains one model finds before Ray starts whatever a run would be refused for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.checks.all_checks import check_all
from grpo_dist.config.load import load_command
from grpo_dist.errors import ConfigError
from grpo_dist.main import reward_model, sft
from grpo_dist.plan.commands import REWARD_MODEL
from tests.messages import refuses, says
from tests.models import random_classifier
from tests.trainer.checkpoints import unverified

RUN_DIR = "trainer.default_local_dir"
DryRun = Callable[..., tuple[list[str], str]]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str]) -> DryRun:
    """Runs `... trainer.dry_run=true`; gives the checks that passed and the message."""

    def command(*overrides: str, code: int = 0, main: Any = reward_model) -> tuple[list[str], str]:
        capsys.readouterr()  # what the test itself has said
        assert main([*overrides, "trainer.dry_run=true"]) == code
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        assert shown.err == "" if code == 0 else shown.err.startswith("\nerror: ")
        return [line.strip() for line in shown.out.partition("checked on this machine\n")[2].splitlines()], shown.err

    return command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "rows.jsonl"
    found.write_text(
        "".join(json.dumps({"prompt": q, "chosen": "2", "rejected": "3"}) + "\n" for q in ("1+1?", "2+0?"))
    )
    return found


def mine(file: Path) -> list[str]:
    return [f"data.train_files={file}", "data.max_length=64", "data.train_batch_size=2"]


@pytest.mark.parametrize(
    ("main", "rows"), [(reward_model, "pairs"), (sft, "conversations")], ids=["reward_model", "sft"]
)
def test_the_built_in_run_is_right(dry_run: DryRun, main: Any, rows: str, tmp_path: Path) -> None:
    lines, _ = dry_run("data.train_max_samples=640", "trainer.total_training_steps=10", main=main)
    says(lines, rows, 640, 200)
    says(lines, "training steps", 10)
    says(lines, "builtin:tiny-qwen3", "qwen3", "35 tensors")
    assert [path.name for path in tmp_path.iterdir()] == [], "nothing is written"


def test_your_own_rows(dry_run: DryRun, file: Path) -> None:
    file.write_text(file.read_text() + json.dumps({"prompt": "1+1?", "chosen": "2" * 80, "rejected": "3"}) + "\n")
    lines, _ = dry_run(*mine(file))
    says(lines, "rows", 2, "pairs", 0)
    says(lines, "1 of 3", "data.max_length=64", f"{file}, line 3")
    says(lines, "training steps", 1)


MISTAKES = {
    "a batch larger than the rows": (["data.train_batch_size=3"], ["data.train_batch_size=3", "2 rows"]),
    "rows that are all too long": (["data.max_length=3"], ["data.max_length=3", "all 2"]),
    "more CPUs than Ray has": (
        ["cluster.num_cpus_per_worker=2", "ray_kwargs.ray_init.num_cpus=3"],
        ["cluster.num_cpus_per_worker=2", "4 logical", "ray_kwargs.ray_init.num_cpus=3"],
    ),
    "no checkpoint where one is named": (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/"],
        ["trainer.resume_from_path=/", "checkpoint", "another"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_exit_code_2(mistake: str, dry_run: DryRun, file: Path) -> None:
    overrides, parts = MISTAKES[mistake]
    _, message = dry_run(*mine(file), *overrides, code=2)
    says(message, *parts)


def test_all_that_is_wrong_is_told_at_once(dry_run: DryRun, file: Path) -> None:
    wrong = (f"{RUN_DIR}=/dev/null/run", "data.train_batch_size=3", "ray_kwargs.ray_init.address=127.0.0.1:1")
    lines, message = dry_run(*mine(file), *wrong, code=2)
    says(message, "3 problems", "/dev/null/run", "data.train_batch_size=3", "127.0.0.1:1")
    says(lines, "model", "builtin:tiny-qwen3")  # what is right is said


def test_a_model_with_another_head_or_a_damaged_file(dry_run: DryRun, file: Path, tmp_path: Path) -> None:
    two = random_classifier(tmp_path / "two", num_labels=2)
    says(dry_run(*mine(file), f"model.path={two}", code=2)[1], f"model.path={two}", "score.weight", "2 outputs")
    damaged = shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "damaged")
    (Path(damaged) / "model.safetensors").write_bytes(b"")
    says(dry_run(*mine(file), f"model.path={damaged}", code=2)[1], f"model.path={damaged}", "model.safetensors")


def test_a_checkpoint_of_another_seed_is_refused_and_one_that_fits_is_verified(
    dry_run: DryRun, file: Path, tmp_path: Path
) -> None:
    run_dir = f"{RUN_DIR}={tmp_path}/run"
    unverified(load_command([*mine(file), run_dir], REWARD_MODEL)[0])
    config, _ = load_command([*mine(file), run_dir, "trainer.seed=7"], REWARD_MODEL)
    with refuses(ConfigError, "trainer.seed: 1 -> 7"):
        check_all(config, lambda line: None, dry_run=False)
    says(dry_run(*mine(file), run_dir, code=2)[1], run_dir, "intact checkpoint")
    same, _ = load_command([*mine(file), run_dir], REWARD_MODEL)
    assert check_all(same, lambda line: None, dry_run=False).steps == 1


def test_a_tokenizer_of_another_model(dry_run: DryRun, file: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(resolve_model_path("builtin:tiny-qwen3"), tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {text: number + 1000 * (text == "+") for text, number in vocab.items()}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = dry_run(*mine(file), f"model.path={model}", code=2)[1]
    says(message, f"model.path={model}", f"{file}, line 1", "token", "vocab_size")
