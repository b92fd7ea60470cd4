"""The order of the prompts, batch by batch: resumable, the same on every machine.

`PromptSampler` has a seeded order that no result changes. The user's own is `data.sampler.class_path` and
`data.sampler.class_name`: a class with the methods of `Curriculum`, made with `prompts` (those that were not left out),
`batch_size` and `seed`, by keyword. `CustomSampler` runs it, checks what it returns, and keeps its state in the
checkpoint. verl's classes are torch samplers: they yield single indices and get the whole batch, these the scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.plugins.names import absolute, parse_code
from grpo_dist.plugins.registry import load_attribute, traceback_tail

# What the order in a checkpoint depends on, and the config key of each.
_KEYS = {
    "sampler": "data.sampler, data.curriculum.enable",
    "num_prompts": "data.train_files",
    "seed": "data.seed",
    "shuffle": "data.shuffle",
}


def check_batch_size(num_prompts: int, batch_size: int) -> None:
    """Check that there is one batch at least."""
    if batch_size < 1:
        raise DataError(f"data.train_batch_size={batch_size}: must be at least 1")
    if num_prompts < batch_size:
        raise DataError(
            f"data.train_batch_size={batch_size}: the training set has only {num_prompts} rows (after "
            f"filtering and data.train_max_samples); set it to at most {num_prompts}, or add rows"
        )


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Check that a sampler's state belongs to this sampler."""
    for name, now in identity.items():
        if state.get(name) != now:
            raise DataError(
                f"{_KEYS[name]}: the checkpoint was written with {name}={state.get(name)}, this run has "
                f"{name}={now}; restore it, or start anew with trainer.resume_mode=disable"
            )


class PromptSampler:
    """Endless batches of prompt indices, epoch after epoch, in an order that no result changes.

    The order of an epoch is the files', or, with `shuffle`, a permutation that depends on (seed, epoch) only, so a
    resumed run sees the batches that the uninterrupted run would have seen. The last, incomplete batch of an epoch is
    dropped; these are at most batch_size - 1 prompts, and with shuffling different ones in each epoch.
    """

    def __init__(self, num_prompts: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        check_batch_size(num_prompts, batch_size)
        self._num_prompts, self._batch_size = num_prompts, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order(0)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches in one pass over the data."""
        return self._num_prompts // self._batch_size

    @property
    def epoch(self) -> int:
        """Return the epoch of the batch that was last returned, from 0."""
        return self._epoch

    def next_batch(self) -> np.ndarray:
        """Return the indices of the next batch: [batch_size] int64, no index twice."""
        if self._position + self._batch_size > self._num_prompts:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order(self._epoch)
        batch = self._order[self._position : self._position + self._batch_size].copy()
        self._position += self._batch_size
        return batch

    def update(self, scores_by_index: Mapping[int, np.ndarray]) -> None:
        """Do nothing, since the order does not depend on results."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the prompts already handed out in it, and what the order depends on; plain numbers."""
        return {"epoch": self._epoch, "position": self._position} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. The batch size may differ, the data and the order may not.

        Raises:
            DataError: the state belongs to another data set, seed or order.
        """
        check_identity(state, self._identity())
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._epoch_order(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {
            "sampler": type(self).__name__,
            "num_prompts": self._num_prompts,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._num_prompts, dtype=np.int64)
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts).astype(np.int64)


KEY = "data.sampler.class_path/class_name"
PRIOR = 0.5  # Jeffreys' prior: one group of 4 equal scores is enough for `EASY` or `HARD`
ROUNDING = 1e-9  # of a share of scores
EASY, HARD = 0.9, 0.1  # from and up to these posterior means nearly all groups of usual sizes have equal scores


class Curriculum(Protocol):
    """Decides which prompts come next. `PromptSampler` has these methods too."""

    def next_batch(self) -> Sequence[int] | np.ndarray:
        """Return the positions in `prompts` of the next batch: batch_size different ones."""

    def update(self, scores_by_index: Mapping[int, np.ndarray]) -> None:
        """Learn from results: position -> its n responses' scores, float32, without `reward.overlong_buffer`'s penalty.

        Responses without a score are not among them, nor is a prompt without any other response: those that the reward
        function failed on, unless `reward.failure_score` is set. Called after each batch is sampled and scored, also
        for groups that dynamic sampling then drops.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return all that `next_batch` depends on, as JSON: text keys, lists, numbers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""


def load_sampler_class(class_path: str, class_name: str) -> Callable[..., Curriculum]:
    """Import the class; a ConfigError if there is none, or it lacks a method of the protocol."""
    spec = _spec(class_path, class_name)
    loaded = load_attribute(spec, key=KEY)
    if not isinstance(loaded, type):
        raise ConfigError(f"{KEY}={spec}: must be a class, is {type(loaded).__name__}")
    methods = ("next_batch", "update", "state_dict", "load_state_dict")
    missing = [name for name in methods if not callable(getattr(loaded, name, None))]
    if missing:
        raise ConfigError(f"{KEY}={spec}: the class has no {', '.join(missing)}; it needs {', '.join(methods)}")
    return loaded


class CustomSampler:
    """Runs the user's curriculum and checks what it returns.

    An epoch has as many batches as one pass over the data, whichever prompts the curriculum chooses.
    """

    def __init__(
        self, class_path: str, class_name: str, prompts: Sequence[Prompt], batch_size: int, *, seed: int, **options: Any
    ) -> None:
        check_batch_size(len(prompts), batch_size)
        self._spec, self._class_name = _spec(class_path, class_name), class_name
        self._num_prompts, self._batch_size, self._num_batches = len(prompts), batch_size, 0
        make = load_sampler_class(class_path, class_name)
        self._curriculum = self._call(make, prompts=prompts, batch_size=batch_size, seed=seed, **options)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches in one pass over the data."""
        return self._num_prompts // self._batch_size

    @property
    def epoch(self) -> int:
        """Return the epoch of the batch that was last returned, from 0."""
        return max(self._num_batches - 1, 0) // self.steps_per_epoch

    def next_batch(self) -> np.ndarray:
        """Return the curriculum's next batch, [batch_size] int64; a DataError if it returns anything else, or fails."""
        returned = self._call(self._curriculum.next_batch)
        problem = self._problem(returned)
        if problem:
            raise DataError(
                f"{KEY}={self._spec}: next_batch() {problem}; it must return {self._batch_size} different "
                f"positions from 0 to {self._num_prompts - 1} (data.gen_batch_size, else train_batch_size)"
            )
        self._num_batches += 1
        return np.asarray(returned, dtype=np.int64)

    def update(self, scores_by_index: Mapping[int, np.ndarray]) -> None:
        """Hand results to the curriculum."""
        self._call(self._curriculum.update, scores_by_index)

    def metrics(self) -> dict[str, float]:
        """Return the curriculum's metrics, if its class has such a method, as `curriculum/NAME`.

        Raises:
            DataError: it failed, or returned anything but numbers by name.
        """
        returned = self._call(getattr(self._curriculum, "metrics", dict))
        try:
            return {f"curriculum/{name}": float(value) for name, value in returned.items()}
        except (AttributeError, TypeError, ValueError):
            problem = f"metrics() returned {returned!r}; it must return numbers by name"
            raise DataError(f"{KEY}={self._spec}: {problem}") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the curriculum's state, and what it belongs to."""
        state = self._call(self._curriculum.state_dict)
        try:
            copy = json.loads(json.dumps(state))  # a checkpoint is written later, and the class may go on with its own
            survives = isinstance(state, dict) and copy == state
        except (TypeError, ValueError):
            survives = False
        if not survives:
            raise DataError(
                f"{KEY}={self._spec}: state_dict() must return a dict that JSON gives back as it is: keys are text, "
                "values are text, lists, dicts, Python numbers, true, false or null"
            )
        return {"num_batches": self._num_batches, "curriculum": copy} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        check_identity(state, self._identity())
        self._num_batches = int(state["num_batches"])
        self._call(self._curriculum.load_state_dict, state["curriculum"])

    def _identity(self) -> dict[str, Any]:
        return {"sampler": self._class_name, "num_prompts": self._num_prompts}

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            name = method.__name__ if not isinstance(method, type) else "__init__"
            problem = f"{KEY}={self._spec}: {name}() raised {type(error).__name__}"
            raise DataError(f"{problem}\n{traceback_tail(error)}") from error

    def _problem(self, returned: Any) -> str | None:
        try:
            batch = np.asarray(returned)
        except ValueError:
            return "returned lists of different lengths"
        if batch.ndim != 1 or not np.issubdtype(batch.dtype, np.integer):
            return f"returned {type(returned).__name__} of {batch.dtype}, shape {batch.shape}"
        if len(batch) != self._batch_size:
            return f"returned {len(batch)} positions"
        outside = batch[(batch < 0) | (batch >= self._num_prompts)]
        if len(outside):
            return f"returned position {outside[0]}"
        positions, counts = np.unique(batch, return_counts=True)
        return f"returned position {positions[counts > 1][0]} more than once" if (counts > 1).any() else None


class PassRateCurriculum:
    """The built-in curriculum (`data.curriculum`): draws prompts whose groups are expected to have different scores.

    The pass rate p of each prompt has a Beta(a, b) posterior. a and b begin at `PRIOR`; a group of n scores adds the
    passed ones to a and the failed ones to b. A prompt's weight is the variance that a score is expected to have:

        E[p (1 - p)] = a b / ((a + b) (a + b + 1))

    The policy changes, so all evidence decays with every batch, and a prompt that has not been seen for long goes back
    to the prior. Some of each batch are prompts that were drawn least often, whatever their weight. With
    `max_pass_rate` prompts that have passed so often are not drawn again, as in ScaleRL (arXiv 2510.13786), which draws
    the others equally often (`exploration` 1); where these fill no batch, those drawn least often join.

    `CustomSampler` runs it as it runs a class of the user's.

    Args:
        seed: of the draws; each batch depends on it, its number and the scores so far.
        exploration: share of a batch that is drawn from the prompts that were drawn least often.
        decay: share of the evidence that is left after as many batches as an epoch has.
        max_pass_rate: share of passed scores, newer ones weighing more, from which on a prompt is drawn only where a
            batch cannot be filled without it; None: all are drawn.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        seed: int,
        *,
        exploration: float,
        decay: float,
        max_pass_rate: float | None = None,
    ) -> None:
        self.batch_size, self.seed, self.exploration, self.max_pass_rate = batch_size, seed, exploration, max_pass_rate
        self.left_per_batch = decay ** (1 / (len(prompts) // batch_size))
        self.num_batches, self.lowest, self.highest = 0, 0.0, 1.0
        self.passed, self.failed = np.zeros(len(prompts)), np.zeros(len(prompts))
        self.visits = np.zeros(len(prompts), np.int64)

    @property
    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a and b of each prompt: [num_prompts] float64 each."""
        return PRIOR + self.passed, PRIOR + self.failed

    def weights(self) -> np.ndarray:
        """Return E[p (1 - p)] of each prompt: [num_prompts] float64, above 0."""
        a, b = self.posterior
        return a * b / ((a + b) * (a + b + 1))

    @property
    def solved(self) -> np.ndarray:
        """Tell which prompts are not drawn again: [num_prompts] bool."""
        scores = self.passed + self.failed
        if self.max_pass_rate is None:
            return np.zeros(len(scores), bool)
        return (scores > 0) & (self.passed >= (self.max_pass_rate - ROUNDING) * scores)

    def next_batch(self) -> np.ndarray:
        """Draw a batch in random order: [batch_size] int64, no position twice."""
        rng = np.random.default_rng([self.seed, self.num_batches])
        self.num_batches += 1
        self.passed *= self.left_per_batch
        self.failed *= self.left_per_batch
        solved = self.solved
        ties, count = rng.random(len(self.visits)), int(self.exploration * self.batch_size + rng.random())
        least_visited = np.lexsort((ties, self.visits, solved))[:count]
        # the largest of log-weights with Gumbel noise are a weighted draw without replacement
        keys = np.log(self.weights()) + rng.gumbel(size=len(self.visits))
        keys[solved] = -np.inf
        keys[least_visited] = np.inf
        batch = rng.permutation(np.lexsort((ties, self.visits, -keys))[: self.batch_size])
        self.visits[batch] += 1
        return batch

    def update(self, scores_by_index: Mapping[int, np.ndarray]) -> None:
        """Count the passed and the failed scores of each prompt."""
        self.lowest = min([self.lowest, *(float(scores.min()) for scores in scores_by_index.values())])
        self.highest = max([self.highest, *(float(scores.max()) for scores in scores_by_index.values())])
        for index, scores in scores_by_index.items():
            passed = self._num_passed(scores.astype(np.float64))
            self.passed[index] += passed
            self.failed[index] += len(scores) - passed

    def metrics(self) -> dict[str, float]:
        """Return the shares of the prompts that are easy, useful, hard and unseen; they add up to 1."""
        a, b = self.posterior
        seen, means = a + b > 2 * PRIOR, a / (a + b)
        easy, hard = seen & (means >= EASY), seen & (means <= HARD)
        pools = {"easy": easy, "useful": seen & ~easy & ~hard, "hard": hard, "unseen": ~seen}
        return {name: float(pool.mean()) for name, pool in pools.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence, the visits, the range of scores and the number of batches."""
        evidence = {"passed": self.passed.tolist(), "failed": self.failed.tolist(), "visits": self.visits.tolist()}
        return evidence | {"range": [self.lowest, self.highest], "num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.passed, self.failed = np.array(state["passed"], np.float64), np.array(state["failed"], np.float64)
        self.visits, self.num_batches = np.array(state["visits"], np.int64), state["num_batches"]
        self.lowest, self.highest = state["range"]

    def _num_passed(self, scores: np.ndarray) -> float:
        """Sum of the scores, where the range seen so far, which has 0 and 1 in it, is stretched to that from 0 to 1.

        Of several equal scores all count as passed or all as failed, whichever is nearer: a group that is always scored
        0.5 has no variance, while one that passes half the time has most.
        """
        shares = (scores - self.lowest) / (self.highest - self.lowest)
        if len(shares) > 1 and shares.min() == shares.max():
            shares = np.round(shares)
        return float(shares.sum())


def _spec(class_path: str, class_name: str) -> str:
    return absolute(str(parse_code(class_path, class_name)))
