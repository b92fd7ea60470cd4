"""An episode: the response to one prompt as it grows, turn by turn.

Its tokens are of two kinds. What the policy sampled trains: mask 1, with the sampler's log-probs and weight versions.
What was put in, a tool's or an environment's text, is read by the policy and does not train: mask 0, log-prob 0, weight
version -1, since no weights sampled it.

The policy's own tokens stand in the episode as they were sampled, whatever a chat template would make of their text. So
what the template writes behind them is cut out of a rendered conversation, in which a mark stands for what was sampled.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from grpo_dist.agents.recording import Recording, TokenRoutes, derived_seed, extend
from grpo_dist.algorithms.advantage.inputs import agent_id, name_fault
from grpo_dist.assets.model_folder import continued
from grpo_dist.engines.base import ENGINE_KEY, Response
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.plugins.names import ROLLOUT_ENGINES
from grpo_dist.plugins.registry import described
from grpo_dist.protocol.sequences import last_branch

# (prompt, sampling) -> the sampled continuation; None: it was aborted.
Sample = Callable[[list[int], SamplingSettings], Coroutine[Any, Any, Response | None]]
# Opens an endpoint on which these calls are recorded: a context manager of its address and token.
OpenEndpoint = Callable[[Recording], AbstractAsyncContextManager["Endpoint"]]

_EMPTY_TURNS = 8  # that an episode without room gets before it is ended


class Endpoint(NamedTuple):
    """Where an OpenAI client finds the policy: the base URL, which ends in /v1, and the key."""

    base_url: str
    token: str

    def of_agent(self, agent_name: str) -> Endpoint:
        """Return the same endpoint for one of several agents, whose turns are told apart (`algorithm.credit`)."""
        return self._replace(base_url=f"{self.base_url.removesuffix('/v1')}/agent/{quote(agent_name, safe='')}/v1")


class EpisodeEnded(Exception):
    """The episode has had all its turns."""


@dataclass(frozen=True)
class Row:
    """The row of the data that an episode starts from: the prompt, as tokens and messages, and what belongs to it.

    The ground truth is left out: whatever an environment must know goes into `extra_info`.
    """

    uid: str
    prompt_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]] = ()
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One turn of an episode, sampled by the policy.

    Attributes:
        text: decoded, without special tokens.
        token_ids: the tokens; the last one may hold text beyond the text that stopped it.
        stop: the text that stopped it; None: it ended with the end-of-sequence token, or was cut short.
        truncated: cut short at the turn's longest length, or no room was left for it.
    """

    text: str
    token_ids: tuple[int, ...]
    stop: str | None
    truncated: bool


class Turns:
    """The turns of an episode, in the order in which they ended.

    Attributes:
        spans: of each turn its first token in the response, the one behind its last, and the agent's name. A turn that
            found no room in the row has no tokens.
        rewards: by the last token of their turn; of one without tokens by that of its agent's turn before it, and by
            -1 where there is none: an estimator passes rewards on to what was sampled before them.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, str]] = []
        self.rewards: dict[int, float] = {}

    def reward(self, value: float, turn: int | None = None, agent_name: str | None = None) -> None:
        """Add to the reward of a turn, the last one if none is named; `agent_name` counts that agent's alone."""
        spans = [span for span in self.spans if agent_name in (None, span[2])]
        if not spans or (turn is not None and not 0 <= turn < len(spans)):
            asked = f"turn={turn}, agent_name={agent_name!r}"
            raise IndexError(f"episode.add_step_reward({asked}): {len(spans)} turns were sampled that it could be for")
        end, name = len(spans) if turn is None else turn + 1, spans[-1 if turn is None else turn][2]
        place = max((end - 1 for first, end, whose in spans[:end] if end > first and whose == name), default=-1)
        self.rewards[place] = self.rewards.get(place, 0.0) + finite("episode.add_step_reward", value)

    def step_rewards(self, num_tokens: int) -> list[float]:
        """Return the reward on each token; nan: none."""
        return [self.rewards.get(token, math.nan) for token in range(num_tokens)]

    def agent_ids(self, num_tokens: int) -> list[int]:
        """Return the number of each token's agent (`agent_id`); 0: it was put in."""
        ids = [0] * num_tokens
        for first, end, name in self.spans:
            ids[first:end] = [agent_id(name)] * (end - first)
        return ids


def finite(name: str, value: Any) -> float:
    """Return a number that a loop has set."""
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name} = {described(value)}: must be a finite number")
    return float(value)


@dataclass(eq=False, repr=False)
class Episode:
    """One episode; what an `AgentLoop` works with.

    Args:
        sampling: how to sample; `max_tokens` bounds the whole response, `seed` is that of the row's first episode.
        max_episode_len: most different tokens of all calls at the endpoint.
        max_turns: most turns; None: as many as there is room for.
        attempt: how many attempts have failed before this one.

    Attributes:
        index: which of the row's n episodes this is.
        messages: the row's, unless `begin` has put others in their place.
        prompt_ids: the row's prompt; after `endpoint` that of the first call there.
        turns: which tokens each turn has sampled, and for which agent.
        truncated: whether the response was cut short, or ran out of room; a loop may set it too.
        reward: what the episode has earned, for a loop to set; None: the reward function scores the response.
        metrics: numbers by name, for a loop to set, logged as `reward_extra/NAME/mean`; validation reports `acc`.
        failure: why the loop gave the episode up.
        failure_kind: "failed", or "rejected" where it refused the response.
    """

    row: Row
    sampling: SamplingSettings
    _: KW_ONLY
    index: int = 0
    tokenizer: Any
    max_model_len: int
    max_episode_len: int | None = None
    max_turns: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0

    def __post_init__(self) -> None:
        self.reward: float | None = None
        self.metrics: dict[str, float] = {}
        self.failure: str | None = None
        self.failure_kind = "failed"
        self.turns, self._routes, self._num_calls = Turns(), TokenRoutes(), 0
        self.template_kwargs = dict(self.template_kwargs)  # a loop may change its own
        self._end_id: int | None = None  # the token that has ended the turn right before
        self.num_turns, self.truncated = 0, False
        self.messages = self.row.messages
        self._written = Response([], [], False, [], mask=[], predecessors=[])  # so far
        self.prompt_ids = list(self.row.prompt_ids)
        self._sample: Sample | None = None
        self._open_endpoint: OpenEndpoint | None = None
        self._busy = False

    def next_attempt(self) -> Episode:
        """Return this episode from its beginning, with its next seed, after a failure."""
        return replace(self, attempt=self.attempt + 1)

    def connect(self, sample: Sample, open_endpoint: OpenEndpoint | None = None) -> None:
        """Set the functions that sample, and that open an endpoint; the runner calls this."""
        self._sample, self._open_endpoint = sample, open_endpoint

    @property
    def token_ids(self) -> list[int]:
        """The response so far, sampled and put in."""
        return self._written.token_ids

    @property
    def room(self) -> int:
        """Tokens that are left of data.max_response_length and the engine's longest sequence."""
        longest = min(self.sampling.max_tokens, self.max_model_len - len(self.prompt_ids))
        return longest - len(self.token_ids)

    @property
    def text(self) -> str:
        """The response so far, sampled and put in, without special tokens; with branches, the last one."""
        return self._decode([self.token_ids[i] for i in last_branch(self._predecessors)[1]])

    async def generate(
        self, max_tokens: int | None = None, stop: str | Sequence[str] = (), *, agent_name: str = ""
    ) -> Turn:
        """Have the policy go on from here.

        Args:
            max_tokens: most tokens of the turn; None: all there is room for.
            stop: texts that end the turn, besides `rollout.stop`; they belong to it.
            agent_name: which agent's turn it is, for `algorithm.credit=agent`; `NAME:k` is attempt k of an agent.

        Returns:
            The turn. With no room left it is empty and `truncated`, and so is the episode.

        Raises:
            EpisodeEnded: it has had all its turns; for the runner, not for a loop to catch.
        """
        if self._busy or self._sample is None:
            raise RuntimeError("episode.generate: a turn of this episode is being sampled; await it first")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"episode.generate(max_tokens={max_tokens}): must be 1 or more")
        if fault := name_fault(agent_name):
            raise ValueError(f"episode.generate: {fault}")
        self._num_calls += 1
        most = self.num_turns + _EMPTY_TURNS if self.max_turns is None else self.max_turns
        if self._num_calls > most:
            raise EpisodeEnded
        if self.room < 1:
            self.truncated = True
            await asyncio.sleep(0)  # so that a loop that never ends can be stopped
            return Turn("", (), None, True)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        limit = min(self.room, max_tokens or self.room)
        before, behind = last_branch(self._predecessors)
        context = [*self.prompt_ids[: len(self.prompt_ids) + before + 1], *(self.token_ids[i] for i in behind)]
        sampling = self._turn_sampling(limit, stops, len(context))
        self._busy = True
        try:
            response = await self._sample(context, sampling)
        finally:
            self._busy = False
        if response is None:
            raise asyncio.CancelledError("the group was aborted")
        self.num_turns += 1
        self.truncated = self.truncated or (response.truncated and limit == self.room)
        self.turns.spans.append((len(self.token_ids), len(self.token_ids) + len(response.token_ids), agent_name))
        extend(self._written, response, len(self.token_ids) - 1)
        self._routes.add(response.routes, len(self.token_ids) - 1, self._predecessors)
        is_ended = response.stop is None and not response.truncated
        self._end_id = response.token_ids[-1] if is_ended and response.token_ids else None
        return Turn(self._decode(response.token_ids), tuple(response.token_ids), response.stop, response.truncated)

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Begin with other messages than the row's: the chat template makes the prompt of them, tools and all.

        Raises:
            ValueError: nothing is left for a response, or the last message is the policy's own.
        """
        if self.token_ids or self._busy or self.num_turns:
            raise RuntimeError("episode.begin: the episode has begun; call it before anything else")
        if messages[-1]["role"] == "assistant":
            raise ValueError("episode.begin: the last message is the assistant's, who has the next turn")
        ids = self.tokenizer.encode(rendered(self.tokenizer, messages, self.template_kwargs), add_special_tokens=False)
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"episode.begin: the messages are {len(ids)} tokens, and the engine takes {self.max_model_len} with "
                "the response; shorten them, or raise data.max_prompt_length"
            )
        self.messages, self.prompt_ids = messages, ids

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[Endpoint]:
        """In the block, an OpenAI-compatible endpoint (address, key) samples the episode of code that owns its loop.

        What is asked and sampled there becomes the episode when the block ends: the prompt of the first call, and what
        stands behind it, token by token as the policy saw and sampled it. Calls that do not go on from there, such as
        those of sub-agents or behind a shortened history, are branches of it; the reward function reads the last one.
        """
        if self.token_ids or self._busy:
            raise RuntimeError("episode.endpoint: the episode has begun; open it before anything else")
        if self._open_endpoint is None:
            raise RuntimeError(
                f"episode.endpoint: this rollout engine has none; {ENGINE_KEY}={' or '.join(ROLLOUT_ENGINES)} has"
            )
        sampling = replace(self.sampling, seed=self._seed)
        most = self.max_episode_len or self.max_model_len
        recording = Recording(sampling, self.tokenizer, self.max_model_len, most, self.max_turns)
        self._busy = True
        try:
            async with self._open_endpoint(recording) as endpoint:
                yield endpoint
        finally:
            self._busy = False
            self._take(recording)

    def _take(self, recording: Recording) -> None:
        """Make the recorded calls the episode."""
        tree, calls = recording.tree, recording.calls
        if tree is None:
            return
        self.prompt_ids, self._written, self._routes = tree.prompt_ids, tree.response, tree.routes
        self.num_turns = len(calls)
        ends = [(call, 0 if call.place is None else call.place + 1) for call in calls]
        self.turns.spans = [(max(end - len(call.sampled), 0), end, call.agent_name) for call, end in ends]
        last = calls[-1]
        self.truncated = self.truncated or bool(last.response and last.response.truncated and not last.capped)
        self.metrics["delivered_tokens"] = recording.delivered

    def append(self, text: str) -> None:
        """Put in text that does not train. Special tokens may be written out, such as those of the chat template."""
        if not isinstance(text, str):
            raise TypeError(f"episode.append(text): must be text, is {described(text)}")
        self.append_tokens(self.tokenizer.encode(text, add_special_tokens=False))

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Put in tokens that do not train; where they do not fit, they are cut and the episode is `truncated`."""
        ids = [int(token) for token in token_ids]
        if ids and not 0 <= min(ids) <= max(ids) < len(self.tokenizer):
            raise ValueError(
                f"episode.append_tokens: ids {min(ids)}..{max(ids)} leave the vocabulary of {len(self.tokenizer)}"
            )
        self.truncated = self.truncated or len(ids) > self.room
        ids = ids[: max(self.room, 0)]
        self._end_id = None
        extend(self._written, ids, len(self.token_ids) - 1)

    def append_messages(self, messages: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]] = ()) -> None:
        """Put in what the chat template writes for messages behind the policy's turn, up to where the policy goes on.

        None of it trains. The end of the policy's turn is put in too, where the policy has not written it.

        Args:
            messages: such as {"role": "user", "content": "..."}.
            calls: the calls of tools, as in a message of the assistant, whose results the messages are.

        Raises:
            ValueError: the row has no messages, or the template ends turns with no end token.
            Exception: of the template's, which refuses the messages.
        """
        if not self.messages:
            raise ValueError("episode.append_messages: the row has no messages that these could go on from")
        end = None if self._end_id is None else self.tokenizer.decode([self._end_id], skip_special_tokens=False)
        marks = {mark for mark in (end, self.tokenizer.eos_token) if mark}
        told: dict[str, Any] = {"calls": calls, "ends": marks, "template_kwargs": self.template_kwargs}
        self.append(behind_turn(self.tokenizer, self.messages, messages, is_ended=end is not None, **told))

    def add_step_reward(self, value: float, *, turn: int | None = None, agent_name: str | None = None) -> None:
        """Reward a turn, on its last token: a step, for estimators that judge steps (`grpo_process`).

        With `algorithm.credit=agent` those of an agent's turns are its reward, in place of the episode's. The episode's
        `reward`, where a loop sets none, is the sum of all.

        Args:
            turn: which turn, from 0, in the order in which they ended; None: the last one.
            agent_name: count the turns of this agent only.
        """
        self.turns.reward(value, turn, agent_name)

    def fail(self, why: str) -> None:
        """Give the episode up: it has no reward, good or bad, since something broke that is not the policy's fault.

        It is sampled again from the beginning, up to `rollout.agent.max_attempts` times in all. The others of its group
        go on. If no attempt is left, the group trains without it, or does not train (`algorithm.min_group_size`).
        """
        self.failure, self.failure_kind = str(why), "failed"

    def reject(self, why: str) -> None:
        """Refuse the response, as a filter does: as `fail`, but counted as "rejected"."""
        self.failure, self.failure_kind = str(why), "rejected"

    def outcome(self) -> float | None:
        """The reward that the loop has given; None: it gave none."""
        for name, value in self.metrics.items():
            self.metrics[name] = finite(f"episode.metrics[{name!r}]", value)
        if self.reward is None and self.turns.rewards:
            return math.fsum(self.turns.rewards.values())
        return None if self.reward is None else finite("episode.reward", self.reward)

    def response(self) -> Response:
        """The whole response."""
        if not self.num_turns:
            raise RuntimeError(
                f"the episode ended without a turn, with {len(self.token_ids)} tokens put in and room for {self.room} "
                "more (data.max_response_length): await episode.generate() at least once"
            )
        routes = self._routes.column(len(self.prompt_ids), len(self.token_ids))
        return replace(self._written, truncated=self.truncated, num_turns=self.num_turns, routes=routes)

    def _turn_sampling(self, limit: int, stop: tuple[str, ...], length: int) -> SamplingSettings:
        """How to sample a turn. The first one has the attempt's seed; later ones follow it."""
        whole, seed = self.sampling, self._seed
        if seed is not None and self.num_turns:
            seed = derived_seed(f"{seed}/{self.num_turns}".encode())
        least = min(max(whole.min_tokens - len(self.token_ids), 0), limit)
        stops = tuple(dict.fromkeys((*stop, *whole.stop)))
        known = length - self._routes.num_new(len(self.token_ids) - 1, self._predecessors, length)
        return replace(whole, n=1, max_tokens=limit, min_tokens=least, seed=seed, stop=stops, routes_from=known)

    @property
    def _seed(self) -> int | None:
        """The attempt's: the first has that of a group of one request; later ones differ, not to repeat a failure."""
        if self.sampling.seed is None:
            return None
        first = self.sampling.seed + self.index
        return derived_seed(f"{first}/attempt/{self.attempt}".encode()) if self.attempt else first

    @property
    def _predecessors(self) -> list[int]:
        return self._written.predecessors or []

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


Message = Mapping[str, Any]

MARK = "grpo_dist_mark"  # what a template may take for a name or a text, and no conversation has
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def tool_call(index: int, name: str) -> dict[str, Any]:
    """A call as a message of the assistant has it, with an id that every template takes: nine letters and digits."""
    return {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": {}}}


def rendered(tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any], *, goes_on: bool = True) -> str:
    """A conversation as the template writes it, up to where the policy goes on or, without that, to its end."""
    options = {"tokenize": False, "add_generation_prompt": goes_on}
    text = str(tokenizer.apply_chat_template(list(messages), **options, **variables))
    return text.encode(errors="replace").decode()  # JSON may escape half a character, which no tokenizer takes


def behind_turn(
    tokenizer: Any,
    messages: Sequence[Message],
    added: Sequence[Message],
    *,
    calls: Sequence[Message] = (),
    ends: Collection[str],
    is_ended: bool,
    template_kwargs: Mapping[str, Any],
) -> str:
    """Return what the chat template writes from the end of a turn of the policy to where the policy goes on.

    The turn, with `calls` of tools as `tool_call` has them, stands between `messages` and `added`. One of the tokens
    `ends` ends it; unless it `is_ended` by one already, the template's stands at the beginning.
    """
    text = rendered(tokenizer, continued(messages, [_turn(calls), *added]), template_kwargs)
    start = text.find(MARK)
    endings = [(text.index(end, start), end) for end in ends if start >= 0 and end in text[start:]]
    if not endings:
        shown = ", ".join(map(repr, sorted(ends)))
        raise ValueError(f"the model's chat template does not end a turn of the policy with an end token ({shown})")
    at, end = min(endings)
    return text[at + len(end) :] if is_ended else text[at:]


def opening_of_calls(tokenizer: Any, messages: Sequence[Message], template_kwargs: Mapping[str, Any]) -> str | None:
    """The first tag of a call of a tool, such as <tool_call>; None: calls begin without one."""
    call = {"role": "assistant", "content": "", "tool_calls": [tool_call(0, MARK)]}
    turns = [[*messages, turn] for turn in (call, _turn(()))]
    called, said = (rendered(tokenizer, turn, template_kwargs, goes_on=False) for turn in turns)
    front = called[: called.find(MARK)]
    tag = _TAG.search(front[len(os.path.commonprefix([front, said])) :])
    return tag[0] if tag else None


def _turn(calls: Sequence[Message]) -> Message:
    """A turn of the policy; the mark is the last thing in it."""
    if not calls:
        return {"role": "assistant", "content": MARK}
    named = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    named[-1]["function"]["arguments"] = {MARK: ""}
    return {"role": "assistant", "content": "", "tool_calls": named}
