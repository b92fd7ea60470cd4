"""MATH to verl's parquet files, from small local files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.tasks.prepare import main
from tests.messages import says
from tests.rewards.scoring import scored

EXAMPLES = [
    {
        "problem": "What is $1/2+1/4$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"First \boxed{no}, then $\boxed{\frac{3}{4}}$.",
    },
    {"problem": "A set?", "level": "Level 5", "type": "Precalculus", "solution": r"It is $\boxed{\{1, \sqrt{2}\}}$"},
    {"problem": "Short?", "level": None, "type": "Geometry", "solution": r"So $\boxed 7$ it is."},
]
TRUTHS = [r"\frac{3}{4}", r"\{1, \sqrt{2}\}", "7"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = tmp_path / "raw"
    raw.mkdir()
    pq.write_table(pa.Table.from_pylist(EXAMPLES), raw / "train.parquet")
    (raw / "test.jsonl").write_text("\n".join(map(json.dumps, EXAMPLES[:1])))
    return raw


def prepare(raw: Path, out: Path) -> int:
    return main(["math", "--local_dataset_path", str(raw), "--local_save_dir", str(out)])


def test_rows_are_verls_and_their_solutions_earn_one(folder: Path, tmp_path: Path) -> None:
    assert prepare(folder, tmp_path / "out") == 0
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert rows[0] == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {
                "role": "user",
                "content": EXAMPLES[0]["problem"]
                + " Let's think step by step and output the final answer within \\boxed{}.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{3}{4}"},
        "extra_info": {"split": "train", "index": 0, "level": "Level 1", "type": "Algebra"},
    }
    assert [row["reward_model"]["ground_truth"] for row in rows] == TRUTHS
    assert pq.read_table(tmp_path / "out" / "test.parquet").num_rows == 1
    for i, row in enumerate(rows):
        scores = [
            scored(text, row["reward_model"]["ground_truth"], row["data_source"], row["extra_info"]).score
            for text in (EXAMPLES[i]["solution"], EXAMPLES[i - 1]["solution"], EXAMPLES[i]["problem"])
        ]
        assert scores == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "p", "solution": "4"}, ["test.jsonl, line 2", "solution", r"'\boxed{ANSWER}'", "'4'"]),
        ({"problem": "p", "solution": r"\boxed{4"}, ["solution", r"'\boxed{ANSWER}'"]),
        ({"problem": "p", "solution": r"\boxed{ }"}, ["solution", r"'\boxed{ANSWER}'"]),
        ({"problem": "p", "answer": "4"}, ["line 2", "'solution'", "problem, answer"]),
        ({"problem": 3, "solution": r"\boxed{4}"}, ["line 2", "text", "'problem'"]),
    ],
)
def test_a_bad_example_is_named_and_nothing_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict, words: list[str]
) -> None:
    with (folder / "test.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row))
    assert prepare(folder, tmp_path / "out") == 2
    says(capsys.readouterr().err, *words)
    assert not (tmp_path / "out").exists()


def test_broken_and_missing_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.parquet").write_bytes(b"PAR1 not really")
    assert prepare(folder, tmp_path / "out") == 2
    says(capsys.readouterr().err, "train.parquet:", "parquet file")
    (folder / "train.parquet").unlink()
    assert prepare(folder, tmp_path / "out") == 2
    says(capsys.readouterr().err, "train.jsonl, train.json, train.parquet or train-*-of-*.parquet")


def test_from_the_hub(tmp_path: Path, serve) -> None:
    asked = serve(EXAMPLES)
    assert main(["math", "--local_save_dir", str(tmp_path)]) == 0
    assert asked == [("DigitalLearningGmbH/MATH-lighteval", "default", split) for split in ("train", "test")]
    assert pq.read_table(tmp_path / "test.parquet").num_rows == 3
