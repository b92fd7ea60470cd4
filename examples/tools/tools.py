"""Two tools, and questions that take several calls of them.

python examples/tools/tools.py calculator data/tools/calculator         writes train.jsonl and validation.jsonl
python examples/tools/tools.py search data/tools/search
custom_reward_function.path=examples/tools/tools.py                     the scorer of both
"""

from __future__ import annotations

import json
import math
import operator
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

SIZES = {"train": 2000, "validation": 100}
SYSTEM = "Find the answer with the tools. End with the answer alone in <answer> </answer> tags."
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(a: int, operation: Literal["+", "-", "*"], b: int) -> int:
    """Compute with two numbers.

    Args:
        a: The first number.
        operation: What to do with them.
        b: The second number.
    """
    return int(OPERATIONS[operation](a, b))


def search(query: str) -> list[str]:
    """Search the documents; the two that fit best.

    Args:
        query: A few words.
    """
    return sorted(DOCUMENTS, key=lambda document: _bm25(_words(query), _words(document)), reverse=True)[:2]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float]:
    """1 for the right answer, 0.1 for another one in its tags; what tools say has no tags."""
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    right = bool(answers) and answers[-1].strip().rstrip(".").lower() == str(ground_truth).lower()
    return {"score": 1.0 if right else 0.1 * bool(answers), "acc": float(right)}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _bm25(query: list[str], document: list[str], k1: float = 1.5, b: float = 0.75) -> float:
    """Okapi BM25, https://doi.org/10.1561/1500000019."""
    counts, longer = Counter(document), len(document) / MEAN_LENGTH
    return sum(
        math.log(1 + (len(DOCUMENTS) - IN_DOCUMENTS[word] + 0.5) / (IN_DOCUMENTS[word] + 0.5))
        * counts[word]
        * (k1 + 1)
        / (counts[word] + k1 * (1 - b + b * longer))
        for word in query
    )


def _world() -> tuple[list[str], list[tuple[str, str]]]:
    """Documents on firms, people and towns that no model has heard of, and questions that take two or three of them."""
    rng = random.Random(1)
    names = ["".join(parts) for parts in {tuple(rng.choices(SYLLABLES, k=3)): None for _ in range(400)}]
    firms, people, towns, rivers = (
        [name.capitalize() for name in names[start : start + count]]
        for start, count in ((0, 120), (120, 120), (240, 40), (280, 40))
    )
    homes = [rng.choice(range(len(towns))) for _ in people]
    documents = [f"The firm {firm} was founded by {person}." for firm, person in zip(firms, people, strict=True)]
    documents += [
        f"{person} was born in the town of {towns[home]}." for person, home in zip(people, homes, strict=True)
    ]
    documents += [f"{town} lies on the river {river}." for town, river in zip(towns, rivers, strict=True)]
    questions = []
    for firm, home in zip(firms, homes, strict=True):
        born = f"the founder of the firm {firm} was born"
        questions.append((f"In which town was the founder of the firm {firm} born?", towns[home]))
        questions.append((f"On which river lies the town where {born}?", rivers[home]))
    return documents, questions


def _sum(rng: random.Random) -> tuple[str, str]:
    a, b, c = (rng.randint(11, 99) for _ in range(3))
    form, value = rng.choice(((f"{a} * {b} + {c}", a * b + c), (f"({a} + {b}) * {c}", (a + b) * c)))
    return f"What is {form}?", str(value)


def write_rows(task: str, folder: Path) -> None:
    """Write the rows of a task; no question stands in both files."""
    rng = random.Random(2)
    if task == "calculator":
        questions = list(dict(_sum(rng) for _ in range(2 * sum(SIZES.values()))).items())
    else:
        questions = rng.sample(QUESTIONS[1:], len(QUESTIONS) - 1)  # the first one is shown with its answer
    folder.mkdir(parents=True, exist_ok=True)
    most = min(SIZES["validation"], len(questions) // 4)
    for split, rows in (("validation", questions[:most]), ("train", questions[most:][: SIZES["train"]])):
        with (folder / f"{split}.jsonl").open("w") as file:
            for question, answer in rows:
                messages = [{"role": "system", "content": SYSTEM}, *SHOWN[task], {"role": "user", "content": question}]
                file.write(json.dumps({"prompt": messages, "answer": answer, "data_source": task}) + "\n")


def _shown(question: str, calls: list[dict[str, Any]], answer: object) -> list[dict[str, str]]:
    """A question with its calls and its answer, as messages in front of another question: small models go by them."""
    messages = [{"role": "user", "content": question}]
    for arguments in calls:
        tool = search if "query" in arguments else calculator
        call = json.dumps({"name": tool.__name__, "arguments": arguments})
        said, told = f"<tool_call>{call}</tool_call>", tool(**arguments)
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": json.dumps(told)}]
    return [*messages, {"role": "assistant", "content": f"<answer>{answer}</answer>"}]


SYLLABLES = "ba do fe gi ka lo me nu pa ri so ta ve zu".split()
DOCUMENTS, QUESTIONS = _world()
IN_DOCUMENTS = Counter(word for document in DOCUMENTS for word in set(_words(document)))
MEAN_LENGTH = sum(len(_words(document)) for document in DOCUMENTS) / len(DOCUMENTS)
_FIRST, _HOME = re.findall(r"firm (\w+)", QUESTIONS[0][0])[0], QUESTIONS[0][1]
_FOUNDER = re.findall(rf"{_FIRST} was founded by (\w+)", " ".join(DOCUMENTS))[0]
SHOWN = {
    "calculator": [
        *_shown(
            "What is 12 * 31 + 45?",
            [{"a": 12, "operation": "*", "b": 31}, {"a": 372, "operation": "+", "b": 45}],
            417,
        ),
        *_shown(
            "What is (57 + 22) * 14?",
            [{"a": 57, "operation": "+", "b": 22}, {"a": 79, "operation": "*", "b": 14}],
            1106,
        ),
    ],
    "search": _shown(QUESTIONS[0][0], [{"query": f"founder of {_FIRST}"}, {"query": f"{_FOUNDER} born"}], _HOME),
}

if __name__ == "__main__":
    write_rows(sys.argv[1], Path(sys.argv[2]))
