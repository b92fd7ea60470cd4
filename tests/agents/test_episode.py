"""An episode's tokens, masks and limits, on a made-up engine."""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grpo_dist.agents import Episode, Row
from grpo_dist.agents.episode import EpisodeEnded, Turns
from grpo_dist.agents.recording import NO_VERSION
from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from tests.agents.fakes import END, Characters, Writer
from tests.messages import refuses

PROMPT = [ord(character) for character in "Q:"]


def make(
    writer: Writer, *, index: int = 0, max_model_len: int = 100, max_turns: int | None = None, **changes: object
) -> Episode:
    sampling = replace(SamplingSettings(4, 1.0, 1.0, -1, 20, 100), **changes)
    limits = {"max_model_len": max_model_len, "max_turns": max_turns}
    episode = Episode(Row("p3", PROMPT), sampling, index=index, tokenizer=Characters(), **limits)
    episode.connect(writer.sample)
    return episode


def play(episode: Episode, run: Callable[[Episode], Awaitable[None]]) -> Response:
    asyncio.run(run(episode))
    return episode.response()


async def call_and_answer(episode: Episode) -> None:
    turn = await episode.generate(stop="=")
    assert (turn.text, turn.stop, turn.truncated) == ("1+1=", "=", False)
    episode.append("2")
    turn = await episode.generate(stop=("=",))
    assert (turn.text, turn.token_ids, turn.stop, turn.truncated) == ("!", (ord("!"), END), None, False)


def test_what_is_sampled_trains_and_what_is_put_in_does_not() -> None:
    writer = Writer("1+1=3", "!")
    episode = make(writer)
    response = play(episode, call_and_answer)
    assert Characters().decode(response.token_ids) == episode.text == "1+1=2!"
    assert response.mask == [1, 1, 1, 1, 0, 1, 1]
    assert response.log_probs == [-0.5] * 4 + [0.0] + [-0.5] * 2
    assert response.weight_versions == [8] * 4 + [NO_VERSION] + [9] * 2
    assert (response.num_turns, response.truncated) == (2, False)
    assert [bytes(prompt) for prompt, _ in writer.asked] == [b"Q:", b"Q:1+1=2"], "the policy reads what was put in"


def test_a_turn_brings_the_experts_of_what_is_new() -> None:
    """The engine numbers the tokens that it computes; of the second turn it is asked for those from the `=` on."""
    counted, asked = itertools.count(), []
    writer = Writer("1+1=3", "!")

    async def sample(prompt: list[int], sampling: SamplingSettings) -> Response | None:
        response = await writer.sample(prompt, sampling)
        asked.append(sampling.routes_from)
        rows = [*itertools.islice(counted, len(prompt) + len(response.token_ids) - 1 - sampling.routes_from), 255]
        return replace(response, routes=np.array(rows, np.uint8)[:, None, None])

    episode = make(writer)
    episode.connect(sample)
    response = play(episode, call_and_answer)
    assert asked == [0, 5], "Q:1+1= but for its last token"
    assert response.routes is not None
    assert response.routes[:, 0, 0].tolist() == [*range(8), 255]


def seeds_of(index: int, seed: int | None = 100) -> list[int | None]:
    """Of two attempts of two turns each; the second begins with nothing of the first."""
    writer = Writer(*["1+1=", "!"] * 2)
    first = make(writer, index=index, seed=seed)
    play(first, call_and_answer)
    first.reward = 1.0
    second = first.next_attempt()
    second.connect(writer.sample)
    assert (second.token_ids, second.reward, second.attempt, second.index) == ([], None, 1, index)
    play(second, call_and_answer)
    assert second.next_attempt().attempt == 2
    assert all(sampling.n == 1 for _, sampling in writer.asked)
    return [sampling.seed for _, sampling in writer.asked]


def test_seeds_depend_on_sample_attempt_and_turn_alone() -> None:
    """The first turn's is the one that vLLM gives response i of a request for n."""
    one, other = seeds_of(0), seeds_of(3)
    assert (one[0], other[0]) == (100, 103)
    assert len({*one, *other}) == 8
    assert seeds_of(3) == other
    assert seeds_of(0, seed=None) == [None] * 4


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(6, 100), (20, 8)])
def test_room_is_the_shorter_of_both_limits(max_tokens: int, max_model_len: int) -> None:
    writer = Writer("1+1=", "much too long")

    async def run(episode: Episode) -> None:
        assert episode.room == 6
        await episode.generate(stop="=")
        assert episode.room == 2
        episode.append("2")
        turn = await episode.generate()
        assert (turn.text, turn.truncated, episode.room) == ("m", True, 0)
        assert episode.truncated

    response = play(make(writer, max_tokens=max_tokens, max_model_len=max_model_len), run)
    assert (len(response.token_ids), response.truncated) == (6, True)
    assert [sampling.max_tokens for _, sampling in writer.asked] == [6, 1]


def test_a_text_that_is_cut_ends_the_episode_and_a_short_turn_does_not() -> None:
    async def run(episode: Episode) -> None:
        while (turn := await episode.generate(stop="=")).stop == "=":
            episode.append("a long story")
        assert (turn.text, turn.truncated, episode.num_turns) == ("", True, 1), "nothing is left to sample into"

    response = play(make(Writer("1="), max_tokens=5), run)
    assert (response.mask, response.truncated) == ([1, 1, 0, 0, 0], True)
    writer = Writer("thinking", "!")

    async def run(episode: Episode) -> None:
        turn = await episode.generate(max_tokens=3)
        assert (turn.text, turn.truncated, episode.truncated) == ("thi", True, False)
        await episode.generate()

    response = play(make(writer, min_tokens=4, stop=("#",)), run)
    assert not response.truncated
    assert [(s.max_tokens, s.min_tokens, s.stop) for _, s in writer.asked] == [(3, 3, ("#",)), (17, 1, ("#",))]


async def two_at_once(episode: Episode) -> None:
    await asyncio.gather(episode.generate(), episode.generate())


def test_misuse_is_named() -> None:
    for act, error, *named in (
        (lambda episode: episode.append(None), TypeError, "episode.append", "None"),
        (lambda episode: episode.append("2"), RuntimeError, "1 tokens", "19"),
        (lambda episode: episode.append("a very very long story"), RuntimeError, "20 tokens", "0"),
        (two_at_once, RuntimeError, "await"),
        (lambda episode: episode.generate(max_tokens=0), ValueError, "max_tokens=0"),
        (lambda episode: episode.generate(agent_name="solver:255"), ValueError, "solver:255", "254"),
        (lambda episode: episode.append_tokens([5, 128]), ValueError, "5..128", "vocabulary of 128"),
        (lambda episode: episode.add_step_reward(1.0), IndexError, "add_step_reward", "sampled"),
    ):

        async def run(episode: Episode, act: Any = act) -> None:
            if (done := act(episode)) is not None:
                await done

        with refuses(error, *named):
            play(make(Writer("1+1=")), run)


async def test_an_aborted_turn_cannot_be_survived() -> None:
    """By no `except Exception` of the loop."""

    async def aborted(*_: object) -> None: ...

    episode = make(Writer())
    episode.connect(aborted)
    with pytest.raises(asyncio.CancelledError):
        await episode.generate()


def test_rewards_of_steps_add_up() -> None:
    async def run(episode: Episode) -> None:
        await episode.generate(stop="=")
        episode.append("2")
        episode.add_step_reward(0.5)
        episode.add_step_reward(0.25)
        await episode.generate(agent_name="b")
        episode.add_step_reward(-1.0, agent_name="b")

    episode = make(Writer("1+1=", "!"))
    play(episode, run)
    assert episode.turns.rewards == {3: 0.75, 6: -1.0}
    assert episode.turns.spans == [(0, 4, ""), (5, 7, "b")]
    assert episode.outcome() == -0.25
    episode.reward = 2
    assert episode.outcome() == 2.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None])
def test_rewards_and_metrics_are_finite_numbers(value: object) -> None:
    episode = make(Writer("a"))
    episode.metrics = {"moves": value}
    with refuses(ValueError, "metrics['moves']", "finite"):
        episode.outcome()
    episode.metrics, episode.reward = {}, value
    if value is None:
        assert episode.outcome() is None
    else:
        with refuses(ValueError, "episode.reward", "finite"):
            episode.outcome()


def test_a_loop_that_goes_on_without_end_is_ended() -> None:
    async def forever(episode: Episode) -> None:
        while True:
            await episode.generate()

    full = make(Writer(*["word"] * 10))  # 5 tokens a turn, room for 20; with a limit of turns: test_runner.py
    with pytest.raises(EpisodeEnded):
        play(full, forever)
    assert (full.num_turns, full.truncated, full.room) == (4, True, 0)


def turns() -> Turns:
    """Two agents: a of two turns with a text put in between, b of one, and a turn of b that found no room."""
    made = Turns()
    made.spans = [(0, 2, "a"), (3, 5, "b"), (5, 6, "a"), (0, 0, "b")]
    return made


def test_each_sampled_token_has_the_number_of_its_agent_and_its_turn_the_reward() -> None:
    a, also_a, put_in, b, also_b, last = turns().agent_ids(6)
    assert (also_a, last, also_b) == (a, a, b)
    assert (put_in, len({a, b, put_in})) == (0, 3)
    other = Turns()
    other.spans = [(0, 1, "b"), (1, 2, "")]
    assert other.agent_ids(2)[0] == b, "the name alone decides"
    assert 0 < other.agent_ids(2)[1] < 2**31, "an agent without a name is one"
    # Of a turn without tokens, on that of its agent's turn before. Where there is none, nothing that was sampled has
    # earned it, and the episode still has.
    made = turns()
    made.reward(1.0, 0)
    made.reward(0.5, 0, "b")
    made.reward(2.0, agent_name="a")
    made.reward(-1.0, 1, "a")
    made.reward(9.0)
    made.spans.append((0, 0, "c"))
    made.reward(-2.0, agent_name="c")
    assert made.rewards == {1: 1.0, 4: 9.5, 5: 1.0, -1: -2.0}
    assert [i for i, value in enumerate(made.step_rewards(6)) if not math.isnan(value)] == [1, 4, 5]


@pytest.mark.parametrize(("turn", "agent_name"), [(4, None), (-1, None), (2, "a"), (None, "c")])
def test_a_turn_that_is_not_there_has_no_reward(turn: int | None, agent_name: str | None) -> None:
    made = turns()
    with refuses(IndexError, "add_step_reward", f"turn={turn}", f"agent_name={agent_name!r}"):
        made.reward(1.0, turn, agent_name)
    with refuses(ValueError, "add_step_reward", "nan"):
        made.reward(math.nan)
    assert not made.rewards
