"""A reward function that hangs, crashes or ends its process harms one response only."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards.contract import Failure, RewardResult, RowNeeds, Sample
from grpo_dist.rewards.scorer import Scorer
from tests.messages import refuses, says

FILE = """
import ctypes, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, unit=1.0):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "hang in C":  # holds the interpreter lock: no signal handler, no thread can end it
        ctypes.PyDLL(None).sleep(1000)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "close":
        os.closerange(3, 200)
        time.sleep(1000)
    if solution_str == "raise":
        raise ValueError("no")
    return {"score": unit, "pid": os.getpid()}

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [compute_score(*row) for row in zip(data_sources, solution_strs, ground_truths, extra_infos)]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scorer") / "mine.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def scorer(file: str) -> Iterator[Scorer]:
    scorer = Scorer(file, "compute_score", {"unit": 2.0}, timeout_s=60.0)
    yield scorer
    scorer.stop()


def samples(*texts: str) -> list[Sample]:
    return [Sample(text, "source", "truth", {}, []) for text in texts]


def outcome(results: list) -> list[float | str]:
    return [result.text.splitlines()[0] if isinstance(result, Failure) else result.score for result in results]


def test_what_the_module_declares_is_known_here(scorer: Scorer, tmp_path: Path) -> None:
    scorer.start()
    assert scorer.components == {}
    (tmp_path / "mine.py").write_text(
        FILE + "\ndef declare_components(unit=1.0):\n    return {'right': unit, 'short': 0.5}\n"
    )
    declaring = Scorer(str(tmp_path / "mine.py"), "compute_score", {"unit": 2.0}, timeout_s=60.0)
    try:
        declaring.start()
        assert declaring.components == {"right": 2.0, "short": 0.5}
    finally:
        declaring.stop()


def test_it_scores_in_another_process(scorer: Scorer) -> None:
    first, second = scorer.score(samples("a", "b"))
    assert first.score == second.score == 2.0
    assert first.extra["pid"] == second.extra["pid"] != os.getpid()
    assert scorer.num_starts == 1


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("hang", "did not return within reward.timeout_s=4 seconds and was killed"),
        ("hang in C", "did not return within reward.timeout_s=4 seconds and was killed"),
        ("segfault", "ended its process by SIGSEGV"),
        ("exit", "ended its process with exit code 3"),
        ("close", "closed the pipe for its results, lived on for 5 seconds and was killed"),
    ],
)
def test_the_rest_of_the_group_goes_to_a_new_process(scorer: Scorer, bad: str, problem: str) -> None:
    if bad.startswith("hang"):
        scorer.timeout_s = 4.0  # good responses must meet it too
    results = scorer.score(samples("a", bad, "b", "raise", "c"))
    where = "reward function compute_score, data_source='source'"
    assert outcome(results)[:3] == [2.0, f"{where}: {problem}", 2.0]
    assert f"response: {bad!r}" in results[1].text
    assert isinstance(results[3], Failure)
    says(results[3].text, "ValueError: no")
    assert outcome(results)[4] == 2.0
    assert results[0].extra["pid"] != results[2].extra["pid"] == results[4].extra["pid"]
    assert scorer.num_starts == 2


def test_the_last_response_may_end_the_process_too(scorer: Scorer) -> None:
    assert isinstance(scorer.score(samples("a", "exit"))[1], Failure)
    assert outcome(scorer.score(samples("b"))) == [2.0]


def test_a_process_that_was_killed_meanwhile_is_replaced(scorer: Scorer) -> None:
    (before,) = scorer.score(samples("a"))
    os.kill(int(before.extra["pid"]), signal.SIGKILL)
    assert scorer._process is not None
    scorer._process.wait()
    assert outcome(scorer.score(samples("b", "c"))) == [2.0, 2.0]


def test_a_function_of_the_whole_group_fails_as_a_whole(file: str) -> None:
    scorer = Scorer(file, "batch", {}, timeout_s=60.0)
    try:
        assert outcome(scorer.score(samples("a", "b"))) == [1.0, 1.0]
        scorer.timeout_s = 1.0
        assert all(isinstance(result, Failure) for result in scorer.score(samples("a", "hang in C", "b")))
        scorer.timeout_s = 60.0
        assert outcome(scorer.score(samples("c"))) == [1.0]
    finally:
        scorer.stop()


def test_a_group_of_none(scorer: Scorer) -> None:
    assert scorer.score([]) == []


def test_mistakes_of_the_run_are_raised(file: str, tmp_path: Path) -> None:
    with refuses(ConfigError, f"custom_reward_function.path/name={file}:misses"):
        Scorer(file, "misses", {}, timeout_s=60.0).start()
    ending = tmp_path / "ending.py"
    ending.write_text("import os\nos._exit(4)\n")
    with refuses(RewardError, "ending.py", "exit code", "4"):
        Scorer(str(ending), "compute_score", {}, timeout_s=60.0).start()
    built_in = Scorer(None, "compute_score", {}, timeout_s=60.0)
    try:
        with refuses(ConfigError, "'source'", "custom_reward_function.path"):
            built_in.score(samples("a"))
    finally:
        built_in.stop()


PRINTING = """
import os, sys

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("seen", solution_str)
    if solution_str == "much":
        for _ in range(300_000):
            print("x" * 20)
    if solution_str == "forever":
        while True:
            os.write(1, b"y" * 1_000_000)
    if solution_str == "ends":
        sys.stderr.write("about to end\\n")
        os._exit(3)
    if solution_str == "closes":
        os.close(1), os.close(2)
    return 1.0
"""


@pytest.fixture
def printing(tmp_path: Path) -> Iterator[Scorer]:
    (tmp_path / "printing.py").write_text(PRINTING)
    scorer = Scorer(str(tmp_path / "printing.py"), "compute_score", {}, timeout_s=120.0)
    yield scorer
    scorer.stop()


def test_what_it_prints_reaches_the_parent(printing: Scorer) -> None:
    assert outcome(printing.score(samples("a", "b"))) == [1.0, 1.0]
    assert printing.printed.take() == (["seen a", "seen b"], 0)
    assert outcome(printing.score(samples("c"))) == [1.0]
    assert printing.printed.take() == (["seen c"], 0)


def test_much_output_neither_stops_it_nor_is_kept(printing: Scorer) -> None:
    assert outcome(printing.score(samples("much", "b"))) == [1.0, 1.0]
    lines, num_more = printing.printed.take()
    assert lines == ["seen much", *["x" * 20] * 4]
    assert num_more == 300_002 - 5


def test_output_without_an_end_meets_the_time_limit(printing: Scorer) -> None:
    printing.timeout_s = 4.0  # which "b" must meet too
    failure, good = printing.score(samples("forever", "b"))
    says(failure.text, "reward.timeout_s=4", "killed")
    assert good.score == 1.0


@pytest.mark.timeout(60)
def test_output_that_is_there_at_every_look_meets_the_time_limit_too(scorer: Scorer) -> None:
    scorer.start()
    scorer.timeout_s = 1.0
    with open("/dev/zero", "rb") as endless:
        scorer._output = endless.fileno()
        (failure,) = scorer.score(samples("hang"))
    says(failure.text, "reward.timeout_s=1")


def test_the_last_words_of_a_process_are_kept(printing: Scorer) -> None:
    assert isinstance(printing.score(samples("ends"))[0], Failure)
    assert printing.printed.take() == (["seen ends", "about to end"], 0)
    assert outcome(printing.score(samples("closes"))) == [1.0], "it may close its output"
    assert printing.printed.take() == (["seen closes"], 0)


def test_a_stopped_supervisor_is_killed(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.rewards.scorer.END_S", 0.5)
    (result,) = scorer.score(samples("a"))
    assert scorer._process is not None
    process = scorer._process
    assert process.pid != result.extra["pid"]
    os.kill(process.pid, signal.SIGSTOP)
    scorer.stop()
    assert process.returncode == -signal.SIGKILL
    assert outcome(scorer.score(samples("b"))) == [2.0]


def test_a_list_of_functions_of_several_forms(tmp_path: Path) -> None:
    """What the process says of the functions, and their sum: 1 - 0.5 * 2 for "aa"."""
    file = tmp_path / "several.py"
    file.write_text(
        "import os\n"
        "def right(data_source, solution_str, ground_truth=None, extra_info=None):\n"
        "    return float(solution_str == 'aa') or None\n"
        "def short(completions, level, **columns):\n"
        "    return [-len(text) if 'a' in text else os._exit(3) if text == 'boom' else None for text in completions]\n"
    )
    functions = [{"path": f"{file}:right"}, {"path": f"{file}:short", "weight": 0.5}]
    scorer = Scorer("grpo_dist.rewards.weighted", "compute_score", {"functions": functions}, timeout_s=60)
    try:
        scorer.start()
        assert scorer.components == {"right": 1.0, "short": 0.5}
        assert scorer.needs == RowNeeds(False, frozenset({"level"}), None)
        asked = [{"role": "user", "content": "a?"}]
        rows = [Sample(text, "d", None, {}, asked, {"level": 1}, is_text=True) for text in ("aa", "b", "boom")]
        first, second = scorer.score(rows[:2])
        assert isinstance(first, RewardResult)
        assert (first.score, first.extra) == (0.0, {"right": 1.0, "short": -2.0})
        assert isinstance(second, Failure)
        says(second.text, "several.py:right", "several.py:short", "None")
        lost = scorer.score([rows[0], rows[2]])
        assert all(isinstance(each, Failure) for each in lost), "a function of a whole group fails on all of it"
        says(lost[0].text, "exit code 3")  # type: ignore[union-attr]
    finally:
        scorer.stop()
