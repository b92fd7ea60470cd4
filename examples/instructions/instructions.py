"""Questions with instructions on the form of the answer, and the scorer that checks them by rule.

    python examples/instructions/instructions.py data/instructions         writes train.jsonl and validation.jsonl
    custom_reward_function.path=examples/instructions/instructions.py      the scorer

The idea is that of IFEval (https://arxiv.org/abs/2311.07911) and of Tulu 3's "RLVR for precise instruction following"
(https://arxiv.org/abs/2411.15124): whether an answer has three sentences or no comma needs no judge. Here one or two of
ten kinds stand in each question, short enough for a small model on CPU.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {"train": 4000, "validation": 200}

# Each is its stem and its ending; an answer must have the stem in it.
TOPICS = """
volcano-es river-s forest-s desert-s island-s mountain-s glacier-s ocean-s beach-es cave-s valley-s waterfall-s
rainbow-s thunder snow wind cloud-s star-s comet-s planet-s ice sand salt gold silver iron glass paper wood plastic
cotton silk wool leather bread cheese butter honey sugar coffee tea milk rice pasta soup salad-s chocolate apple-s
banana-s orange-s lemon-s grapes potato-es tomato-es onion-s carrot-s pepper garlic dog-s cat-s horse-s cow-s pig-s
sheep goat-s chicken-s duck-s rabbit-s m-ice lion-s tiger-s elephant-s giraffe-s monkey-s bear-s wol-ves fox-es deer
whale-s dolphin-s shark-s turtle-s snake-s frog-s butterfl-ies bee-s ant-s spider-s eagle-s owl-s penguin-s parrot-s
doctor-s teacher-s farmer-s baker-s pilot-s nurse-s painter-s singer-s writer-s school-s librar-ies museum-s
hospital-s market-s airport-s bridge-s tower-s castle-s garden-s park-s kitchen-s window-s door-s clock-s lamp-s
mirror-s chair-s table-s bed-s pencil-s book-s letter-s map-s camera-s radio-s telephone-s computer-s bicycle-s
train-s ship-s airplane-s car-s bus-es rocket-s piano-s guitar-s violin-s drum-s football tennis chess swimming
""".split()
ANSWER = 0.25  # of the score is for an answer, whatever was asked of it
HELD_OUT = 30  # topics that only validation asks about
QUESTIONS = (
    "Tell me about {0}.",
    "Why do people like {0}?",
    "Why do we need {0}?",
    "Describe {0} to a child.",
    "What do you know about {0}?",
    "Say something interesting about {0}.",
)

NUMBERS = {1: "one", 2: "two", 3: "three"}
FIRST_WORDS = ("Well", "Today", "Usually", "Simply", "Imagine", "Sometimes", "Clearly", "Often")
LAST_WORDS = ("That is all.", "I hope this helps.", "Now you know.", "Is this clear?", "Ask me more.")
WORDS = ("people", "small", "always", "because", "water", "important", "morning", "world", "color", "different")
MOST_WORDS = (12, 16, 20)

# Kind: the instruction, and the values one of which it names.
KINDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "lowercase": ("Use lowercase letters only.", (None,)),
    "capitals": ("Use capital letters only.", (None,)),
    "no_comma": ("Do not use commas.", (None,)),
    "quotes": ("Put the whole answer in double quotation marks.", (None,)),
    "sentences": ("Answer in exactly {0}.", (1, 2, 3)),
    "bullets": ('Answer with exactly {0} lines that each start with "- ".', (2, 3)),
    "most_words": ("Use at most {0} words.", MOST_WORDS),
    "first_word": ('Begin with the word "{0}".', FIRST_WORDS),
    "last_words": ('End with the words "{0}"', LAST_WORDS),
    "word": ('Use the word "{0}".', WORDS),
}
# Kinds that would ask for different forms of the same thing.
APART = (
    {"lowercase", "capitals"},
    *({"bullets", other} for other in ("sentences", "quotes", "first_word", "last_words")),
)


def rows(split: str, *, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of a split in verl's schema; `ground_truth` lists the instructions as `[kind, value]`."""
    rng = random.Random(f"{seed} {split}")
    topics = random.Random(seed).sample(TOPICS, k=len(TOPICS))
    topics = topics[:HELD_OUT] if split == "validation" else topics[HELD_OUT:]
    found = []
    for index in range(SIZES[split]):
        stem, _, ending = rng.choice(topics).partition("-")
        kinds = rng.sample(list(KINDS), k=rng.choice((1, 2)))
        if any(pair <= set(kinds) for pair in APART):
            kinds = kinds[:1]
        wanted = [[kind, rng.choice(KINDS[kind][1])] for kind in kinds]
        asked = " ".join(_instruction(kind, value) for kind, value in wanted)
        found.append(
            {
                "data_source": "instructions",
                "prompt": [{"role": "user", "content": f"{rng.choice(QUESTIONS).format(stem + ending)} {asked}"}],
                "ability": "instruction following",
                "reward_model": {"style": "rule", "ground_truth": wanted},
                "extra_info": {"split": split, "index": index, "topic": stem},
            }
        )
    return found


def _instruction(kind: str, value: Any) -> str:
    text, _ = KINDS[kind]
    if kind == "sentences":
        return text.format("one sentence" if value == 1 else f"{NUMBERS[value]} sentences")
    return text.format(NUMBERS[value] if kind == "bullets" else value)


def compute_score(
    data_source: str, solution_str: str, ground_truth: list[list[Any]], extra_info: dict[str, Any]
) -> dict[str, float]:
    """A quarter for an answer, and the rest for the share of the instructions that it follows.

    A response is an answer if it is at least five words long, names the topic and ends as a sentence does: a text that
    keeps to the form and says nothing, or that the limit of its length cut off, is worth nothing. The quarter gives a
    model something to learn that seldom follows any instruction yet.

    Args:
        data_source: not used.
        solution_str: the response.
        ground_truth: the instructions, each a kind and its value.
        extra_info: its `topic`, the stem of the word.

    Returns:
        score; `acc`, 1 for an answer that follows all of them; `is_answer`; `followed`, the share of the instructions
        that the response follows, answer or not.
    """
    text = solution_str.strip()
    followed = [FOLLOWS[kind](text, value) for kind, value in ground_truth]
    is_answer = (
        len(text.split()) >= 5 and extra_info["topic"] in text.lower() and re.search(r"[.!?][\"']?$", text) is not None
    )
    share = sum(followed) / len(followed)
    return {
        "score": is_answer * (ANSWER + (1 - ANSWER) * share),
        "acc": float(is_answer and all(followed)),
        "is_answer": float(is_answer),
        "followed": share,
    }


def _bare(text: str) -> str:
    """The text without what surrounds it, for comparison."""
    return text.strip().strip('"').strip().casefold()


def _bullets(text: str, number: int) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) == number and all(re.match(r"- \w", line) for line in lines)


FOLLOWS: dict[str, Callable[[str, Any], bool]] = {
    "lowercase": lambda text, _: text == text.lower(),
    "capitals": lambda text, _: text == text.upper(),
    "no_comma": lambda text, _: "," not in text,
    "quotes": lambda text, _: re.fullmatch(r'"[^"]+"', text) is not None,
    "sentences": lambda text, number: len(re.findall(r"[.!?]+(?=[\s\"']|$)", text)) == number,
    "bullets": _bullets,
    "most_words": lambda text, number: len(text.split()) <= number,
    "first_word": lambda text, word: re.match(rf"{word.casefold()}\b", _bare(text)) is not None,
    "last_words": lambda text, words: _bare(text).endswith(words.casefold()),
    "word": lambda text, word: re.search(rf"\b{word}\b", text.casefold()) is not None,
}


def main(folder: str) -> None:
    """Write the splits as jsonl files."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        lines = [json.dumps(row) + "\n" for row in rows(split)]
        (Path(folder) / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
