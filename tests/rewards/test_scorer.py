"""A reward function that hangs, crashes or ends its process harms one response only."""

import asyncio
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards import scorer
from grpo_dist.rewards.contract import Failure, RewardResult, RowNeeds, Sample
from grpo_dist.rewards.scorer import MOST_LINE_BYTES, OutputLines, PrintedLines, Scorer, TooCostly, limited, printing_to
from tests.messages import refuses, says

FILE = """
import ctypes, os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info, unit=1.0):
    print("seen", solution_str)
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "hang in C":  # holds the interpreter lock: no signal handler, no thread can end it
        ctypes.PyDLL(None).sleep(1000)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "exit":
        sys.stderr.write("about to end\\n")
        os._exit(3)
    if solution_str == "close":
        os.closerange(3, 1 << 16)
        time.sleep(1000)
    if solution_str == "close output":
        os.close(1), os.close(2)
    if solution_str == "print much":
        for _ in range(300_000):
            print("x" * 20)
    if solution_str == "raise":
        raise ValueError("no")
    return {"score": unit, "pid": os.getpid()}

def right(data_source, solution_str, ground_truth=None, extra_info=None):
    return float(solution_str == "aa") or None

def short(completions, level, **columns):
    return [-len(text) if "a" in text else os._exit(3) if text == "boom" else None for text in completions]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scorer") / "mine.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def new(file: str) -> Iterator[Callable[..., Scorer]]:
    """Makes scorers, which are stopped at the end."""
    scorers = []

    def scorer(path: str | None = file, name: str = "compute_score", **reward_kwargs: Any) -> Scorer:
        scorers.append(Scorer(path, name, reward_kwargs, timeout_s=60.0))
        return scorers[-1]

    yield scorer
    for each in scorers:
        each.stop()


def samples(*texts: str) -> list[Sample]:
    return [Sample(text, "source", "truth", {}, []) for text in texts]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        pytest.param("hang in C", ["reward.timeout_s=4"], marks=pytest.mark.deep),
        ("segfault", ["SIGSEGV"]),
        pytest.param("exit", ["exit code 3"], marks=pytest.mark.deep),
        ("close", ["1 seconds"]),
    ],
)
def test_the_rest_of_the_group_goes_to_a_new_process(new: Any, bad: str, told: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("grpo_dist.rewards.scorer.END_S", 1.0)
    scorer = new(unit=2.0)
    if bad == "hang in C":
        scorer.timeout_s = 4.0  # good responses must meet it too
    results = scorer.score(samples("a", bad, "b", "raise", "c"))
    assert [results[i].score for i in (0, 2, 4)] == [2.0] * 3
    says(results[1].text, "compute_score", "data_source='source'", f"response: {bad!r}", *told)
    says(results[3].text, "ValueError: no")
    assert os.getpid() != results[0].extra["pid"] != results[2].extra["pid"] == results[4].extra["pid"]
    assert scorer.num_starts == 2


def test_a_process_that_has_ended_is_replaced(new: Callable[..., Scorer]) -> None:
    scorer = new()
    assert scorer.score([]) == []
    assert isinstance(scorer.score(samples("a", "exit"))[1], Failure)
    (before,) = scorer.score(samples("b"))
    os.kill(int(before.extra["pid"]), signal.SIGKILL)
    assert scorer._process is not None
    scorer._process.wait()
    assert [result.score for result in scorer.score(samples("b", "c"))] == [1.0, 1.0]


def test_what_built_in_scorers_import_is_not_in_the_time_of_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    monkeypatch.setattr(scorer, "check_data_sources", lambda names: events.append(list(names)))
    row: dict[str, Any] = {"ground_truth": "5", "extra_info": {}, "messages": []}
    received = iter([(None, "compute_score", {}), [Sample(solution_str="#### 5", data_source="arithmetic", **row)]])
    with pytest.raises(StopIteration):
        scorer.serve(SimpleNamespace(recv=lambda: next(received), send=events.append))
    _loaded, sources, begun, result = events
    assert (sources, begun, result.score) == (["arithmetic"], None, 1.0)


def test_mistakes_of_the_run_are_raised(new: Callable[..., Scorer], file: str, tmp_path: Path) -> None:
    with refuses(ConfigError, f"custom_reward_function.path/name={file}:misses"):
        new(name="misses").start()
    ending = tmp_path / "ending.py"
    ending.write_text("import os\nos._exit(4)\n")
    with refuses(RewardError, "ending.py", "exit code", "4"):
        new(str(ending)).start()
    with refuses(ConfigError, "'source'", "custom_reward_function.path"):
        new(None).score(samples("a"))


def test_what_it_prints_reaches_the_parent(new: Callable[..., Scorer]) -> None:
    """To the last words of a process; much output neither stops it nor is kept."""
    scorer = new()
    for texts, lines, num_more in (
        (["a", "b"], ["seen a", "seen b"], 0),
        (["print much", "b"], ["seen print much", *["x" * 20] * 4], 300_002 - 5),
        (["exit"], ["seen exit", "about to end"], 0),
        (["close output"], ["seen close output"], 0),
    ):
        results = scorer.score(samples(*texts))
        assert [isinstance(result, RewardResult) for result in results] == [text != "exit" for text in texts]
        assert scorer.printed.take() == (lines, num_more)


@pytest.mark.timeout(60)
def test_output_that_is_there_at_every_look_meets_the_time_limit_too(new: Callable[..., Scorer]) -> None:
    scorer = new()
    scorer.start()
    scorer.timeout_s = 1.0
    with open("/dev/zero", "rb") as endless:
        scorer._output = endless.fileno()
        (failure,) = scorer.score(samples("hang"))
    assert isinstance(failure, Failure)
    says(failure.text, "reward.timeout_s=1")


def test_a_stopped_supervisor_is_killed(new: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_dist.rewards.scorer.END_S", 0.5)
    scorer = new()
    (result,) = scorer.score(samples("a"))
    assert scorer._process is not None
    process = scorer._process
    assert process.pid != result.extra["pid"]
    os.kill(process.pid, signal.SIGSTOP)
    scorer.stop()
    assert process.returncode == -signal.SIGKILL
    assert scorer.score(samples("b"))[0].score == 1.0


def test_a_list_of_functions_of_several_forms(new: Callable[..., Scorer], file: str) -> None:
    """What the process says of the functions; 1 - 0.5 * 2 for "aa"."""
    functions = [{"path": f"{file}:right"}, {"path": f"{file}:short", "weight": 0.5}]
    scorer = new("grpo_dist.rewards.weighted", functions=functions)
    scorer.start()
    assert scorer.components == {"right": 1.0, "short": 0.5}
    assert scorer.needs == RowNeeds(False, frozenset({"level"}), None)
    asked = [{"role": "user", "content": "a?"}]
    rows = [Sample(text, "d", None, {}, asked, {"level": 1}, is_text=True) for text in ("aa", "boom")]
    assert scorer.score(rows[:1]) == [RewardResult(0.0, {"right": 1.0, "short": -2.0})]
    lost = scorer.score(rows)
    assert [type(each) for each in lost] == [Failure] * 2, "a function of a whole group fails on all of it"
    says(lost[0].text, "exit code 3")  # type: ignore[union-attr]


# --- limits that a scorer survives -----------------------------------------------------------------------------------
GIB = 1 << 30


@pytest.fixture
def lifted() -> Iterator[None]:
    """Asserts that nothing of the limits is left after the test."""

    def state() -> tuple[object, ...]:
        alarm = signal.getitimer(signal.ITIMER_PROF)
        return resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF), alarm

    before = state()
    yield
    assert state() == before


def spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_cpu_time_is_limited_in_python_and_in_long_integers(lifted: None) -> None:
    with limited(cpu_s=0.2, memory_bytes=GIB):
        spin(0.01)
        time.sleep(0.4)  # waiting costs nothing
    for work in (lambda: spin(60.0), lambda: 9**9**9):
        start = time.process_time()
        with pytest.raises(TooCostly), limited(cpu_s=0.2, memory_bytes=GIB):
            work()
        assert time.process_time() - start < 5


def test_an_error_that_somebody_catches_comes_again(lifted: None) -> None:
    caught = []

    def stubborn() -> None:
        for _ in range(2):
            try:
                spin(60.0)
            except BaseException as error:
                caught.append(type(error))
        spin(60.0)

    with pytest.raises(TooCostly), limited(cpu_s=0.1, memory_bytes=GIB):
        stubborn()
    assert caught == [TooCostly, TooCostly]


def test_memory_is_limited_in_every_thread(lifted: None) -> None:
    def too_much() -> None:
        with pytest.raises(TooCostly), limited(cpu_s=10.0, memory_bytes=GIB // 4):
            bytearray(GIB)
        bytearray(GIB // 2)

    too_much()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(too_much).result(timeout=60)


# --- the first lines of an output, whatever pieces it comes in, and the number of the others
def taken(output: bytes, size: int, most_lines: int = 3) -> tuple[list[str], int]:
    printed = OutputLines(most_lines)
    for start in range(0, len(output), size):
        printed.add(output[start : start + size])
    return printed.take()


def test_the_pieces_do_not_matter() -> None:
    for size in (1, 2, 3, 1000):
        assert taken(b"a\n\nb", size) == (["a", "", "b"], 0), "a last line without an end"
        assert taken(b"1\n2\n3\n4\n5", size) == (["1", "2", "3"], 2)
        assert taken(b"\xff\xe9\r\n", size) == (["\ufffd\ufffd"], 0)


@pytest.mark.parametrize("seed", range(20))
def test_all_lines_are_shown_or_counted(seed: int) -> None:
    rng = random.Random(seed)
    lines = ["x" * rng.choice([0, 1, 5, MOST_LINE_BYTES - 1, MOST_LINE_BYTES, 2000]) for _ in range(rng.randint(1, 9))]
    expected = [line[:MOST_LINE_BYTES] for line in lines[:3]], max(0, len(lines) - 3)
    output = "".join(f"{line}\n" for line in lines).encode()
    assert taken(output, rng.choice([1, 3, 499, 501, 10_000])) == expected


def test_an_endless_line_takes_no_memory() -> None:
    printed = OutputLines()
    assert printed.take() == ([], 0)
    for _ in range(100):
        printed.add(b"x" * 100_000)
    assert printed.take() == (["x" * MOST_LINE_BYTES], 0)
    printed.add(b"b\n")
    assert printed.take() == (["b"], 0), "after taking it starts anew"


def test_what_a_block_prints_is_kept_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = OutputLines()
    with printing_to(lines):
        print("seen", 3)
    print("not in it")
    with printing_to(lines):
        print("again", end="")
    assert lines.take() == (["seen 3", "again"], 0)
    assert capsys.readouterr().out == "seen 3\nnot in it\nagain"
    assert sys.stdout.encoding, "it is still a stream"


def test_what_was_printed_before_an_error_is_told_with_it() -> None:
    lines = OutputLines()
    with refuses(ConfigError, "it broke") as caught, printing_to(lines):
        print("scores", [1, 2])
        raise ConfigError("it broke")
    says(pickle.loads(pickle.dumps(caught.value)).__notes__, "scores [1, 2]")
    assert lines.take() == ([], 0)


def test_tasks_and_other_threads_of_the_block_print_to_it() -> None:
    lines, others = OutputLines(), asyncio.new_event_loop()
    thread = threading.Thread(target=others.run_forever)
    thread.start()

    async def work(name: str) -> None:
        await asyncio.sleep(0)
        await asyncio.to_thread(print, name)

    async def main() -> None:
        with printing_to(lines):
            mine = [asyncio.create_task(work("task"))]
        with printing_to(OutputLines()):
            mine.append(asyncio.create_task(work("another's")))
        await asyncio.gather(*mine)
        with printing_to(lines):
            beside = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work("beside"), others))
        await beside

    try:
        asyncio.run(main())
    finally:
        others.call_soon_threadsafe(others.stop)
        thread.join()
        others.close()
    assert lines.take() == (["task", "beside"], 0)


def test_lines_of_all_processes_are_told_once_and_not_at_length() -> None:
    printed = PrintedLines()
    for number in range(2):
        printed.note("reward function", [f"line {number}"] * 7, 100)
    printed.note("agent loop", ["one"], 0)
    printed.note("policy loss", [], 0)
    first, second = printed.take()
    lines = first.splitlines()
    assert lines[1:-1] == ["  line 0"] * 7 + ["  line 1"] * 3
    says(lines[0], "reward function")
    says(lines[-1], "204 more")
    assert second.splitlines()[1:] == ["  one"]
    assert printed.take() == []
