"""`grpo-dist audit` on rollouts of a simulated policy, and the rows that its list leaves out of a run."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.cli.audit import audit
from grpo_dist.errors import ConfigError
from tests.cli.conftest import Call
from tests.messages import refuses, says
from tests.report.runs import write_run
from tests.report.test_page import data_in

N, ROWS = 8, 480


def write(folder: Path, step: int, groups: Sequence[tuple[str, str, list[str]]], **more: Any) -> None:
    """Groups of a step: prompt, ground truth, and answers, which pass where they are its text."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    rows = []
    for prompt, truth, answers in groups:
        about = {"step": step, "uid": f"step{step}", "input": prompt, "gts": truth, "row": f"{prompt} is {truth}"}
        rows += [about | {"output": f"so {each}", "score": float(each == truth)} | more for each in answers]
    (folder / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def simulated(folder: Path, share_wrong: float, seed: int) -> set[str]:
    """A policy that improves over 12 steps, and whose mistakes agree; returns the rows with a wrong ground truth."""
    rng, wrong = random.Random(seed), set[str]()
    for step in range(1, 13):
        groups = []
        for i in range(ROWS // 12):
            prompt, right, truth = f"{step}.{i}", str(100 + 3 * i + step), str(100 + 3 * i + step)
            rate = rng.betavariate(1, 3) if rng.random() < 0.02 else rng.betavariate(4 + step, 2)
            if rng.random() < share_wrong:
                truth = str(500 + i)
                wrong.add(f"{prompt} is {truth}")
            usual = [right, str(int(right) + 10), *(str(rng.randint(10, 99)) for _ in range(3))]
            agree = rng.betavariate(2, 2)
            answers = rng.choices(usual, [rate, (1 - rate) * agree, *[(1 - rate) * (1 - agree) / 3] * 3], k=N)
            groups.append((prompt, truth, answers))
        write(folder, step, groups)
    return wrong


def named(folder: Path, *others: Path) -> dict[str, dict[str, Any]]:
    return {each["row"]: each for each in audit([folder, *others])}


def easy(step: int = 1, count: int = 40) -> list[tuple[str, str, list[str]]]:
    """Rows that are mostly answered well, by different mistakes beside; their ground truths all differ."""
    rows = []
    for i in range(count):
        mistakes = [str(2000 + 10 * i + k) for k in (1, 1, 2, 3)][: i % 5]
        rows.append((f"easy {step}.{i}", str(1000 + i), [str(1000 + i)] * (N - len(mistakes)) + mistakes))
    return rows


@pytest.mark.deep
def test_wrong_truths_are_found_and_probabilities_are_shares(tmp_path: Path) -> None:
    """5 % of 480 rows are wrong, four times."""
    found = right = planted = 0
    expected = 0.0
    for seed in range(4):
        wrong = simulated(tmp_path / f"{seed}", 0.05, seed)
        accused = {row: each["probability"] for row, each in named(tmp_path / f"{seed}").items()}
        found, right, planted = found + len(accused), right + len(wrong & accused.keys()), planted + len(wrong)
        expected += sum(accused.values())
        assert simulated(tmp_path / f"clean {seed}", 0, seed) == set()
        assert len(named(tmp_path / f"clean {seed}")) <= 0.01 * ROWS
    assert right >= 0.9 * found
    assert right >= 0.8 * planted
    assert abs(expected - right) < 0.1 * found


def test_a_hard_row_is_not_accused_and_one_whose_mistakes_last_is(tmp_path: Path) -> None:
    """What passes now and then has a right truth; two visits say more than one; other steps of the row count too."""
    hard = ("hard", "5", ["5"] * 2 + ["15"] * 6)
    wrong = ("wrong", "6", ["16"] * N)
    for step in (1, 2):
        write(tmp_path, step, [*easy(step), hard, wrong])
    ((row, told),) = named(tmp_path).items()
    about = {"kind": "truth", "says": "16", "saying": 16, "passed": 0, "responses": 16, "examples": ["0: so 16"] * 3}
    assert (row, told | about) == ("wrong is 6", told)
    write(tmp_path / "once", 1, [*easy(), hard, wrong])
    assert named(tmp_path / "once")["wrong is 6"]["probability"] < told["probability"]
    assert named(tmp_path, tmp_path / "once")["wrong is 6"]["responses"] == 3 * N


@pytest.mark.parametrize(
    ("truth", "answer"), [("18.0", "18"), ("$1,200", "1200"), ("Paris ", "paris"), (r"\frac{1}{2}", r"\frac{1} {2}")]
)
def test_a_truth_that_is_stated_and_never_paid_cannot_be_read(tmp_path: Path, truth: str, answer: str) -> None:
    write(tmp_path, 1, [*easy(), ("asked", truth, [f"\n{answer}"] * N)])
    assert {row: each["kind"] for row, each in named(tmp_path).items()} == {f"asked is {truth}": "scorer"}


def test_answers_are_those_of_the_scorer_where_it_says_them(tmp_path: Path) -> None:
    """`pred` before the text, `acc` before the score; responses that could not be scored say nothing."""
    write(tmp_path, 1, [*easy(), ("asked", "18", ["19"] * N)])
    write(tmp_path, 2, [("asked", "18", ["20"] * N)], pred="19")
    write(tmp_path, 3, [("asked", "18", ["20"] * N)], score=None)
    write(tmp_path, 4, [("asked", "18", ["19"] * N)], acc=0.0, score=1.0)
    told = named(tmp_path)["asked is 18"]
    assert (told["kind"], told["says"], told["saying"], told["responses"]) == ("truth", "19", 3 * N, 3 * N)


TWINS = [("twin", truth, ["21"] * N) for truth in ("21", "22")]
GUESSED = [(f"guess {i}", str(i), ["3"] * 2 + [str(40 + i + k) for k in range(6)]) for i in range(30)]
NEVER = ("never", "900", [str(200 + i) for i in range(N)])


def test_duplicates_guesses_and_rows_that_never_pass(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, [*easy(step, 20), *TWINS, *GUESSED, NEVER])
    found = named(tmp_path)
    kinds = {row: each["kind"] for row, each in found.items()}
    assert kinds["twin is 21"] == kinds["twin is 22"] == "duplicate"
    assert found["twin is 21"]["probability"] < 0.1 < 0.9 < found["twin is 22"]["probability"]
    assert kinds["guess 3 is 3"] == "guessed"
    assert (kinds["never is 900"], found["never is 900"]["probability"]) == ("never", pytest.approx(19 / 27, abs=1e-3))
    assert not any(row.startswith("easy") for row in kinds)


def test_the_command_shows_rows_and_writes_the_list(tmp_path: Path, call: Call) -> None:
    for step in (1, 2):
        write(tmp_path / "run", step, [*easy(step, 20), ("wrong", "6", ["16"] * N), *GUESSED, NEVER, *TWINS])
    list_of = tmp_path / "rows.jsonl"
    told = call("audit", tmp_path / "run", "--output", list_of).out
    says(told, "truth", "0 of 16", "'16'", "never", "guessed", "34 rows", f"data.exclude_rows={list_of}")
    listed = {(line := json.loads(text))["row"]: line for text in list_of.read_text().splitlines()}
    assert listed.keys() == {"wrong is 6", "twin is 22"}
    assert [listed["wrong is 6"][name] for name in ("kind", "truth", "prompt")] == ["truth", "6", "wrong"]


def test_the_report_has_the_rows_or_why_not(tmp_path: Path, call: Call) -> None:
    run = write_run(tmp_path / "run", [{"step": 1, "critic/score/mean": 0.5}])
    write(run, 1, [*easy(), ("<b>wrong</b>", "6", ["16"] * N)])
    call("report", run)
    text = (run / "report.html").read_text()
    assert data_in(text)["overview"]["named"] == audit([run]) != []
    assert "<b>wrong" not in text
    file = run / "rollouts" / "1.jsonl"
    file.write_text(file.read_text().replace('"row"', '"other"'))
    says(call("report", run).err, "warning", file, "line 1")
    assert data_in((run / "report.html").read_text())["overview"]["named"] == []


def test_what_cannot_be_audited_is_refused_in_a_sentence(tmp_path: Path, call: Call) -> None:
    with refuses(ConfigError, tmp_path, "rollouts", "trainer.log_rollouts=true"):
        audit([tmp_path])
    write(tmp_path / "failed", 1, [("1+1", "2", ["2"])], score=None)
    with refuses(ConfigError, tmp_path / "failed", "trainer.log_rollouts=true"):
        audit([tmp_path / "failed"])
    (tmp_path / "rollouts").mkdir()
    for line in ('{"uid": "step1-prompt1", "input": "1", "output": "1", "gts": "1", "score": 1}', "{", "[]"):
        (tmp_path / "rollouts" / "1.jsonl").write_text(line + "\n")
        says(call("audit", tmp_path, code=2).err, tmp_path / "rollouts" / "1.jsonl", "line 1")
