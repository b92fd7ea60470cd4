"""The first lines of an output, whatever pieces it comes in, and the number of the others."""

import random

import pytest

from grpo_dist.rewards.output_lines import MOST_LINE_BYTES, OutputLines


def taken(output: bytes, size: int, most_lines: int = 3) -> tuple[list[str], int]:
    printed = OutputLines(most_lines)
    for start in range(0, len(output), size):
        printed.add(output[start : start + size])
    return printed.take()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_pieces_do_not_matter(size: int) -> None:
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


def test_after_taking_it_starts_anew() -> None:
    printed = OutputLines()
    assert printed.take() == ([], 0)
    printed.add(b"a\n")
    assert printed.take() == (["a"], 0)
    printed.add(b"b\n")
    assert printed.take() == (["b"], 0)


def test_an_endless_line_takes_no_memory() -> None:
    printed = OutputLines()
    for _ in range(100):
        printed.add(b"x" * 100_000)
    assert printed.take() == (["x" * MOST_LINE_BYTES], 0)
