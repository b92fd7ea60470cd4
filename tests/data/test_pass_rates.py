"""The built-in curriculum: posteriors by hand, how often prompts are drawn, its pools and its state."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from grpo_dist.data import Prompt
from grpo_dist.data.sampler import CustomSampler, PassRateCurriculum

ALL, NONE, HALF = [1.0] * 4, [0.0] * 4, [1.0, 0, 1, 0]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, "d", [{"role": "user", "content": f"q{i}"}], "", {}, f"row {i}") for i in range(count)]


def make(count: int, batch_size: int, exploration: float = 0.0, decay: float = 1.0) -> PassRateCurriculum:
    return PassRateCurriculum(prompts(count), batch_size, 3, exploration=exploration, decay=decay)


def told(curriculum: PassRateCurriculum, *scores: list[float]) -> PassRateCurriculum:
    """Tell it the scores of the prompts 0, 1, 2 ..."""
    curriculum.update({i: np.array(group, np.float32) for i, group in enumerate(scores) if group})
    return curriculum


def posterior(curriculum: PassRateCurriculum, index: int) -> tuple[float, float]:
    a, b = curriculum.posterior
    return float(a[index]), float(b[index])


def test_posteriors_and_weights_by_hand() -> None:
    curriculum = told(make(5, 1), ALL, NONE, [1.0, 0, 0, 0], [0.25, 0.5, 0.75, 1])
    assert [posterior(curriculum, i) for i in range(5)] == [(4.5, 0.5), (0.5, 4.5), (1.5, 3.5), (3.0, 2.0), (0.5, 0.5)]
    weights = [Fraction(9, 4) / 30, Fraction(9, 4) / 30, Fraction(21, 4) / 30, Fraction(6, 30), Fraction(1, 8)]
    assert curriculum.weights().tolist() == pytest.approx([float(weight) for weight in weights])
    told(curriculum, [1.0, 0, 0, 0])
    assert posterior(curriculum, 0) == (5.5, 3.5)


def test_evidence_decays_with_every_batch_to_the_share_that_an_epoch_leaves() -> None:
    """7 prompts in batches of 2 make epochs of 3 batches."""
    curriculum = told(make(7, 2, decay=0.125), [1.0] * 8, [0.0] * 8)
    for passed in (4.5, 2.5, 1.5):
        curriculum.next_batch()
        assert posterior(curriculum, 0) == pytest.approx((passed, 0.5))
    assert posterior(curriculum, 1) == pytest.approx((0.5, 1.5))
    told(curriculum, HALF)
    assert posterior(curriculum, 0) == pytest.approx((3.5, 2.5))
    for _ in range(60):
        curriculum.next_batch()
    assert curriculum.weights() == pytest.approx(0.125), "nothing is known any more"


@pytest.mark.parametrize("equal", [ALL, NONE], ids=["always right", "always wrong"])
def test_a_batch_is_a_weighted_draw_without_replacement(equal: list[float]) -> None:
    """Two of three: the probability to be left out, by hand, of w = 0.075, 0.2083, 0.125 (unseen)."""
    curriculum = told(make(3, 2), equal, HALF)
    w = curriculum.weights() / curriculum.weights().sum()
    counts = np.zeros(3)
    for _ in range(4000):
        counts[np.setdiff1d(np.arange(3), curriculum.next_batch())] += 1
    left_out = [sum(w[i] * w[3 - k - i] / (1 - w[i]) for i in range(3) if i != k) for k in range(3)]
    assert counts / 4000 == pytest.approx(left_out, abs=0.025)
    assert sum(left_out) == pytest.approx(1)


def test_the_explored_share_goes_to_the_prompts_that_were_drawn_least_often() -> None:
    curriculum = make(12, 4, exploration=0.5)
    told(curriculum, *[HALF] * 8)
    curriculum.visits[:8] = 3
    curriculum.visits[8:] = [1, 2, 2, 2]
    batch = curriculum.next_batch()
    assert 8 in batch
    assert {9, 10, 11} & set(batch.tolist())
    assert curriculum.visits.sum() == 24 + 7 + 4
    everything = make(12, 4, exploration=1.0)
    assert sorted(i for _ in range(3) for i in everything.next_batch()) == list(range(12)), "each once before any twice"


def test_a_share_of_less_than_a_prompt_is_explored_now_and_then() -> None:
    """A quarter of a batch of 1: prompt 0, which has no weight to speak of, is always the one drawn least often."""
    curriculum, explored = told(make(2, 1, exploration=0.25), [0.0] * 10**6), 0
    for _ in range(2000):
        curriculum.visits[:] = 0, 1
        explored += curriculum.next_batch()[0] == 0
    assert explored / 2000 == pytest.approx(0.25, abs=0.03)


def test_solved_prompts_are_not_drawn_again() -> None:
    """Prompt 0 has 0.75 of its scores, 1 has 0.9, 2 all, 3 none; where too few are left, they fill a batch."""
    for exploration in (0.0, 1.0):
        curriculum = make(4, 2, exploration=exploration, decay=0.5)
        curriculum.max_pass_rate = 0.9
        told(curriculum, [1.0, 1, 1, 0], [1.0] * 9 + [0.0], ALL, NONE)
        for _ in range(20):
            assert sorted(curriculum.next_batch().tolist()) == [0, 3]
        told(curriculum, ALL * 5)
        assert curriculum.solved.tolist() == [True, True, True, False]
        assert 3 in curriculum.next_batch()
    curriculum = make(40, 8, exploration=0.25)
    curriculum.max_pass_rate = 0.9
    told(curriculum, NONE, NONE, *[ALL] * 38)
    drawn = np.bincount(np.concatenate([curriculum.next_batch() for _ in range(38)]), minlength=40)
    assert drawn[:2].tolist() == [38, 38]
    assert set(drawn[2:].tolist()) == {6}, "all of those are drawn as often, wherever they stand"
    assert not told(make(2, 1), ALL, NONE).solved.any(), "by itself nothing is left out"


@pytest.mark.parametrize(("count", "batch_size"), [(9, 8), (8, 8), (5, 2), (1, 1)])
@pytest.mark.parametrize("exploration", [0.0, 0.3, 1.0])
def test_the_prompts_of_a_batch_differ(count: int, batch_size: int, exploration: float) -> None:
    """Also where the training set has one more than a batch, or no more; `CustomSampler` checks it."""
    sampler = sampler_of(count, batch_size, exploration=exploration, decay=0.5)
    for step in range(20):
        batch = sampler.next_batch()
        sampler.update({int(i): np.array([step % 2, i % 2, 0], np.float32) for i in batch})
        assert len(set(batch.tolist())) == batch_size
    assert sampler.epoch == 19 // (count // batch_size)


def sampler_of(count: int, batch_size: int, seed: int = 3, **options: float) -> CustomSampler:
    options = options or {"exploration": 0.2, "decay": 0.5}
    module, name = PassRateCurriculum.__module__, PassRateCurriculum.__name__
    return CustomSampler(module, name, prompts(count), batch_size, seed=seed, **options)


def scores_of(batch: list[int], step: int) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(step)
    return {i: (rng.random(6) < (i + 1) / 40).astype(np.float32) * rng.choice([1.0, 1.7]) for i in batch}


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    def steps(sampler: CustomSampler, first: int, last: int) -> list[list[int]]:
        drawn = []
        for step in range(first, last):
            drawn.append(sampler.next_batch().tolist())
            sampler.update(scores_of(drawn[-1], step))
        return drawn

    whole, resumed, other = sampler_of(37, 5), sampler_of(37, 5), sampler_of(37, 5, seed=4)
    assert steps(whole, 0, 12) != steps(other, 0, 12)
    saved = json.dumps(whole.state_dict())
    expected = steps(whole, 12, 40)
    assert json.dumps(sampler_of(37, 5).state_dict()) != saved
    resumed.load_state_dict(json.loads(saved))
    assert json.dumps(resumed.state_dict()) == saved
    assert steps(resumed, 12, 40) == expected
    assert json.dumps(resumed.state_dict()) == json.dumps(whole.state_dict())


def test_pools_are_shares_of_the_prompts() -> None:
    sampler = sampler_of(10, 2, exploration=0.0, decay=1.0)
    nothing = {"curriculum/easy": 0.0, "curriculum/useful": 0.0, "curriculum/hard": 0.0, "curriculum/unseen": 1.0}
    assert sampler.metrics() == nothing
    groups = {0: ALL, 1: ALL, 2: ALL, 3: NONE, 4: NONE, 5: HALF}
    sampler.update({i: np.array(group, np.float32) for i, group in groups.items()})
    pools = {name.removeprefix("curriculum/"): share for name, share in sampler.metrics().items()}
    assert pools == pytest.approx({"easy": 0.3, "useful": 0.1, "hard": 0.2, "unseen": 0.4})


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param([[-1.0, 1, 1, 1], [0.0, 1, -1, -1]], [(3.5, 1.5), (2.0, 3.0)], id="from -1 to 1"),
        pytest.param([[10.0, 0, 5, 5], [2.5, 0, 0, 2.5]], [(2.5, 2.5), (1.0, 4.0)], id="up to 10"),
        pytest.param([[-9.0, -9, -9, -1], NONE], [(1.3, 3.7), (4.5, 0.5)], id="penalties"),
        pytest.param([[0.5] * 4, [0.75] * 4], [(0.5, 4.5), (4.5, 0.5)], id="equal, between"),
        pytest.param([[0.5], [0.75, 0.75]], [(1.0, 1.0), (2.5, 0.5)], id="of one response"),
        pytest.param([[1e30, -1e30, 0, 0], ALL], [(2.5, 2.5), (0.5, 4.5)], id="huge"),
    ],
)
def test_scores_of_other_ranges(groups: list[list[float]], expected: list[Any]) -> None:
    """The range seen so far is stretched to [0, 1]; of equal scores all are what they are nearer to."""
    curriculum = told(make(2, 1), *groups)
    assert [posterior(curriculum, i) for i in range(2)] == [pytest.approx(pair) for pair in expected]
    assert np.isfinite(np.log(curriculum.weights())).all()


def test_a_range_that_grows_holds_for_later_scores_only() -> None:
    curriculum = told(make(3, 1), HALF)
    told(curriculum, [], [-1.0, 0, 1, 0])
    told(curriculum, [], [], HALF)
    assert [posterior(curriculum, i) for i in range(3)] == [(2.5, 2.5), (2.5, 2.5), (3.5, 1.5)]
    resumed = make(3, 1)
    resumed.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert posterior(told(resumed, [1.0, 0]), 0) == (4.0, 3.0)
