"""The command, and the rows of GSM8K and MATH that it writes: from a fixture and, if it is here, a whole release."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from grpo_dist.tasks import arithmetic
from grpo_dist.tasks.prepare import main
from tests.messages import says
from tests.rewards.scoring import scored
from tests.tasks.conftest import prompts_of

RELEASE = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"
GSM8K = [
    {"question": "Two plus two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "A house's price?", "answer": "It costs $70,000.\n#### 70,000"},
    {"question": "Below zero?", "answer": "3 - 8 = -5\n#### -5"},
]
SOLUTIONS = (
    r"First \boxed{no}, then $\boxed{\frac{3}{4}}$.",
    r"It is $\boxed{\{1, \sqrt{2}\}}$",
    r"So $\boxed 7$ it is.",
)
MATH = [{"problem": "What is it?", "level": "Level 1", "type": "Algebra", "solution": each} for each in SOLUTIONS]
MATH[2] |= {"problem": "Short?", "level": None}
EXAMPLES: dict[str, list[dict[str, Any]]] = {"gsm8k": GSM8K, "math": MATH}


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[..., int]:
    """Write a task's rows to the folder, of its examples, and of further lines for the test's."""

    def run(task: str, *further: str) -> int:
        (raw := tmp_path / "raw").mkdir()
        lines = [json.dumps(row) for row in EXAMPLES[task]]
        (raw / "train.jsonl").write_text("\n".join(lines))
        (raw / "test.jsonl").write_text("\n".join([*lines[:1], *further]))
        return main([task, "--local_dataset_path", str(raw), "--local_save_dir", str(tmp_path / "out")])

    return run


@pytest.fixture
def train(tmp_path: Path) -> Path:
    """A file of another run at the place where rows are written."""
    file = tmp_path / "out" / "train.parquet"
    file.parent.mkdir()
    file.write_bytes(b"old")
    return file


# Data source, prompt and extra columns of the second row, and the truths.
WRITTEN: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "gsm8k": (
        "openai/gsm8k",
        "A house's price? Let's think step by step and output the final answer after \"####\".",
        GSM8K[1],
        ["4", "70000", "-5"],
    ),
    "math": (
        "DigitalLearningGmbH/MATH-lighteval",
        "What is it? Let's think step by step and output the final answer within \\boxed{}.",
        {"level": "Level 1", "type": "Algebra"},
        [r"\frac{3}{4}", r"\{1, \sqrt{2}\}", "7"],
    ),
}


@pytest.mark.parametrize("task", WRITTEN)
def test_rows_are_verls_and_their_solutions_earn_one(task: str, prepare: Any, tmp_path: Path, capsys: Any) -> None:
    source, prompt, extra, truths = WRITTEN[task]
    assert prepare(task) == 0
    out = tmp_path / "out"
    assert capsys.readouterr().out == f"{out}/train.parquet: 3 rows\n{out}/test.parquet: 1 rows\n"
    rows = pq.read_table(out / "train.parquet").to_pylist()
    assert rows[1] == {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truths[1]},
        "extra_info": {"split": "train", "index": 1} | extra,
    }
    assert [row["reward_model"]["ground_truth"] for row in rows] == truths
    assert [p.ground_truth for p in prompts_of(out / "test.parquet")] == truths[:1]
    solutions = [list(example.values())[-1] for example in EXAMPLES[task]]
    for i, row in enumerate(rows):
        texts = (solutions[i], solutions[i - 1], row["prompt"][0]["content"])
        assert [scored(text, truths[i], source).score for text in texts] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("task", "line", "words"),
    [
        ("gsm8k", '{"question": "q", "answer": "just 4"}', ["test.jsonl, line 2", "answer", "'#### NUMBER'"]),
        ("gsm8k", '{"question": "q"}', ["test.jsonl, line 2", "'answer'", "question"]),
        ("gsm8k", '{"question": " ", "answer": "#### 4"}', ["non-empty text", "'question'"]),
        ("gsm8k", "{", ["test.jsonl, line 2", "valid JSON"]),
        ("math", '{"problem": "p", "solution": "4"}', ["line 2", "solution", r"'\boxed{ANSWER}'", "'4'"]),
        ("math", r'{"problem": "p", "solution": "\\boxed{4"}', ["solution", r"'\boxed{ANSWER}'"]),
        ("math", r'{"problem": "p", "solution": "\\boxed{ }"}', ["solution", r"'\boxed{ANSWER}'"]),
        ("math", '{"problem": "p", "answer": "4"}', ["line 2", "'solution'", "problem, answer"]),
    ],
)
def test_a_bad_example_is_named_and_leaves_old_files_alone(
    task: str, prepare: Callable[..., int], train: Path, capsys: pytest.CaptureFixture[str], line: str, words: list
) -> None:
    assert prepare(task, line) == 2
    says(capsys.readouterr().err, *words)
    assert train.read_bytes() == b"old"


def test_a_failed_write_leaves_the_old_file(prepare: Any, train: Path, monkeypatch: Any, capsys: Any) -> None:
    def full_disk(table: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    assert prepare("gsm8k") == 2
    says(capsys.readouterr().err, f"--local_save_dir={train.parent}", "write", "space left")
    assert train.read_bytes() == b"old"
    assert [p.name for p in train.parent.iterdir() if p.is_file()] == ["train.parquet"]


def test_broken_and_missing_files_and_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    local = ["math", "--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path)]
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    assert main(local) == 2
    says(capsys.readouterr().err, "train.parquet:", "parquet file")
    (tmp_path / "train.parquet").unlink()
    assert main(local) == 2
    says(capsys.readouterr().err, "train.jsonl, train.json, train.parquet or train-*-of-*.parquet")

    from_hub = ["gsm8k", "--local_save_dir", str(tmp_path)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(from_hub) == 2
    says(capsys.readouterr().err, "install datasets")

    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("offline")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    assert main(from_hub) == 2
    says(capsys.readouterr().err, "openai/gsm8k", "ConnectionError: offline")


@pytest.mark.parametrize(
    ("task", "named"),
    [("gsm8k", ("openai/gsm8k", "main")), ("math", ("DigitalLearningGmbH/MATH-lighteval", "default"))],
)
def test_from_the_hub(task: str, named: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str, *, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return EXAMPLES[task]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert main([task, "--local_save_dir", str(tmp_path)]) == 0
    assert asked == [(*named, "train"), (*named, "test")]
    assert pq.read_table(tmp_path / "test.parquet").num_rows == 3


@pytest.mark.deep
@pytest.mark.skipif(not RELEASE.is_dir(), reason="the GSM8K release is not on this machine")
def test_whole_release_its_own_answers_earn_one(tmp_path: Path) -> None:
    assert main(["gsm8k", "--local_dataset_path", str(RELEASE), "--local_save_dir", str(tmp_path)]) == 0
    for split, count in (("train", 7473), ("test", 1319)):
        prompts = prompts_of(tmp_path / f"{split}.parquet")
        assert len(prompts) == count
        for prompt, other in zip(prompts, prompts[1:] + prompts[:1], strict=True):
            answer, question = prompt.extra_info["answer"], prompt.extra_info["question"]
            scores = [
                scored(text, prompt.ground_truth, prompt.data_source, prompt.extra_info).score
                for text in (answer, question, answer.partition("####")[0], other.extra_info["answer"])
            ]
            assert scores == [1.0, 0.0, 0.0, float(other.ground_truth == prompt.ground_truth)], prompt.location


def test_arithmetic_is_the_built_in_task_and_a_moved_one_is_told(tmp_path: Path, capsys: Any) -> None:
    assert main(["arithmetic", "--local_save_dir", str(tmp_path)]) == 0
    for split in ("train", "validation"):
        from_file = [(p.messages, p.ground_truth) for p in prompts_of(tmp_path / f"{split}.parquet")]
        assert from_file == [(r["prompt"], r["reward_model"]["ground_truth"]) for r in arithmetic.rows(split)]
    assert main(["planner", "--local_save_dir", "x"]) == 2
    says(capsys.readouterr().err, "planner", "python examples/planner/planner_rows.py --local_save_dir x")


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ([], ["TASK"]),
        (["gsm9k", "--local_save_dir", "x"], ["'gsm9k'"]),
        (["math"], ["--local_save_dir"]),
        (["countdown", "--local_save_dir", "x", "--train_size", "many"], ["--train_size", "'many'"]),
        (["arithmetic", "--local_save_dir", "x", "--seed", "1"], ["--seed 1"]),
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        says(capsys.readouterr().err, *words)
