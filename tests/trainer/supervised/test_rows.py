"""The rows of a run: known by their content and order, and shared out whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.config.load import load_command
from grpo_dist.data.training_rows import Pair, TrainingExample
from grpo_dist.errors import DataError
from grpo_dist.plan.commands import REWARD_MODEL
from grpo_dist.trainer.supervised.rows import KINDS, Rows, new_sampler, rank_shares, total_steps
from tests.messages import refuses


def pair(number: int, lengths: tuple[int, int] = (2, 3), prompt: int = 4) -> TrainingExample:
    """Tokens that no other pair has."""
    responses = [np.arange(length, dtype=np.int32) + 10 * number + 3 for length in lengths]
    labels = [np.array([-1] * (length - 1) + [good], np.int8) for length, good in zip(lengths, (1, 0), strict=True)]
    return TrainingExample(f"rows.jsonl, line {number}", np.full(prompt, number, np.int32), responses, labels)


def rows(*examples: TrainingExample) -> Rows:
    return Rows(examples, (), KINDS[Pair])


def test_rows_are_known_by_all_tokens_all_labels_and_their_order() -> None:
    first, second = pair(1), pair(2)
    same = rows(first, second).identity
    assert same["count"] == 2
    assert rows(pair(1), pair(2)).identity == same
    elsewhere = replace(first, location="other.jsonl, line 7")
    assert rows(elsewhere, second).identity == same, "positions mean the same rows"
    changed = [
        replace(first, prompt=first.prompt + 1),
        replace(first, responses=[first.responses[0], first.responses[1] + 1]),
        replace(first, marks=first.marks[::-1]),
        replace(first, prompt=first.prompt[:-1], responses=[np.append(first.prompt[-1:], r) for r in first.responses]),
    ]
    found = [rows(each, second).identity for each in changed]
    found += [rows(second, first).identity, rows(first).identity, rows(first, second, second).identity]
    assert all(each != same for each in found)
    assert len({each["fingerprint"] for each in found}) == len(found)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_pair_stays_together_on_any_number_of_ranks(ranks: int) -> None:
    """Also where ranks have no rows, and where one row is as long as all others."""
    examples = [pair(number, (1 + number % 3, 50 if number == 3 else 2)) for number in range(1, 7)]
    parts = rank_shares(examples, ranks, "labels")
    assert len(parts) == ranks
    uids = [sorted(part["uid"].tolist()) if len(part) else [] for part in parts]
    assert all(mine.count(uid) == 2 for mine in uids for uid in mine)
    tokens = [tuple(row.tolist()) for part in parts if len(part) for row in part["responses"].rows()]
    assert sorted(tokens) == sorted(tuple(response.tolist()) for each in examples for response in each.responses)
    assert sum(bool(mine) for mine in uids) == min(ranks, len(examples)), "no rank idles while another has two"


def test_shares_cost_about_the_same() -> None:
    examples = [pair(number, (5, 5)) for number in range(8)]
    assert [len(part) for part in rank_shares(examples, 4, "labels")] == [4] * 4


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [((), 3), (("trainer.total_epochs=4",), 12), (("trainer.total_training_steps=5", "trainer.total_epochs=4"), 5)],
)
def test_the_number_of_steps(overrides: tuple[str, ...], steps: int) -> None:
    config, _ = load_command(["data.train_batch_size=3", *overrides], REWARD_MODEL)
    assert total_steps(config, rows(*map(pair, range(10)))) == steps


def test_fewer_rows_than_a_batch() -> None:
    config, _ = load_command(["data.train_batch_size=3"], REWARD_MODEL)
    with refuses(DataError, "data.train_batch_size=3", "2 rows"):
        total_steps(config, rows(pair(1), pair(2)))


def test_the_order_is_that_of_the_seed_or_of_the_files() -> None:
    ten = rows(*map(pair, range(10)))

    def order(*overrides: str) -> list[int]:
        config, _ = load_command(["data.train_batch_size=5", *overrides], REWARD_MODEL)
        sampler = new_sampler(config, ten)
        return [*sampler.next_batch(), *sampler.next_batch()]

    assert order("data.shuffle=false") == list(range(10))
    assert sorted(order()) == list(range(10))
    assert order() == order("data.seed=1") != order("trainer.seed=2")
