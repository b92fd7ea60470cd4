"""Batches of prompt indices: coverage, seeds, resume."""

from __future__ import annotations

import json

import numpy as np
import pytest

from grpo_dist.data import PromptSampler
from grpo_dist.errors import DataError
from tests.messages import refuses


def batches(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [sampler.next_batch().tolist() for _ in range(count)]


def indices(sampler: PromptSampler, count: int) -> list[int]:
    return [index for batch in batches(sampler, count) for index in batch]


def test_without_shuffle_file_order_and_the_incomplete_batch_dropped() -> None:
    sampler = PromptSampler(7, 3, shuffle=False, seed=0)
    assert sampler.steps_per_epoch == 2
    assert batches(sampler, 4) == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]
    assert sampler.epoch == 1


def test_each_epoch_is_a_new_permutation_without_repeats() -> None:
    sampler = PromptSampler(12, 4, shuffle=True, seed=3)
    first, second = (np.concatenate([sampler.next_batch() for _ in range(3)]) for _ in range(2))
    assert first.dtype == np.int64
    assert sorted(first) == sorted(second) == list(range(12))
    assert first.tolist() != second.tolist()
    assert first.tolist() != list(range(12))


def test_order_depends_on_seed_and_epoch_only() -> None:
    a, b = PromptSampler(20, 5, shuffle=True, seed=1), PromptSampler(20, 4, shuffle=True, seed=1)
    whole_a, whole_b = indices(a, 8), indices(b, 10)
    assert whole_a == whole_b  # two epochs; the batch size does not matter
    assert whole_a == [*np.random.default_rng([1, 0]).permutation(20), *np.random.default_rng([1, 1]).permutation(20)]
    assert indices(PromptSampler(20, 5, shuffle=True, seed=2), 4) != whole_a[:20]


def test_a_returned_batch_may_be_changed() -> None:
    sampler = PromptSampler(4, 4, shuffle=False, seed=0)
    sampler.next_batch()[:] = -1
    state = sampler.state_dict()
    assert state["position"] == 4
    assert batches(sampler, 1) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 6])
def test_resume_continues_exactly_from_any_step(steps: int) -> None:
    whole = PromptSampler(11, 4, shuffle=True, seed=9)
    batches(whole, steps)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = batches(whole, 7)
    resumed = PromptSampler(11, 4, shuffle=True, seed=9)
    batches(resumed, 3)  # whatever it did before is forgotten
    resumed.load_state_dict(state)
    assert batches(resumed, 7) == expected


def test_resume_with_another_batch_size_repeats_no_prompt() -> None:
    sampler = PromptSampler(12, 4, shuffle=True, seed=0)
    seen = sampler.next_batch().tolist()
    resumed = PromptSampler(12, 8, shuffle=True, seed=0)
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(seen + resumed.next_batch().tolist()) == list(range(12))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (PromptSampler(13, 4, shuffle=True, seed=0), ["data.train_files", "num_prompts=12", "num_prompts=13"]),
        (PromptSampler(12, 4, shuffle=True, seed=5), ["data.seed", "seed=0", "seed=5"]),
        (PromptSampler(12, 4, shuffle=False, seed=0), ["data.shuffle"]),
    ],
)
def test_a_state_of_other_data_is_refused(other: PromptSampler, words: list[str]) -> None:
    with refuses(DataError, *words):
        other.load_state_dict(PromptSampler(12, 4, shuffle=True, seed=0).state_dict())


def test_fewer_prompts_than_a_batch() -> None:
    with refuses(DataError, "data.train_batch_size=8", "7 rows", "most 7"):
        PromptSampler(7, 8, shuffle=True, seed=0)
    with refuses(DataError, "data.train_batch_size=0"):
        PromptSampler(7, 0, shuffle=True, seed=0)
    assert PromptSampler(8, 8, shuffle=True, seed=0).steps_per_epoch == 1
