"""Judged responses on disk: which of them a reward model is trained on."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

from grpo_dist.data.training_rows import JudgedResponses, LabelledSteps
from grpo_dist.errors import DataError
from tests.messages import refuses


def row(question: str, *steps: str, labels: list[bool] | None = None) -> dict:
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "completions": list(steps), "labels": labels or [True] * len(steps)}


def store(tmp_path: Path, *steps: list[dict]) -> JudgedResponses:
    made = JudgedResponses(tmp_path / "replay")
    made.folder.mkdir()
    for step, rows in enumerate(steps, 1):
        made.file(step).write_text("".join(json.dumps(each) + "\n" for each in rows))
    return made


def told(rows: list[LabelledSteps]) -> list[tuple[str, str]]:
    return [(each.prompt[0]["content"], "".join(each.steps)) for each in rows]


def test_an_iteration_and_a_share_of_what_was_before(tmp_path: Path) -> None:
    made = store(tmp_path, *[[row(f"q{step}", f"a{i}") for i in range(10)] for step in range(1, 5)])
    fresh, replayed, repeated = made.select(3, 4, 0.1, seed=1)
    assert told(fresh) == [(f"q{step}", f"a{i}") for step in (3, 4) for i in range(10)]
    assert (len(replayed), repeated) == (2, 0), "a tenth of twenty"
    assert {question for question, _ in told(replayed)} <= {"q1", "q2"}
    assert told(made.select(3, 4, 0.1, seed=1).replayed) == told(replayed)
    whole = told(made.select(3, 4, 1.0, seed=2).replayed)
    assert whole == [(f"q{step}", f"a{i}") for step in (1, 2) for i in range(10)]
    others = {tuple(told(made.select(3, 4, 0.1, seed=seed).replayed)) for seed in range(8)}
    assert len(others) > 1, "another seed, another choice"
    assert made.select(1, 2, 0.5, seed=1).replayed == []


def test_a_conversation_counts_once_where_it_came_first(tmp_path: Path) -> None:
    """However it is divided into steps; an empty step has an empty file."""
    again = [row("q", "a"), row("q", "b"), row("q", "b"), row("r", "a")]
    last = [row("q", "b"), row("s", "x", "y"), row("s", "xy")]
    made = store(tmp_path, [row("q", "a"), row("q", "a")], [], again, last)
    fresh, replayed, repeated = made.select(3, 4, 1.0, seed=0)
    assert told(replayed) == [("q", "a")]
    assert repeated == 4, "a, and b twice more, of q; xy of s in other steps"
    assert made.select(3, 4, 0.0, seed=0).repeated == 3, "what was before is not read without a share"
    assert told(fresh) == [("q", "b"), ("r", "a"), ("s", "xy")]
    assert [each.labels for each in fresh] == [[True], [True], [True, True]]


def test_the_responses_of_a_run_are_not_all_in_memory(tmp_path: Path) -> None:
    """Of four times as many steps, each with 200 kB, a hundredth is chosen: little more memory, not four times."""

    def peak(folder: Path, steps: int) -> int:
        made = store(folder, *[[row(f"q{step}", f"{i}" * 20_000) for i in range(10)] for step in range(1, steps + 1)])
        tracemalloc.start()
        fresh, replayed, _ = made.select(steps, steps, 0.01, seed=1)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (len(fresh), len(replayed)) == (10, round(0.1 * (steps - 1)))
        return found

    (tmp_path / "few").mkdir()
    (tmp_path / "many").mkdir()
    assert peak(tmp_path / "many", 40) < 2 * peak(tmp_path / "few", 10)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    made = store(tmp_path, [row("q", "a")], [row("r", "a")])
    made.check(range(1, 3))
    made.file(1).unlink()
    assert told(made.select(2, 2, 0.0, seed=0).fresh) == [("r", "a")], "without a share nothing earlier is read"
    with refuses(DataError, "reward_model.replay_share", str(made.file(1)), "step 1"):
        made.select(2, 2, 0.1, seed=0)
    with refuses(DataError, "reward_model.replay_share", str(made.file(1))):
        made.check(range(1, 3))
    made.file(1).write_text('{"prompt": "q", "completions": ["a"], "labels": []}\n')
    with refuses(DataError, made.file(1)):
        made.select(1, 2, 0.1, seed=0)
