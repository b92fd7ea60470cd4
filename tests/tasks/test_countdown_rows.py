"""Generated Countdown problems: solvable, different, the same for the same seed."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from grpo_dist.errors import DataError
from grpo_dist.tasks.countdown import compute_score, draw_problems
from grpo_dist.tasks.prepare import main
from tests.messages import refuses, says


def solvable(values: tuple[Fraction, ...], target: int) -> bool:
    """By trying everything."""
    if len(values) == 1:
        return values[0] == target
    for i, j in combinations(range(len(values)), 2):
        a, b = values[i], values[j]
        rest = tuple(value for k, value in enumerate(values) if k not in (i, j))
        results = {a + b, a - b, b - a, a * b, *([a / b] if b else []), *([b / a] if a else [])}
        if any(solvable((*rest, result), target) for result in results):
            return True
    return False


def test_the_search_of_these_tests() -> None:
    assert solvable((Fraction(8), Fraction(8), Fraction(3), Fraction(3)), 24)  # 8 / (3 - 8 / 3)
    assert not solvable((Fraction(1), Fraction(1), Fraction(1)), 24)


def test_every_problem_has_a_solution() -> None:
    problems = draw_problems(60, [2, 3, 4], seed=1)
    assert {len(numbers) for numbers, _ in problems} == {2, 3, 4}
    for numbers, target in problems:
        assert solvable(tuple(map(Fraction, numbers)), target)
        assert 10 <= target <= 100
        assert all(1 <= number <= 99 for number in numbers)


def keys(file: Path) -> list[tuple[tuple[int, ...], int]]:
    truths = [row["reward_model"]["ground_truth"] for row in pq.read_table(file).to_pylist()]
    return [(tuple(sorted(truth["numbers"])), truth["target"]) for truth in truths]


def test_files(tmp_path: Path) -> None:
    def prepare(name: str, *options: str) -> tuple[bytes, bytes]:
        out = tmp_path / name
        assert main(["countdown", "--local_save_dir", str(out), "--train_size=300", "--test_size=50", *options]) == 0
        return (out / "train.parquet").read_bytes(), (out / "test.parquet").read_bytes()

    assert prepare("a") == prepare("b")
    train, test = keys(tmp_path / "a" / "train.parquet"), keys(tmp_path / "a" / "test.parquet")
    assert len(train) == 300
    assert len(test) == 50
    assert len({*train, *test}) == 350  # no problem twice, not across the files either
    prepare("c", "--seed=1", "--num_numbers", "5")
    other = keys(tmp_path / "c" / "train.parquet")
    assert {len(numbers) for numbers, _ in other} == {5}
    assert not {*other} & {*train}


def test_rows_fit_the_scorer(tmp_path: Path) -> None:
    assert main(["countdown", "--local_save_dir", str(tmp_path), "--num_numbers", "2", "--train_size", "20"]) == 0
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        truth = row["reward_model"]["ground_truth"]
        (a, b), target = truth["numbers"], truth["target"]
        assert str(target) in row["prompt"][0]["content"]
        found = [
            compute_score(row["data_source"], f"<answer>{expression}</answer>", truth, row["extra_info"])["score"]
            for expression in (f"{a}+{b}", f"{a}-{b}", f"{b}-{a}", f"{a}*{b}", f"{a}/{b}", f"{b}/{a}")
        ]
        assert max(found) == 1.0
        assert min(found) == 0.1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--train_size=0"], ["--train_size=0", "1"]),
        (["--test_size=-1"], ["--test_size=-1", "least 1"]),
        (["--num_numbers", "1"], ["--num_numbers=1", "2"]),
        (["--num_numbers", "3", "11"], ["--num_numbers=3, 11", "10"]),
    ],
)
def test_impossible_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list, words: list) -> None:
    assert main(["countdown", "--local_save_dir", str(tmp_path), *options]) == 2
    says(capsys.readouterr().err, *words)
    assert list(tmp_path.iterdir()) == []


def test_more_problems_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.tasks.countdown.NUMBERS", range(5, 7))
    with refuses(DataError, "100", "[2]", "6"):
        draw_problems(100, [2], seed=0)
