"""The engine of a rehearsal: which of a group's responses are the row's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpo_dist.engines.base import Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.workers.rehearsal import Replying
from tests.engines.fakes import TOKEN, FakeRolloutEngine

CALL, ANSWER = [101, 102], [103]


class Scoring(FakeRolloutEngine):
    async def score(self, prompt: Sequence[int], response: Sequence[int]) -> Response:
        """The tokens as they are."""
        return Response(list(response), [-0.25] * len(response), False, [7] * len(response))


def asked(replies: list[list[int]], *requests: tuple[str, list[int], int]) -> list[list[list[int]]]:
    """The token ids of the responses to (request id, prompt, n), one request after the other."""
    generate = Replying(Scoring(length=2, growth=0), 2, 1, {"5": replies}).generate
    answers = [
        asyncio.run(generate(prompt, SamplingSettings(n, 1.0, 1.0, -1, 8, 0), name)) for name, prompt, n in requests
    ]
    return [[response.token_ids for response in answer or []] for answer in answers]


def test_from_the_second_step_on_half_of_a_group_is_the_rows_answer() -> None:
    sampled = [TOKEN]
    first, second, other, validation = asked(
        [ANSWER],
        ("step1-prompt5", [1], 4),
        ("step2-prompt5-try2", [1], 4),
        ("step2-prompt6", [1], 2),
        ("val-5", [1], 1),
    )
    assert first == [sampled] * 4
    assert second == [ANSWER, sampled, ANSWER, sampled]
    assert (other, validation) == ([sampled] * 2, [sampled])


def test_every_other_episode_calls_a_tool_and_then_answers() -> None:
    """The prompt of a later turn has the replies of the earlier ones."""
    name = "step2-prompt5"
    turns = asked(
        [CALL, ANSWER], (name, [1], 1), (name, [1], 1), (name, [1, *CALL, 9], 1), (name, [1, *CALL, 9, *ANSWER, 3], 1)
    )
    assert turns == [[CALL], [[TOKEN]], [ANSWER], [[TOKEN]]]
