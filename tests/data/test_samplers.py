"""The order of the prompts: seeded, by a class of the user's, or by the built-in curriculum (posteriors by hand)."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_dist.data import Prompt, PromptSampler
from grpo_dist.data.sampler import CustomSampler, PassRateCurriculum, load_sampler_class
from grpo_dist.errors import ConfigError, DataError
from tests.messages import refuses


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, "d", [{"role": "user", "content": f"q{i}"}], "", {}, f"row {i}") for i in range(count)]


def seeded(num_prompts: int = 12, batch_size: int = 4, seed: int = 0, *, shuffle: bool = True) -> PromptSampler:
    return PromptSampler(num_prompts, batch_size, shuffle=shuffle, seed=seed)


def batches(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [sampler.next_batch().tolist() for _ in range(count)]


def test_orders_with_and_without_shuffle() -> None:
    sampler = seeded(7, 3, shuffle=False)
    assert sampler.steps_per_epoch == 2
    sampler.next_batch()[:] = -1
    sampler.update({3: np.array([1.0])})
    assert batches(sampler, 3) == [[3, 4, 5], [0, 1, 2], [3, 4, 5]]
    assert (sampler.epoch, sampler.metrics()) == (1, {})
    expected = [*np.random.default_rng([1, 0]).permutation(20), *np.random.default_rng([1, 1]).permutation(20)]
    for batch_size in (4, 5):
        two_epochs = batches(seeded(20, batch_size, seed=1), 40 // batch_size)
        assert [index for batch in two_epochs for index in batch] == expected
    assert seeded(20, 20, seed=2).next_batch().tolist() != expected[:20]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 6])
def test_resume_continues_exactly_from_any_step(steps: int) -> None:
    whole, resumed = seeded(11), seeded(11)
    batches(whole, steps)
    state = json.loads(json.dumps(whole.state_dict()))
    expected = batches(whole, 7)
    batches(resumed, 3)  # whatever it did before is forgotten
    resumed.load_state_dict(state)
    assert batches(resumed, 7) == expected
    if steps % 2:  # within an epoch
        one_by_one = seeded(11, 1)
        one_by_one.load_state_dict(state)
        assert [index for (index,) in batches(one_by_one, 4)] == expected[0]


# --- a class of the user's -------------------------------------------------------------------------------------------
SOURCE = """
class Backwards:
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
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "order.py"
    file.write_text(SOURCE)
    return str(file)


def make(path: str, name: str = "Backwards", batch_size: int = 3) -> CustomSampler:
    return CustomSampler(path, name, prompts(7), batch_size, seed=4)


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
    curriculum: Any = sampler._curriculum
    assert (curriculum.first_question, curriculum.seed, sampler.steps_per_epoch) == ("q0", 4, 2)


def test_wrong_batches_are_refused(path: str) -> None:
    for batch, words in (
        ([0, 1], ["2 positions"]),
        ([0, 1, 7], ["position 7"]),
        ([0, -1, 2], ["position -1"]),
        ([0, 1, 0], ["position 0", "once"]),
        ([0.0, 1.0, 2.0], ["list", "float64"]),
        (None, ["NoneType"]),
        ([[0], [1, 2]], ["lists", "lengths"]),
    ):
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


def test_errors_in_the_class_are_named_and_too_few_prompts(path: str) -> None:
    with refuses(DataError, "order.py:Fails", "next_batch()", "RuntimeError", "of ideas"):
        make(path, "Fails").next_batch()
    with refuses(DataError, "order.py:NeedsMore", "__init__()", "TypeError"):
        make(path, "NeedsMore")
    with refuses(DataError, "update()", "AttributeError"):
        make(path).update({0: 1.0})  # type: ignore[dict-item]
    for sampler in (lambda size: seeded(7, size), lambda size: make(path, batch_size=size)):
        with refuses(DataError, "data.train_batch_size=8", "7 rows", "most 7"):
            sampler(8)
        with refuses(DataError, "data.train_batch_size=0"):
            sampler(0)
    assert seeded(8, 8).steps_per_epoch == 1


def test_what_is_no_sampler_is_refused(path: str) -> None:
    for name, words in (
        ("Unfinished", ["update, state_dict, load_state_dict;", "next_batch, update"]),
        ("function", ["class", "function"]),
        ("Backward", ["'Backwards'"]),
    ):
        with refuses(ConfigError, *words):
            load_sampler_class(path, name)


def test_a_state_of_other_data_or_of_another_order_is_refused(path: str) -> None:
    rated, fewer = (sampler_of(n, 3) for n in (7, 6))
    default, own = seeded(7), make(path)
    for made, state, *parts in (
        (seeded(8), default, "data.train_files", "num_prompts=7", "num_prompts=8"),
        (seeded(7, seed=5), default, "data.seed", "seed=0", "seed=5"),
        (seeded(7, shuffle=False), default, "data.shuffle"),
        (own, default, "data.sampler", "sampler=PromptSampler", "sampler=Backwards"),
        (default, own, "data.sampler", "sampler=Backwards", "sampler=PromptSampler"),
        (fewer, rated, "data.train_files", "num_prompts=7", "num_prompts=6"),
        (default, rated, "data.curriculum.enable", "sampler=PassRateCurriculum", "sampler=PromptSampler"),
    ):
        with refuses(DataError, *parts):
            made.load_state_dict(state.state_dict())


# --- the built-in curriculum ---------------------------------------------------------------------------------------
ALL, NONE, HALF = [1.0] * 4, [0.0] * 4, [1.0, 0, 1, 0]


def rates(count: int, batch_size: int, exploration: float = 0.0, decay: float = 1.0) -> PassRateCurriculum:
    return PassRateCurriculum(prompts(count), batch_size, 3, exploration=exploration, decay=decay)


def told(curriculum: PassRateCurriculum, *scores: list[float]) -> PassRateCurriculum:
    """Tell it the scores of the prompts 0, 1, 2 ..."""
    curriculum.update({i: np.array(group, np.float32) for i, group in enumerate(scores) if group})
    return curriculum


def posterior(curriculum: PassRateCurriculum, index: int) -> tuple[float, float]:
    a, b = curriculum.posterior
    return float(a[index]), float(b[index])


def test_posteriors_and_weights_by_hand() -> None:
    curriculum = told(rates(5, 1), ALL, NONE, [1.0, 0, 0, 0], [0.25, 0.5, 0.75, 1])
    assert [posterior(curriculum, i) for i in range(5)] == [(4.5, 0.5), (0.5, 4.5), (1.5, 3.5), (3.0, 2.0), (0.5, 0.5)]
    weights = [Fraction(9, 4) / 30, Fraction(9, 4) / 30, Fraction(21, 4) / 30, Fraction(6, 30), Fraction(1, 8)]
    assert curriculum.weights().tolist() == pytest.approx([float(weight) for weight in weights])
    told(curriculum, [1.0, 0, 0, 0])
    assert posterior(curriculum, 0) == (5.5, 3.5)
    curriculum = told(rates(3, 1), HALF)
    told(curriculum, [], [-1.0, 0, 1, 0])
    told(curriculum, [], [], HALF)
    assert [posterior(curriculum, i) for i in range(3)] == [(2.5, 2.5), (2.5, 2.5), (3.5, 1.5)]
    resumed = rates(3, 1)
    resumed.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert posterior(told(resumed, [1.0, 0]), 0) == (4.0, 3.0)


def test_evidence_decays_with_every_batch_to_the_share_that_an_epoch_leaves() -> None:
    """7 prompts in batches of 2 make epochs of 3 batches."""
    curriculum = told(rates(7, 2, decay=0.125), [1.0] * 8, [0.0] * 8)
    for passed in (4.5, 2.5, 1.5):
        curriculum.next_batch()
        assert posterior(curriculum, 0) == pytest.approx((passed, 0.5))
    assert posterior(curriculum, 1) == pytest.approx((0.5, 1.5))
    told(curriculum, HALF)
    assert posterior(curriculum, 0) == pytest.approx((3.5, 2.5))
    for _ in range(60):
        curriculum.next_batch()
    assert curriculum.weights() == pytest.approx(0.125), "nothing is known any more"


@pytest.mark.parametrize("equal", [ALL, pytest.param(NONE, marks=pytest.mark.deep)], ids=["right", "wrong"])
def test_a_batch_is_a_weighted_draw_without_replacement(equal: list[float]) -> None:
    """Two of three: the probability to be left out, by hand, of w = 0.075, 0.2083, 0.125 (unseen)."""
    curriculum = told(rates(3, 2), equal, HALF)
    w, counts = curriculum.weights() / curriculum.weights().sum(), np.zeros(3)
    for _ in range(4000):
        counts[np.setdiff1d(np.arange(3), curriculum.next_batch())] += 1
    left_out = [sum(w[i] * w[3 - k - i] / (1 - w[i]) for i in range(3) if i != k) for k in range(3)]
    assert counts / 4000 == pytest.approx(left_out, abs=0.025)


def test_the_explored_share_goes_to_the_prompts_that_were_drawn_least_often() -> None:
    curriculum = told(rates(12, 4, exploration=0.5), *[HALF] * 8)
    curriculum.visits[:] = [3] * 8 + [1, 2, 2, 2]
    batch = curriculum.next_batch()
    assert 8 in batch
    assert {9, 10, 11} & set(batch.tolist())
    assert curriculum.visits.sum() == 24 + 7 + 4
    everything = rates(12, 4, exploration=1.0)
    assert sorted(i for _ in range(3) for i in everything.next_batch()) == list(range(12)), "each once before any twice"


def test_a_share_of_less_than_a_prompt_is_explored_now_and_then() -> None:
    """A quarter of a batch of 1: prompt 0, which has no weight to speak of, is always the one drawn least often."""
    curriculum, explored = told(rates(2, 1, exploration=0.25), [0.0] * 10**6), 0
    for _ in range(2000):
        curriculum.visits[:] = 0, 1
        explored += curriculum.next_batch()[0] == 0
    assert explored / 2000 == pytest.approx(0.25, abs=0.03)


def test_solved_prompts_are_not_drawn_again() -> None:
    """Prompt 0 has 0.75 of its scores, 1 has 0.9, 2 all, 3 none; where too few are left, they fill a batch."""
    for exploration in (0.0, 1.0):
        curriculum = rates(4, 2, exploration=exploration, decay=0.5)
        curriculum.max_pass_rate = 0.9
        told(curriculum, [1.0, 1, 1, 0], [1.0] * 9 + [0.0], ALL, NONE)
        for _ in range(20):
            assert sorted(curriculum.next_batch().tolist()) == [0, 3]
        told(curriculum, ALL * 5)
        assert curriculum.solved.tolist() == [True, True, True, False]
        assert 3 in curriculum.next_batch()
    curriculum = rates(40, 8, exploration=0.25)
    curriculum.max_pass_rate = 0.9
    told(curriculum, NONE, NONE, *[ALL] * 38)
    drawn = np.bincount(np.concatenate([curriculum.next_batch() for _ in range(38)]), minlength=40)
    assert drawn[:2].tolist() == [38, 38]
    assert set(drawn[2:].tolist()) == {6}, "all of those are drawn as often, wherever they stand"
    assert not told(rates(2, 1), ALL, NONE).solved.any(), "by itself nothing is left out"


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
    sampler.update({i: np.array(group, np.float32) for i, group in enumerate((ALL, ALL, ALL, NONE, NONE, HALF))})
    assert sampler.metrics() == pytest.approx(dict(zip(nothing, (0.3, 0.1, 0.2, 0.4), strict=True)))


def test_scores_of_other_ranges() -> None:
    """The range seen so far is stretched to [0, 1]; of equal scores all are what they are nearer to."""
    for groups, expected in (
        ([[-1.0, 1, 1, 1], [0.0, 1, -1, -1]], [(3.5, 1.5), (2.0, 3.0)]),
        ([[10.0, 0, 5, 5], [2.5, 0, 0, 2.5]], [(2.5, 2.5), (1.0, 4.0)]),
        ([[-9.0, -9, -9, -1], NONE], [(1.3, 3.7), (4.5, 0.5)]),
        ([[0.5] * 4, [0.75] * 4], [(0.5, 4.5), (4.5, 0.5)]),
        ([[0.5], [0.75, 0.75]], [(1.0, 1.0), (2.5, 0.5)]),
        ([[1e30, -1e30, 0, 0], ALL], [(2.5, 2.5), (0.5, 4.5)]),
    ):
        curriculum = told(rates(2, 1), *groups)
        assert [posterior(curriculum, i) for i in range(2)] == [pytest.approx(pair) for pair in expected]
        assert np.isfinite(np.log(curriculum.weights())).all()
