"""The built-in task with images: how many squares of a colour a picture has; drawn, with exact answers.

A picture is a board of 4 x 4 cells, each empty or with a square of a colour somewhere in it, on a grey ground with
noise. As with the sums of arithmetic.py an answer written down at once is right for some pictures, one that goes
through the rows of the board for nearly all.
"""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np

from grpo_dist.data.conversion import verl_row

SIZES = {"train": 4000, "validation": 200}
COLOURS = {"red": (210, 50, 50), "green": (50, 170, 60), "blue": (60, 80, 210)}
SIDE, CELL, SQUARE = 4, 8, 5  # cells of a board; pixels of a cell, and of a square
SHARE = 0.45  # of cells that are not empty
SEED = 0

Board = list[list[str]]


def rows(split: str, *, seed: int = SEED) -> list[dict[str, Any]]:
    """The rows of "train" or "validation" in verl's schema, each with one image; the same for the same seed.

    Answers have GSM8K's form, so that the scorer of gsm8k.py scores them.
    """
    random_of_split = random.Random(f"{seed} {split}")
    made = []
    for index in range(SIZES[split]):
        board, colour, image = example(random_of_split)
        asked, truth = f"<image>{question(colour)}", str(sum(counts(board, colour)))
        row = verl_row("squares", asked, truth, ability="vision", split=split, index=index)
        made.append(row | {"images": [{"bytes": image, "path": None}]})
    return made


def example(rng: random.Random) -> tuple[Board, str, bytes]:
    """Return a board ("": an empty cell), a colour to ask for, and the board's image, a PNG."""
    names = list(COLOURS)
    board = [[rng.choice(names) if rng.random() < SHARE else "" for _ in range(SIDE)] for _ in range(SIDE)]
    return board, rng.choice(names), draw(board, rng)


def question(colour: str) -> str:
    """The text of a question."""
    return f"How many {colour}?"


def counts(board: Board, colour: str) -> list[int]:
    """Return how many squares of a colour each row has."""
    return [row.count(colour) for row in board]


def worked_answer(board: Board, colour: str) -> str:
    """The rows from above, then the answer."""
    return f"{'+'.join(map(str, counts(board, colour)))} #### {sum(counts(board, colour))}"


def draw(board: Board, rng: random.Random) -> bytes:
    """Return the image of a board, a PNG."""
    from PIL import Image

    pixels = np.full((SIDE * CELL, SIDE * CELL, 3), 200, np.int16)
    for y, row in enumerate(board):
        for x, colour in enumerate(row):
            if colour:
                top, left = (CELL * place + rng.randrange(CELL - SQUARE + 1) for place in (y, x))
                pixels[top : top + SQUARE, left : left + SQUARE] = COLOURS[colour]
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-30, 31, pixels.shape)
    with io.BytesIO() as file:
        Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(file, format="PNG")
        return file.getvalue()
