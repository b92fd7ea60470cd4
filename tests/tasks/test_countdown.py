"""Countdown: exact scores, and generated problems that are solvable, different, the same for the same seed."""

from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from grpo_dist.errors import DataError
from grpo_dist.tasks.countdown import compute_score, draw_problems, evaluate, parse_expression
from grpo_dist.tasks.prepare import main
from tests.messages import refuses, says

TRUTH = {"target": 24, "numbers": [3, 3, 8, 8]}


def answer(expression: str, truth: object = TRUTH, **kwargs: object) -> tuple[float, float, float, float]:
    found = compute_score("countdown", f"<think>hm</think> <answer>{expression}</answer>", truth, {}, **kwargs)
    return found["score"], found["format"], found["numbers"], found["acc"]


WAYS = ("8 / (3 - 8 / 3)", "8/(3-8/3) = 24", "8 ÷ (3 − 8 ÷ 3)", " \n8/(3-8/3)\n", "--8/(3-(8/3))", "8/(3-8/3) = 99")


def test_solutions_and_other_expressions() -> None:
    """A float would give 23.999...99; what follows the = is not looked at."""
    assert [answer(way) for way in WAYS] == [(1.0, 1.0, 1.0, 1.0)] * 6
    for expression, numbers in (
        ("3 + 3 + 8 + 8", 1.0),  # 22
        ("8 * 3", 0.0),  # not all of them
        ("8 * 3 * (8 - 8 + 3 / 3)", 0.0),  # one too often
        ("24", 0.0),
        ("38 - 3 - 8 - 3", 0.0),
        ("8 / (3 - 3) + 8", 1.0),  # division by zero
    ):
        assert answer(expression) == (0.1, 1.0, numbers, 0.0)
        assert answer(expression, format_score=0.0)[0] == 0.0


NO_EXPRESSIONS = (
    *("", "twenty-four", "8 ** 3", "9**9**9**9", "8 // 3", "8 % 3", "0x18", "2.4e1", "8, 3", "(8", "8 3", "08 + 3"),
    *("3 == 3", "__import__('os')", "8 if 3 else 8", "(8)(3)", "+" * 400 + "8"),
)


@pytest.mark.parametrize("expression", NO_EXPRESSIONS)
def test_what_is_no_expression(expression: str) -> None:
    assert answer(expression) == (0.0, 0.0, 0.0, 0.0)
    assert answer("(" * 149 + "8" + ")" * 149)[3] == 0.0, "too deep for the parser, or fine: either way no error"


def test_the_last_answer_counts_exactly() -> None:
    good, bad = "<answer>8/(3-8/3)</answer>", "<answer>8+3</answer>"
    assert compute_score("c", good + bad, TRUTH, {})["score"] == 0.1
    assert compute_score("c", bad + good, TRUTH, {})["score"] == 1.0
    assert compute_score("c", "8/(3-8/3)", TRUTH, {})["score"] == 0.0
    assert compute_score("c", "<result>8/(3-8/3)</result>", TRUTH, {}, tag="result")["score"] == 1.0
    for text, value in (("1/3+1/3+1/3", 1), ("-2*(3-5)", 4), ("7/2", Fraction(7, 2)), ("1-2-3", -4)):
        assert evaluate(parse_expression(text)) == value  # type: ignore[arg-type]


def test_a_broken_truth_is_an_error() -> None:
    for truth in (
        *(None, 24, "24", {}, {"target": 24}, {"target": 24, "numbers": []}, {"target": "24", "numbers": [24]}),
        *({"target": 24, "numbers": [True]}, {"target": 24, "numbers": 24}),
    ):
        with refuses(ValueError, '{"target": integer, "numbers": '):
            answer("24", truth)


# --- the problems ----------------------------------------------------------------------------------------------------
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


def test_every_problem_has_a_solution() -> None:
    assert solvable((Fraction(8), Fraction(8), Fraction(3), Fraction(3)), 24)  # 8 / (3 - 8 / 3)
    assert not solvable((Fraction(1), Fraction(1), Fraction(1)), 24)
    problems = draw_problems(60, [2, 3, 4], seed=1)
    assert {len(numbers) for numbers, _ in problems} == {2, 3, 4}
    for numbers, target in problems:
        assert solvable(tuple(map(Fraction, numbers)), target)
        assert 10 <= target <= 100
        assert all(1 <= number <= 99 for number in numbers)


def test_files(tmp_path: Path) -> None:
    def prepare(name: str, *options: str) -> tuple[bytes, bytes]:
        out = tmp_path / name
        assert main(["countdown", "--local_save_dir", str(out), "--train_size=300", "--test_size=50", *options]) == 0
        return (out / "train.parquet").read_bytes(), (out / "test.parquet").read_bytes()

    def problems(file: str) -> list[tuple[tuple[int, ...], int]]:
        truths = [row["reward_model"]["ground_truth"] for row in pq.read_table(tmp_path / file).to_pylist()]
        return [(tuple(sorted(truth["numbers"])), truth["target"]) for truth in truths]

    assert prepare("a") == prepare("b")
    train, test = problems("a/train.parquet"), problems("a/test.parquet")
    assert (len(train), len(test)) == (300, 50)
    assert len({*train, *test}) == 350  # no problem twice, not across the files either
    prepare("c", "--seed=1", "--num_numbers", "2")
    other = problems("c/train.parquet")
    assert not {*other} & {*train}
    for row in pq.read_table(tmp_path / "c/train.parquet").to_pylist()[:20]:
        truth = row["reward_model"]["ground_truth"]
        (a, b), target = truth["numbers"], truth["target"]
        assert str(target) in row["prompt"][0]["content"]
        expressions = (f"{a}+{b}", f"{a}-{b}", f"{b}-{a}", f"{a}*{b}", f"{a}/{b}", f"{b}/{a}")
        scores = [answer(expression, truth)[0] for expression in expressions]
        assert (max(scores), min(scores)) == (1.0, 0.1)


def test_impossible_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (["--train_size=0"], ["--train_size=0", "1"]),
        (["--test_size=-1"], ["--test_size=-1", "least 1"]),
        (["--num_numbers", "1"], ["--num_numbers=1", "2"]),
        (["--num_numbers", "3", "11"], ["--num_numbers=3, 11", "10"]),
    ):
        assert main(["countdown", "--local_save_dir", str(tmp_path), *options]) == 2
        says(capsys.readouterr().err, *words)
        assert list(tmp_path.iterdir()) == []


def test_more_problems_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.tasks.countdown.NUMBERS", range(5, 7))
    with refuses(DataError, "100", "[2]", "6"):
        draw_problems(100, [2], seed=0)
