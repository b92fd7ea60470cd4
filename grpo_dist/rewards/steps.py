"""The steps of a response: where each one ends, in text and in tokens. For process rewards.

A step is the text up to a separator, or up to the end; white space alone is not a step. A reward function
that judges steps returns `{"score": ..., "step_scores": [...]}` with one number for each step of its `solution_str`.
"""

from __future__ import annotations

from collections.abc import Sequence


def step_ends(token_texts: Sequence[str], separator: str) -> list[int]:
    """The position of each step's last token: the one that completes the separator; for the last step, the last one.

    Args:
        token_texts: the text of each token of a response ("" for special tokens).
        separator: between steps; may span tokens.

    Returns:
        One position for each step of the text, ascending. Steps that share a token share its position.
    """
    text = "".join(token_texts)
    ends, start, token, consumed = [], 0, 0, len(token_texts[0]) if token_texts else 0
    while start < len(text):
        found = text.find(separator, start)
        stop = len(text) if found < 0 else found + len(separator)
        while consumed < stop:
            token += 1
            consumed += len(token_texts[token])
        if text[start : stop if found < 0 else found].strip():
            ends.append(token)
        start = stop
    if ends and not text[text.rfind(separator) + len(separator) :].strip() and separator in text:
        return ends  # what follows the last separator is no step of its own
    return [*ends[:-1], len(token_texts) - 1] if ends else []
