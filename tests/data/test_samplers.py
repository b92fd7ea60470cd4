"""The order of the prompts, seeded or by a class of the user's: coverage, resume, and messages for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.data import Prompt, PromptSampler
from grpo_dist.data.sampler import CustomSampler, PassRateCurriculum, load_sampler_class
from grpo_dist.errors import ConfigError, DataError
from tests.messages import refuses

def seeded(num_prompts: int = 12, batch_size: int = 4, seed: int = 0, *, shuffle: bool = True) -> PromptSampler:
    return PromptSampler(num_prompts, batch_size, shuffle=shuffle, seed=seed)


def batches(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [sampler.next_batch().tolist() for _ in range(count)]


def test_without_shuffle_file_order_and_the_incomplete_batch_dropped() -> None:
    """No result changes the order, and a returned batch may be changed."""
    sampler = seeded(7, 3, shuffle=False)
    assert sampler.steps_per_epoch == 2
    sampler.next_batch()[:] = -1
    sampler.update({3: np.array([1.0])})
    assert batches(sampler, 3) == [[3, 4, 5], [0, 1, 2], [3, 4, 5]]
    assert (sampler.epoch, sampler.metrics()) == (1, {})


def test_order_depends_on_seed_and_epoch_only() -> None:
    expected = [*np.random.default_rng([1, 0]).permutation(20), *np.random.default_rng([1, 1]).permutation(20)]
    for batch_size in (4, 5):
        two_epochs = batches(seeded(20, batch_size, seed=1), 40 // batch_size)
        assert [index for batch in two_epochs for index in batch] == expected
    assert seeded(20, 20, seed=2).next_batch().tolist() != expected[:20]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 6])
def test_resume_continues_exactly_from_any_step(steps: int) -> None:
    whole = seeded(11)
    batches(whole, steps)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = batches(whole, 7)
    resumed = seeded(11)
    batches(resumed, 3)  # whatever it did before is forgotten
    resumed.load_state_dict(state)
    assert batches(resumed, 7) == expected


def test_resume_with_another_batch_size_repeats_no_prompt() -> None:
    sampler, resumed = seeded(), seeded(batch_size=8)
    seen = sampler.next_batch().tolist()
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(seen + resumed.next_batch().tolist()) == list(range(12))


# --- a class of the user's -------------------------------------------------------------------------------------------
SOURCE = '''
class Backwards:
    """From the last prompt to the first, skipping those that were solved."""

    def __init__(self, prompts, batch_size, seed):
        self.waiting = list(range(len(prompts)))
        self.batch_size, self.num_prompts, self.solved = batch_size, len(prompts), []
        self.first_question, self.seed = prompts[0].messages[0]["content"], seed

    def next_batch(self):
        if len(self.waiting) < self.batch_size:
            self.waiting = list(range(self.num_prompts))
        return [self.waiting.pop() for _ in range(self.batch_size)]

    def update(self, scores_by_index):
        self.solved += [index for index, scores in scores_by_index.items() if scores.mean() == 1]
        self.waiting = [index for index in self.waiting if index not in self.solved]

    def state_dict(self):
        return {"waiting": self.waiting, "solved": self.solved}

    def load_state_dict(self, state):
        self.waiting, self.solved = state["waiting"], state["solved"]


class Returns(Backwards):
    batch, state = None, {}

    def next_batch(self):
        return Returns.batch

    def state_dict(self):
        return Returns.state


class Measured(Backwards):
    def metrics(self):
        return {"solved": len(self.solved)} if len(self.solved) < 2 else {"solved": "many"}


class Fails(Backwards):
    def next_batch(self):
        raise RuntimeError("out of ideas")


class NeedsMore:
    def __init__(self, prompts): ...
    next_batch = update = state_dict = load_state_dict = lambda self: None


class Unfinished:
    def next_batch(self): ...


def function(): ...
'''
PROMPTS = [Prompt(i, "d", [{"role": "user", "content": f"q{i}"}], "", {}, f"row {i}") for i in range(7)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "order.py"
    file.write_text(SOURCE)
    return str(file)


def make(path: str, name: str = "Backwards", batch_size: int = 3) -> CustomSampler:
    return CustomSampler(path, name, PROMPTS, batch_size, seed=4)


def test_batches_and_epochs(path: str) -> None:
    sampler = make(path)
    first = sampler.next_batch()
    assert (first.tolist(), first.dtype, sampler.epoch) == ([6, 5, 4], np.int64, 0)
    assert [(sampler.next_batch()[0], sampler.epoch) for _ in range(2)] == [(3, 0), (6, 1)]
    assert sampler.steps_per_epoch == 2
    curriculum: Any = sampler._curriculum
    assert (curriculum.first_question, curriculum.seed) == ("q0", 4)


def test_results_change_the_order_and_resume_goes_on(path: str) -> None:
    sampler = make(path)
    sampler.next_batch()
    sampler.update({3: np.array([1.0, 1.0]), 2: np.array([1.0, 0.0])})
    state = sampler.state_dict()
    text = json.dumps(state)
    expected = sampler.next_batch().tolist()
    assert expected == [2, 1, 0]
    assert json.dumps(state) == text, "a checkpoint is written while the run goes on"
    resumed = make(path)
    resumed.load_state_dict(state)
    assert resumed.next_batch().tolist() == expected
    assert resumed.epoch == sampler.epoch


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([0, 1], ["2 positions"]),
        ([0, 1, 2, 3], ["4 positions"]),
        ([0, 1, 7], ["position 7"]),
        ([0, -1, 2], ["position -1"]),
        ([0, 1, 0], ["position 0", "once"]),
        ([0.0, 1.0, 2.0], ["list", "float64"]),
        ([True, False, True], ["list", "bool"]),
        (None, ["NoneType"]),
        (["a", "b", "c"], ["list", "<U1"]),
        ([[0], [1, 2]], ["lists", "lengths"]),
    ],
)
def test_wrong_batches_are_refused(path: str, batch: Any, words: list[str]) -> None:
    sampler = make(path, "Returns")
    sampler._curriculum.__class__.batch = batch  # type: ignore[attr-defined]
    key = f"data.sampler.class_path/class_name={path}:Returns"
    with refuses(DataError, key, "next_batch()", *words, "3", "0 to 6", "data.gen_batch_size"):
        sampler.next_batch()


def test_metrics_of_a_class_are_optional(path: str) -> None:
    assert make(path).metrics() == {}
    sampler = make(path, "Measured")
    sampler.update({3: np.array([1.0])})
    assert sampler.metrics() == {"curriculum/solved": 1.0}
    sampler.update({2: np.array([1.0])})
    with refuses(DataError, "order.py:Measured", "metrics()", "solved", "'many'"):
        sampler.metrics()


@pytest.mark.parametrize("state", [{1: 2}, {"a": {1, 2}}, {"a": np.float32(1)}, {"a": (1, 2)}, [1], None])
def test_a_state_that_would_not_come_back_is_refused(path: str, state: Any) -> None:
    sampler = make(path, "Returns")
    sampler._curriculum.__class__.state = state  # type: ignore[attr-defined]
    with refuses(DataError, "state_dict()", "dict", "JSON"):
        sampler.state_dict()


def test_errors_in_the_class_are_named(path: str) -> None:
    with refuses(DataError, "order.py:Fails", "next_batch()", "RuntimeError", "of ideas"):
        make(path, "Fails").next_batch()
    with refuses(DataError, "order.py:NeedsMore", "__init__()", "TypeError"):
        make(path, "NeedsMore")
    with refuses(DataError, "update()", "AttributeError"):
        make(path).update({0: 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Unfinished", ["update, state_dict, load_state_dict;", "next_batch, update"]),
        ("function", ["class", "function"]),
        ("Backward", ["'Backwards'"]),
    ],
)
def test_what_is_no_sampler_is_refused(path: str, name: str, words: list[str]) -> None:
    with refuses(ConfigError, *words):
        load_sampler_class(path, name)


def test_a_state_of_other_data_or_of_another_order_is_refused(path: str) -> None:
    options = {"exploration": 0.2, "decay": 0.5}
    built_in, its_class = PassRateCurriculum.__module__, PassRateCurriculum.__name__
    rates, fewer = (CustomSampler(built_in, its_class, PROMPTS[:n], 3, seed=4, **options) for n in (7, 6))
    default, own = seeded(7), make(path)
    for made, state, *parts in (
        (seeded(8), default, "data.train_files", "num_prompts=7", "num_prompts=8"),
        (seeded(7, seed=5), default, "data.seed", "seed=0", "seed=5"),
        (seeded(7, shuffle=False), default, "data.shuffle"),
        (own, default, "data.sampler", "sampler=PromptSampler", "sampler=Backwards"),
        (default, own, "data.sampler", "sampler=Backwards", "sampler=PromptSampler"),
        (CustomSampler(path, "Backwards", PROMPTS[:6], 3, seed=4), own, "num_prompts=7", "num_prompts=6"),
        (fewer, rates, "data.train_files", "num_prompts=7", "num_prompts=6"),
        (default, rates, "data.curriculum.enable", "sampler=PassRateCurriculum", "sampler=PromptSampler"),
    ):
        with refuses(DataError, *parts):
            made.load_state_dict(state.state_dict())


def test_fewer_prompts_than_a_batch(path: str) -> None:
    for sampler in (lambda size: seeded(7, size), lambda size: make(path, batch_size=size)):
        with refuses(DataError, "data.train_batch_size=8", "7 rows", "most 7"):
            sampler(8)
        with refuses(DataError, "data.train_batch_size=0"):
            sampler(0)
    assert seeded(8, 8).steps_per_epoch == 1
