"""Small programs as a task: rows that are scored by tests, and answers for a warm start, two of three of them wrong.

usage: python examples/code/programs.py FOLDER      write answers.jsonl (SFT), train.jsonl and validation.jsonl (GRPO)
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

FORMS = ("{k}*a{op}b", "a{op}{k}*b", "{k}*(a{op}b)")
VALIDATION, TESTS, ANSWERS = 24, 4, 4000


def formulas() -> list[str]:
    """All formulas, in random order."""
    found = [form.format(k=k, op=op) for form, k, op in itertools.product(FORMS, range(2, 10), "+-*")]
    random.Random(0).shuffle(found)
    return found


def program(formula: str) -> str:
    """A program that reads a and b and prints the value of a formula."""
    return f"```python\na,b=map(int,input().split())\nprint({formula})\n```"


def row(formula: str) -> dict[str, object]:
    """A row with its tests, and the answer that passes them."""
    rng = random.Random(formula)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(TESTS)]
    tests = {
        "inputs": [f"{a} {b}\n" for a, b in pairs],
        "outputs": [f"{eval(formula, {'a': a, 'b': b})}\n" for a, b in pairs],  # of our own making
    }
    prompt = [{"role": "user", "content": f"print {formula}"}]
    model = {"ground_truth": json.dumps(tests)}
    return {"data_source": "code", "prompt": prompt, "reward_model": model, "extra_info": {"answer": program(formula)}}


def answers() -> list[dict[str, str]]:
    """Answers to the training formulas; two of three programs leave something out or swap the numbers."""
    rng, known = random.Random(1), formulas()[VALIDATION:]
    found = []
    for _ in range(ANSWERS):
        formula = rng.choice(known)
        wrong = rng.choice([formula.replace("a", "c").replace("b", "a").replace("c", "b"), "a+b"])
        found.append({"prompt": f"print {formula}", "completion": program(rng.choice([formula, wrong, wrong]))})
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    every = [row(formula) for formula in formulas()]
    files = {"answers": answers(), "validation": every[:VALIDATION], "train": every[VALIDATION:]}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
