"""Calls of an agent: whose tokens stand where, branches, limits and seeds, on paper."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.agents import recording as module
from grpo_dist.agents.recording import MOST_AT_ONCE, NO_VERSION, Call, Recording, TokenTree
from grpo_dist.engines.base import RequestRefused, Response
from grpo_dist.engines.settings import SamplingSettings
from tests.messages import refuses

WORDS = ["", "a", "b", "ab", "abc", "c", " ", "é"]  # token id -> text; "ab" may be 3 or 1, 2


class Words:
    """A tokenizer with several ways to write the same text."""

    def decode(self, token_ids: list[int], **options: object) -> str:
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return "".join(WORDS[token] for token in token_ids)


def recording(max_tokens: int = 20, **options: object) -> Recording:
    sampling = SamplingSettings(4, 0.7, 1.0, -1, max_tokens, 100, stop=("END",), min_tokens=5)
    return Recording(sampling, Words(), 40, 100, **options)


def sampled(*token_ids: int) -> Response:
    return Response(list(token_ids), [-0.5] * len(token_ids), False, [3] * len(token_ids))


def ask(found: Recording, prompt: list[int], ids: list[int], *, is_chat: bool = True) -> Call:
    call, _ = found.begin(prompt, is_chat=is_chat)
    found.end(call, sampled(*ids))
    return call


def test_tokens_that_were_sampled_stand_where_their_text_is_rendered_anew() -> None:
    """None: the prompt is as it was, and begins a branch."""
    for prompt, is_chat, became in (
        ([5, 6, 3, 6, 5], True, [5, 6, 1, 2, 6, 5]),  # it wrote "ab" as two tokens, the template writes it as one
        ([5, 6, 3, 6], False, None),  # a prompt of tokens stays as the client says it
        ([5, 6, 1, 2, 6], False, [5, 6, 1, 2, 6]),
        ([5, 6, 1], True, None),  # shorter
        ([1, 2], True, None),  # another one
        ([5, 6, 4, 6], True, None),  # "abc": what was sampled ends in the middle of it
    ):
        found = recording()
        first = ask(found, [5, 6], [1, 2])
        call, _ = found.begin(prompt, is_chat=is_chat)
        assert (call.prompt_ids, call.parent) == ((prompt, None) if became is None else (became, first))


def test_all_calls_are_one_row_and_each_sampled_token_is_there_once() -> None:
    found = recording()
    ask(found, [5], [1, 2])
    ask(found, [6, 6], [1, 1])
    for _ in range(2):
        ask(found, [5, 3, 6], [2])
    row = found.tree.response
    assert (found.tree.prompt_ids, row.token_ids) == ([5], [1, 2, 6, 6, 1, 1, 6, 2, 2])
    assert row.predecessors == [-1, 0, -2, 2, 3, 4, 1, 6, 6], "the third and the fourth call were asked the same"
    assert row.mask == [1, 1, 0, 0, 1, 1, 0, 1, 1]
    assert [call.place for call in found.calls] == [1, 5, 7, 8]
    assert found.delivered == 1
    assert (recording().tree, recording().delivered) == (None, 1)
    # In the middle of a conversation, at a branch of their own, and as all that an episode is.
    found = recording()
    ask(found, [5], [])
    ask(found, [5, 6], [1])
    ask(found, [2, 6], [])
    ask(found, [5, 6, 1, 6], [2, 2])
    row = found.tree.response
    assert (row.token_ids, row.mask) == ([6, 1, 2, 6, 6, 2, 2], [0, 1, 0, 0, 0, 1, 1])
    assert row.predecessors == [-1, 0, -2, 2, 1, 4, 5]
    assert found.delivered == 1
    silent = recording()
    ask(silent, [5], [])
    assert (silent.tree.response.token_ids, silent.delivered) == ([], 1)


@pytest.mark.deep  # thousands of calls
@pytest.mark.parametrize("goes_on", [True, False], ids=["conversation", "branches"])
def test_each_token_of_an_episode_of_many_calls_is_there(goes_on: bool) -> None:
    count = 3000
    sampling = SamplingSettings(1, 1.0, 1.0, -1, 4 * count, 100)
    found = Recording(sampling, Words(), 5 * count, 9 * count, count)
    history = [5]
    for i in range(count):
        prompt = [*history, 6] if goes_on else [5, *([6] * (i % 7)), 1 + i % 5]
        ask(found, prompt, [1, 2], is_chat=False)
        history = [*prompt, 1, 2]
    assert (sum(found.tree.response.mask or []), found.delivered) == (2 * count, 1)
    with refuses(RequestRefused, f"{count}", "max_assistant_turns"):
        ask(found, [5], [1])


def test_what_calls_at_the_same_time_sample_beyond_the_room_of_an_episode_is_left_out() -> None:
    """Room for 10 tokens: a prompt of 1 and 2 calls of 4. A call behind one that is left out is not, if it fits."""
    found = recording()
    found.max_episode_len = 10
    calls = [found.begin([5], is_chat=True) for _ in range(3)]
    assert [sampling.max_tokens for _, sampling in calls] == [9, 9, 9]
    for call, _ in calls:
        found.end(call, sampled(1, 2, 1, 2))
    assert [call.place for call, _ in calls] == [3, 7, None]
    assert found.delivered == 8 / 12
    with refuses(RequestRefused, "context_length_exceeded", "ppo_max_token_len_per_gpu", "10"):
        found.begin([5, 6], is_chat=True)
    assert found.begin([5], is_chat=True)[1].max_tokens == 1


def test_the_runs_settings_are_used_and_the_room_counts_from_the_first_prompt() -> None:
    found = recording(max_tokens=10)
    _, sampling = found.begin([5, 6], is_chat=True, max_tokens=4, stop=("STOP",))
    assert (sampling.n, sampling.temperature, sampling.max_tokens, sampling.min_tokens) == (1, 0.7, 4, 0)
    assert sampling.stop == ("STOP", "END")
    capped = [found.begin([5], is_chat=True, max_tokens=most)[0].capped for most in (3, 10, 90, None)]
    assert capped == [True, False, False, False]
    found.end(Call([]), None)  # it was aborted
    assert found.calls == []
    first = ask(found, [5, 6], [1, 2])
    _, sampling = found.begin([5, 6, 3, 6, 6], is_chat=True)
    assert sampling.max_tokens == 10 - 4, "2 sampled and 2 put in"
    assert (first.first, first.place) == (first, 1)
    with refuses(RequestRefused, "context_length_exceeded", "data.max_response_length=10"):
        found.begin([5, 6, 3, *[6] * 8], is_chat=True)
    with refuses(RequestRefused, "context_length_exceeded", "max_model_len=40"):
        found.begin([6] * 40, is_chat=True)


def test_limits_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the config sets none, an agent that begins anew for ever is stopped by ours."""
    monkeypatch.setattr(module, "MOST_CALLS", 2)
    found = recording()
    for _ in range(2):
        ask(found, [5], [1])
    with refuses(RequestRefused, "max_assistant_turns", "2"):
        found.begin([5], is_chat=True)
    found = recording(max_calls=100)
    calls = [found.begin([5], is_chat=True)[0] for _ in range(MOST_AT_ONCE)]
    with refuses(RequestRefused, str(MOST_AT_ONCE)):
        found.begin([5], is_chat=True)
    found.end(calls[0], None)
    found.begin([5], is_chat=True)


def test_seeds_are_of_the_prompt_and_not_of_the_order() -> None:
    def seeds(*prompts: list[int]) -> list[int | None]:
        found = recording()
        return [found.begin(prompt, is_chat=False)[1].seed for prompt in prompts]

    one, other, again = seeds([5], [6], [5])
    assert [other, one] == seeds([6], [5])
    assert len({one, other, again}) == 3
    unseeded = Recording(SamplingSettings(1, 1.0, 1.0, -1, 9, None), Words(), 40, 100)
    assert unseeded.begin([5], is_chat=False)[1].seed is None


def test_what_is_there_is_not_put_in_again_and_a_call_goes_on_from_its_own_place() -> None:
    """A prompt that differs from its third token on, and one that differs from the first on."""
    tree = TokenTree([7, 7, 8], 11)
    assert tree.add([7, 7, 8], sampled(1, 2)) == 1
    assert tree.add([7, 7, 9, 9], sampled(3)) == 4
    assert tree.add([7, 7, 9, 9], sampled(3)) == 5
    assert tree.add([6], sampled(4)) == 7
    row = tree.response
    assert row.token_ids == [1, 2, 9, 9, 3, 3, 6, 4]
    assert row.predecessors == [-1, 0, -2, 2, 3, 3, -4, 6]
    assert row.mask == [1, 1, 0, 0, 1, 1, 0, 1]
    assert row.log_probs == [-0.5, -0.5, 0, 0, -0.5, -0.5, 0, -0.5]
    assert row.weight_versions == [3, 3, NO_VERSION, NO_VERSION, 3, 3, NO_VERSION, 3]
    assert tree.routes.column(3, 8) is None, "no experts were recorded"
    assert tree.known_routes([7, 7, 8], None, 3) == 0
    assert (tree.add([7, 7, 8], sampled(5)), len(tree)) == (None, 8), "there is room for 11, the prompt's 3 among them"
    # Two calls have sampled the same; the third goes on from the second of them.
    tree = TokenTree([7], 20)
    places = [tree.add([7], sampled(1)) for _ in range(2)]
    assert tree.add([5], sampled(2), places[1]) == 3
    assert tree.response.predecessors == [-1, -1, 1, 2]
    assert tree.walk([5, 2, 9], places[1]) == (3, 2)
    assert tree.walk([5], places[0]) == (0, 0)
    assert tree.walk([7, 1]) == (0, 2)


def test_tokens_keep_the_experts_of_the_call_that_computed_them_first() -> None:
    """A prompt of 3 and two tokens; a call that goes on behind them, and is asked for no more than what is new.

    One layer, one expert, numbered from where a call begins; its last token has none.
    """

    def add(asked: list[int], new: tuple[int, ...], start: int, count: int, place: int | None = None) -> int | None:
        routes = np.array([*range(start, start + count - 1), 255], np.uint8)[:, None, None]
        return tree.add(asked, replace(sampled(*new), routes=routes), place)

    def column(response: int) -> list[int]:
        return tree.routes.column(3, response)[:, 0, 0].tolist()

    tree = TokenTree([7, 7, 8], 20)
    assert add([7, 7, 8], (1, 2), 10, 5) == 1
    assert tree.known_routes([5, 6], 1, 7) == 4, "all but the last that was sampled, and what is put in behind it"
    assert add([5, 6], (3,), 30, 4, 1) == 4
    assert column(5) == [10, 11, 12, 13, 30, 31, 32, 255]
    assert tree.known_routes([7, 9], None, 2) == 1, "another prompt, from its second token on"
    assert add([7, 9], (4,), 50, 3) == 6
    assert column(7) == [10, 11, 12, 13, 30, 31, 32, 255, 51, 255]
