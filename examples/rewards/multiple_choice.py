r"""Reward for the chosen letter of a multiple-choice question.

    custom_reward_function.path=examples/rewards/multiple_choice.py
    custom_reward_function.reward_kwargs='{choices: ABCDE}'

The first of these that names one allowed letter is the choice: the last `<answer>B</answer>`, the last `\boxed{B}`, the
last "Answer: B" or "the answer is (B)" (also option, choice), the last "(B)", and a response that is the letter and
nothing else. Different letters in a row in such a place are no choice, whatever else the response says: "A or B",
"A; B", "A - B - C", "(B) or (A)", "A. B. C.", letters on lines of their own. What follows a letter and its dot, colon,
bracket or dash is the option's text: "D. A and B" is D, "B. A dog" is B.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.rewards.format import last_tag_content
from grpo_dist.tasks.competition_math.task import last_boxed

MOST_CHARACTERS = 80  # of a line after "Answer:" that are looked at
_STATED = re.compile(r"\b(?:answer|option|choice)\b[*_\s]*(?::|=|\bis\b)[*_\s:]*", re.IGNORECASE)
_LONE = re.compile(r"[\W_]*[A-Za-z][\W_]*")
_BRACKETED = re.compile(r"\([A-Za-z]\)")
_DECORATION = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\b|[^\S\n]+|[*_$(){}\[\]\"'`]+")
# What may stand between two letters of a row: signs and words, some of which make a list of it.
_OFFER = r"\b(?:or|and|maybe|perhaps|possibly)\b"
_BETWEEN = rf"(?:[\W_]|{_OFFER}|\b(?:option|choice)\b)+"
_GAP = re.compile(_BETWEEN, re.IGNORECASE)
_ANOTHER = re.compile(rf"({_BETWEEN})([A-Za-z])(?![\w'’])", re.IGNORECASE)
_LIST = re.compile(rf"[\n,;/&+|]|{_OFFER}", re.IGNORECASE)
_JOINED = re.compile(rf"[,/&+]|{_OFFER}", re.IGNORECASE)  # whatever is said of the second letter: "A or B is right"
_WORD_FOLLOWS = re.compile(rf"[^\S\n]+(?!{_OFFER})\w[\w'’]", re.IGNORECASE)
_DASH = re.compile(r"[-–—]")


def extract_choice(text: str, choices: str) -> str | None:
    """The letter that the response chooses, in capitals; None: no allowed one, or several at once."""
    for place in _places(text):
        letter = _letter(place, choices)
        if letter is not None:
            return letter or None
    return None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    choices: str = "ABCD",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Score the choice.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the right letter, as "B", "b" or "(B)".
        extra_info: not used.
        choices: the allowed letters.
        format_score: for a wrong choice; no choice earns 0.

    Returns:
        score; `format`, 1 where there is a choice; `acc`, 1 for the right one; `pred`, the letter, or None.

    Raises:
        ValueError: the ground truth is none of the letters.
    """
    truth = str(ground_truth).strip().strip("().").upper()
    if len(truth) != 1 or truth not in choices.upper():
        raise ValueError(f"ground_truth {ground_truth!r} is none of the choices {choices!r}")
    choice = extract_choice(solution_str, choices)
    correct = choice == truth
    score = 1.0 if correct else 0.0 if choice is None else format_score
    return {"score": score, "format": float(choice is not None), "acc": float(correct), "pred": choice}


def check_reward_kwargs(*, choices: str = "ABCD", format_score: float = 0.0) -> None:
    """Check the arguments before a run starts.

    Raises:
        ConfigError: the choices are not different letters.
    """
    if not isinstance(choices, str) or not re.fullmatch(r"[A-Za-z]+", choices) or len(set(choices)) != len(choices):
        raise ConfigError(
            f"custom_reward_function.reward_kwargs.choices={choices!r}: must be different letters, such as ABCD"
        )


def _places(text: str) -> Iterator[str]:
    """Where a choice may stand, the clearest place first."""
    yield from filter(None, (last_tag_content(text, "answer"), last_boxed(text)))
    for stated in reversed(list(_STATED.finditer(text))):
        yield _stated_letters(text[stated.end() : stated.end() + MOST_CHARACTERS])
    yield from filter(None, [", ".join(_last_bracketed(text))])
    if len(text.strip().strip("*().:")) == 1:
        yield text


def _stated_letters(text: str) -> str:
    """The line after "Answer:", and the lines behind it that are a letter and nothing else."""
    first, *others = text.split("\n")
    if len(text) == MOST_CHARACTERS:
        others = others[:-1]  # it may go on
    alone = itertools.takewhile(lambda line: not line.strip() or _LONE.fullmatch(line), others)
    return "\n".join([first, *alone])


def _last_bracketed(text: str) -> list[str]:
    """The last "(B)", behind those that it is in a row with."""
    row: list[re.Match[str]] = []
    for found in reversed(list(_BRACKETED.finditer(text))):
        if row and not _GAP.fullmatch(text, found.end(), row[-1].start()):
            break
        row.append(found)
    return [found.group()[1] for found in reversed(row)]


def _letter(text: str, choices: str) -> str | None:
    """The letter that a place begins with; "": it offers others as well; None: it begins with something else."""
    plain = _DECORATION.sub(" ", text).strip()
    letter, rest = plain[:1].upper(), plain[1:]
    if not letter or letter not in choices.upper() or rest[:1].isalnum() or rest.startswith(("'", "’")):
        return None
    letters, gaps = _row(plain, choices)
    if _are_a_list(letters, gaps):
        return ""
    return None if plain[0].islower() and _WORD_FOLLOWS.match(rest) and not gaps else letter  # "a dog"


def _row(plain: str, choices: str) -> tuple[list[str], list[str]]:
    """The allowed letters that a text begins with, in capitals, and what stands between them."""
    letters, gaps, position = [plain[0].upper()], [], 1
    while (another := _ANOTHER.match(plain, position)) and another.group(2).upper() in choices.upper():
        gap, letter = another.groups()
        position = another.end()
        if _WORD_FOLLOWS.match(plain, position) and (letter == "a" or not _JOINED.search(gap)):
            break  # "B. A dog", "B; A is wrong"
        letters.append(letter.upper())
        gaps.append(gap)
    return letters, gaps


def _are_a_list(letters: Sequence[str], gaps: Sequence[str]) -> bool:
    """Whether letters in a row are several choices, not one and the text of its option."""
    if len(set(letters)) < 2:
        return False
    kinds = ["list" if _LIST.search(gap) else "dash" if _DASH.search(gap) else "label" for gap in gaps]
    if kinds[0] == "list":
        return True
    return len(set(kinds)) == 1 and (kinds[0] == "dash" or len(letters) > 2)
