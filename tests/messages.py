"""What a message must name, whatever its sentences are: keys, values, numbers, files, ranks, and what to set."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_WORD = r"(?!(?:and|or)\b)[a-zA-Z][a-zA-Z'-]*"
SENTENCE = re.compile(rf"(?<!\S){_WORD} {_WORD} {_WORD}(?![^\s.,;:?!)])")


def names(text: str, part: str) -> bool:
    """Whether a part stands in a text as a whole word or number: `n=1` does not stand in `n=16`, nor `2` in `0.25`."""
    before = r"(?<!\w)(?<!\d\.)" if re.match(r"\w", part) else ""
    after = r"(?!\w)(?!\.\d)" if re.search(r"\w$", part) else ""
    return re.search(before + re.escape(part) + after, text) is not None


def is_prose(part: str) -> bool:
    """Whether more than two plain words follow each other: a piece of a sentence, which may be put in other words."""
    return SENTENCE.search(part) is not None


def says(told: object, *parts: object) -> None:
    """Assert that a message names every part.

    Args:
        told: a text, an error, what `pytest.raises` caught, or a list of texts, of which one must name every part.
        parts: what a user acts upon, such as `key=value`, a file and its row, or the setting that helps.
    """
    if isinstance(told, pytest.ExceptionInfo):
        told = told.value
    texts = [str(text) for text in told] if isinstance(told, list | tuple) else [str(told)]
    wanted = [str(part) for part in parts]
    assert wanted, "says() checks nothing without parts"
    assert not any(map(is_prose, wanted)), f"sentences may change; name keys, values and what to set: {wanted}"
    if not any(all(names(text, part) for part in wanted) for text in texts):
        missing = [part for part in wanted if not any(names(text, part) for text in texts)]
        raise AssertionError(f"{missing or wanted} missing in:\n" + "\n".join(texts))


@contextmanager
def refuses(kind: type[BaseException], *parts: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of a class whose message names every part."""
    with pytest.raises(kind) as caught:
        yield caught
    says(caught, *parts)
