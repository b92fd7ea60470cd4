"""Judged responses of a run, on disk: what its reward model is trained on again.

DeepSeekMath (arXiv 2402.03300, section 4.1.4) retrains the reward model in every iteration on what the policy has just
sampled, and on a tenth of what it sampled before ("replay"), so that the model does not forget what bad answers of
earlier policies look like. One JSON-lines file holds the responses of a training step:

    FOLDER/12.jsonl   {"prompt": [messages], "completions": ["a step", ...], "labels": [true, ...]}

in the form that `training_rows.steps_row` and `grpo-dist reward-model` read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_dist.data.training_rows import LabelledSteps, checked_rows, steps_row
from grpo_dist.errors import DataError, DiskError

KEY = "reward_model.replay_share"


class Selection(NamedTuple):
    """Rows to train on.

    Attributes:
        fresh: those of an iteration.
        replayed: some of those before it.
        repeated: number of rows of the iteration that are left out, since a row before has the same conversation.
    """

    fresh: list[LabelledSteps]
    replayed: list[LabelledSteps]
    repeated: int


@dataclass(frozen=True)
class JudgedResponses:
    """The rows of all steps of a run. A step that a resumed run repeats replaces its file.

    Args:
        folder: where they are; made when the first rows come.
    """

    folder: Path

    def file(self, step: int) -> Path:
        """Return the file of the rows of a step."""
        return self.folder / f"{step}.jsonl"

    def select(self, first: int, last: int, share: float, *, seed: int) -> Selection:
        """Return the rows of an iteration, and a random share of those before it; the same ones for the same seed.

        A conversation that comes more than once is taken once, where it came first.

        Args:
            first: the first step of the iteration; steps count from 1.
            share: of the earlier rows, in [0, 1]; rounded to whole rows.

        Raises:
            DataError: a file is missing or damaged.
        """
        known: set[bytes] = set()
        before = range(1, first if share else 1)
        count = sum(row is not None for row in self._rows(before, known))
        chosen = set(np.random.default_rng([seed, last]).permutation(count)[: round(share * count)].tolist())
        # read once more, since all responses of a run may be more than the memory holds
        again = filter(None, self._rows(before, set()))
        replayed = [row for i, row in enumerate(again) if i in chosen]
        rows = [*self._rows(range(first, last + 1), known)]
        return Selection([row for row in rows if row is not None], replayed, rows.count(None))

    def check(self, steps: Sequence[int]) -> None:
        """Check that the files of these steps are there."""
        for step in steps:
            if not self.file(step).is_file():
                raise DataError(
                    f"{KEY}: {self.file(step)} is missing, the judged responses of step {step}, which the reward model "
                    f"is to be retrained on; give the file back, or start the run anew"
                )

    def copy(self, steps: Sequence[int], other: JudgedResponses) -> None:
        """Copy the rows of these steps into another store.

        Raises:
            DiskError: a file cannot be copied.
        """
        try:
            other.folder.mkdir(parents=True, exist_ok=True)
            for step in steps:
                temporary = other.file(step).with_suffix(".tmp")
                shutil.copyfile(self.file(step), temporary)
                temporary.replace(other.file(step))
        except OSError as error:
            raise DiskError(f"{KEY}: the judged responses cannot be copied to {other.folder}: {error}") from error

    def _rows(self, steps: Sequence[int], known: set[bytes]) -> Iterator[LabelledSteps | None]:
        """Yield the rows of these steps, a file at a time; None for a known conversation. Others become known."""
        self.check(steps)
        for file in map(self.file, steps):
            for row in checked_rows([str(file)], key=KEY, check=steps_row) if file.stat().st_size else ():
                text = json.dumps([row.prompt, "".join(row.steps)])
                digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
                yield None if digest in known else row
                known.add(digest)
