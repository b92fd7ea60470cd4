r"""Reward for the chosen letter of a multiple-choice question.

    custom_reward_function.path=grpo_dist.rewards.multiple_choice
    custom_reward_function.reward_kwargs='{choices: ABCDE}'

The first of these that names one allowed letter is the choice: the last `<answer>B</answer>`, the last `\boxed{B}`, the
last "Answer: B" or "the answer is (B)" (also option, choice), the last "(B)", and a response that is the letter and
nothing else. More than one letter in such a place ("A or B") is no choice, whatever else the response says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from grpo_dist.boxed import last_boxed
from grpo_dist.errors import ConfigError
from grpo_dist.rewards.format import last_tag_content

MOST_CHARACTERS = 80  # of a line after "Answer:" that are looked at
_STATED = re.compile(r"\b(?:answer|option|choice)\b[*_\s]*(?::|=|\bis\b)[*_\s:]*", re.IGNORECASE)
_BRACKETED = re.compile(r"\([A-Za-z]\)")
_DECORATION = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\b|[\s*_$(){}\[\]\"'`]+")
_ANOTHER = re.compile(r"[\W_]*(?:or|and|,|/|&|\+)[\W_]*([A-Za-z])(?![A-Za-z'])")


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
        score; `format`, 1 where there is a choice; `acc`, 1 for the right one; `pred`, the letter ("" for none).

    Raises:
        ValueError: the ground truth is none of the letters.
    """
    truth = str(ground_truth).strip().strip("().").upper()
    if len(truth) != 1 or truth not in choices.upper():
        raise ValueError(f"ground_truth {ground_truth!r} is none of the choices {choices!r}")
    choice = extract_choice(solution_str, choices)
    correct = choice == truth
    score = 1.0 if correct else 0.0 if choice is None else format_score
    return {"score": score, "format": float(choice is not None), "acc": float(correct), "pred": choice or ""}


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
        yield text[stated.end() : stated.end() + MOST_CHARACTERS].partition("\n")[0]
    yield from _BRACKETED.findall(text)[-1:]
    if len(text.strip().strip("*().:")) == 1:
        yield text


def _letter(text: str, choices: str) -> str | None:
    """The letter that a place begins with; "": another one is offered as well; None: it begins with something else."""
    plain = _DECORATION.sub(" ", text).strip()
    letter, rest = plain[:1].upper(), plain[1:]
    if not letter or letter not in choices.upper() or rest[:1].isalnum() or rest.startswith(("'", "’")):
        return None
    if plain[0].islower() and re.match(r"\s+\w", rest):
        return None  # "a dog"
    another = _ANOTHER.match(rest)
    return "" if another and another.group(1).upper() in choices.upper() else letter
