"""Reward functions that do anything: every response has a finite score or a counted failure, in order, and in time."""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_dist.errors import ConfigError, RewardError
from grpo_dist.rewards.contract import Failure, RewardResult, Sample
from grpo_dist.rewards.load import load_reward_function
from grpo_dist.rewards.scorer import Scorer
from tests.tiers import first

GROUPS, GROUP = 60, 8
# What ends or hangs shares its limit with the good responses beside it.
TIMEOUT_S, HANG_S = 60.0, 4.0

FILE = Path(__file__).with_name("reward_functions.py")


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    module = load_reward_function(str(FILE), "compute_score", {}).function.__globals__
    return {kind.lower(): list(module[kind]) for kind in ("GOOD", "BAD", "ENDING")}


def scorer_of(name: str) -> Iterator[Scorer]:
    scorer = Scorer(str(FILE), name, {}, timeout_s=TIMEOUT_S)
    yield scorer
    scorer.stop()


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    yield from scorer_of("compute_score")


def samples(*texts: str) -> list[Sample]:
    truth, extra = ["a", {"b": 1}], {"tags": ["x"], "index": 0}
    return [Sample(text, "source", truth, extra, []) for text in texts]


def check(texts: list[str], results: list[RewardResult | Failure]) -> None:
    """Each response in its place, good ones scored, the others counted, with messages of a bearable length."""
    assert len(results) == len(texts)
    for text, result in zip(texts, results, strict=True):
        if isinstance(result, Failure):
            assert not text.startswith("good:"), f"{text}: {result.text[:500]}"
            assert repr(text) in result.text, text
            assert len(result.text) < 5000, text
        else:
            assert text.startswith("good:"), f"{text}: {result.score}"
            assert math.isfinite(result.score), text
            assert all(isinstance(value, float) and math.isfinite(value) for value in result.extra.values()), text


def test_any_return_value_and_any_exception(scorer: Scorer, names: dict[str, list[str]]) -> None:
    known = [f"{kind}:{name}" for kind in ("good", "bad") for name in names[kind]]
    assert len(known) > 70
    tried: set[str] = set()
    for seed in range(GROUPS):
        rng = random.Random(seed)
        texts = [rng.choice(known) for _ in range(GROUP)]
        check(texts, scorer.score(samples(*texts)))
        tried.update(texts)
        assert len(scorer.printed.take()[0]) <= 5
    assert len(tried) > 0.9 * len(known)
    assert scorer.num_starts <= 2, "none of these ends the process"


@pytest.mark.deep
def test_whatever_ends_or_hangs_the_process(scorer: Scorer, names: dict[str, list[str]]) -> None:
    scorer.timeout_s = HANG_S
    for name in names["ending"]:
        texts = ["good:float", f"ending:{name}", "good:int"]
        check(texts, scorer.score(samples(*texts)))
    assert scorer.num_starts == 1 + len(names["ending"])


def test_a_coroutine_that_never_ends_costs_its_group() -> None:
    for scorer in scorer_of("slow"):
        scorer.timeout_s = 1.0
        assert [type(each) for each in scorer.score(samples("good", "never"))] == [Failure, Failure]
        scorer.timeout_s = TIMEOUT_S
        assert [each.score for each in scorer.score(samples("good", "good"))] == [1.0, 1.0]


def test_functions_of_the_whole_group_and_one_that_yields() -> None:
    for scorer in scorer_of("batch"):
        for text in ("endless", "few", "dict", "none", "number", "text", "coroutine"):
            results = scorer.score(samples(text, text))
            assert [type(each) for each in results] == [Failure, Failure], text
        mixed = scorer.score(samples(*["mixed"] * 6))
        assert [getattr(each, "score", None) for each in mixed] == [1.0, None, None, None, None, 2.0]
        assert scorer.num_starts == 1
    for scorer in scorer_of("yields"):
        (result,) = scorer.score(samples("x"))
        assert "returned <generator" in result.text


SOURCES = {
    "broken": "def f(:", "raising": "raise RuntimeError('x')", "exiting": "import sys; sys.exit(3)", "null": "\0",
    "empty": "", "import": "import no_such_module_at_all", "recursive": "def f(): f()\nf()", "latin": "# \xe9",
    "base": "raise KeyboardInterrupt",
}  # fmt: skip


@pytest.mark.parametrize("case", first(SOURCES, "exiting", "null", "base"))
def test_files_that_cannot_be_imported(tmp_path: Path, case: str) -> None:
    path = tmp_path / f"{case}.py"
    path.write_bytes(SOURCES[case].encode("latin-1"))
    scorer = Scorer(str(path), "compute_score", {}, timeout_s=1.0)
    try:
        with pytest.raises((ConfigError, RewardError)) as caught:
            scorer.start()
    finally:
        scorer.stop()
    assert path.name in str(caught.value)
