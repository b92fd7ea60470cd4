"""The first lines of an output, whatever pieces it comes in, and the number of the others."""

import asyncio
import pickle
import random
import sys
import threading

import pytest

from grpo_dist.errors import ConfigError
from grpo_dist.rewards.scorer import MOST_LINE_BYTES, OutputLines, PrintedLines, printing_to
from tests.messages import refuses, says


def taken(output: bytes, size: int, most_lines: int = 3) -> tuple[list[str], int]:
    printed = OutputLines(most_lines)
    for start in range(0, len(output), size):
        printed.add(output[start : start + size])
    return printed.take()


def test_the_pieces_do_not_matter() -> None:
    for size in (1, 2, 3, 7, 1000):
        assert taken(b"a\nbc\n", size) == (["a", "bc"], 0)
        assert taken(b"a\n\nb", size) == (["a", "", "b"], 0), "a last line without an end"
        assert taken(b"1\n2\n3\n4\n5\n", size) == (["1", "2", "3"], 2)
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
    """As an agent loop does, on an event loop of its own; what others print meanwhile is theirs."""
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
