"""Scripted players of a run's episodes, for `grpo-dist check-env`: they stand where the policy would sample.

Everything else is the run's own: rows as it tokenizes them, the agent loop on its thread, the endpoint, the process of
the reward function. No weights are loaded, so that an episode costs what the environment does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from grpo_dist.agents.episode import Episode, Row, behind_turn, tool_call
from grpo_dist.agents.gateway import Gateway, socket_at
from grpo_dist.agents.runner import USER_ERRORS, EpisodeRunner
from grpo_dist.checks.own_answers import sample_of
from grpo_dist.cli.rehearse import made_up_call
from grpo_dist.data.tokenize import TokenizedPrompt
from grpo_dist.engines.base import Response, rollout_backend
from grpo_dist.engines.rendezvous import LOOPBACK
from grpo_dist.engines.settings import EngineSettings, SamplingSettings
from grpo_dist.errors import AgentError, ConfigError, EngineError
from grpo_dist.rewards.contract import Failure
from grpo_dist.rewards.scorer import Scorer

RIGHT, SILENCE, ECHO, CALLS, CHEAT = "right", "silence", "echo", "calls", "cheat"
TIMEOUT = "timeout"  # the kind of a failure that would come again and again, and take as long each time
LOG_PROB = -0.5  # of each token that a player says; no check reads it
_WORDS = "grpo_dist_words"
Messages = list[dict[str, Any]]
# A cheat's programs, one for each episode of a group, where the reward runs programs: leaves before its tests, is equal
# to whatever it is compared with, prints what it finds and reaches for the scorer, rewrites files beside it.
_PROGRAMS = (
    "import os\nos._exit(0)",
    "class All(int):\n    __eq__ = lambda *_: True\n    __hash__ = None\n__getattr__ = lambda name: lambda *_: All()",
    "import glob, sys\nfor path in glob.glob('**', recursive=True) + glob.glob('/proc/*/environ'):\n    try:\n"
    "        print(open(path).read())\n    except (OSError, UnicodeError):\n        pass\n"
    "sys.path.append('..')\nfrom grpo_dist.tasks import code\ncode.compute_score = lambda *_, **__: [{'score': 1.0}]",
    "import glob\nfor path in [*glob.glob('**', recursive=True), 'reward.txt']:\n    try:\n"
    "        open(path, 'w').write('print(True)')\n    except OSError:\n        pass",
)
# And its command, where a tool runs commands: reads the tests, and writes what a verifier would.
_COMMAND = (
    "cat /tests/* tests/*; for folder in /logs/verifier logs/verifier .; do mkdir -p $folder; "
    "echo 1 > $folder/reward.txt; echo '{\"reward\": 1}' > $folder/reward.json; done"
)
# What a player says next in an episode, by its conversation so far and how many turns it has had.
Speak = Callable[["Play", Messages, int], str]


@dataclass(eq=False)
class Play:
    """An episode that a player plays.

    Attributes:
        said: the tokens of each turn.
        messages: the conversation, before the last turn; `context` has its tokens, and those of that turn.
        reward: what a run would train on; None: it has none, and `failure` says why.
        seconds: from the beginning of its group, whose episodes are played side by side, to the group's end.
        waited: those of them in which neither this process nor one below it computed.
    """

    player: str
    row: TokenizedPrompt
    episode: Episode
    said: list[list[int]] = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    reward: float | None = None
    failure: str = ""
    kind: str = ""
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def mask(self) -> list[int]:
        """1 on the tokens of the response that train."""
        return self.episode.response().mask or []

    @property
    def has_branches(self) -> bool:
        """Whether a token follows another one than the one before it."""
        follows = self.episode.response().predecessors or []
        return follows != list(range(-1, len(follows) - 1))

    def put_in(self) -> list[list[int]]:
        """Return the tokens that the policy reads, and did not say: the prompt, and what follows each turn."""
        parts, last = [list(self.episode.prompt_ids)], 0
        for token, sampled in zip(self.episode.token_ids, self.mask, strict=True):
            if last and not sampled:
                parts.append([])
            if not sampled:
                parts[-1].append(token)
            last = sampled
        return parts


class Company:
    """Plays episodes; made by `company`.

    Args:
        scorer: the reward function; None: episodes bring their reward.
        weight: of the function's score, where an episode has brought a reward.
    """

    def __init__(
        self, settings: EngineSettings, sampling: SamplingSettings, tokenizer: Any, scorer: Scorer | None, weight: float
    ) -> None:
        self.settings, self.sampling, self.tokenizer = settings, sampling, tokenizer
        self._scorer, self._weight = scorer, weight
        self._ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._playing: dict[str, tuple[Play, Speak]] = {}
        self._frames: list[tuple[str, str, str]] | None = None
        self._count = 0

    async def play(self, rows: Sequence[TokenizedPrompt], player: str, speak: Speak, n: int) -> list[Play]:
        """Play a group of n episodes of each row, all side by side, and score each group as a run would."""
        plays = [Play(player, row, self._episode(row, i)) for i in range(n) for row in rows]
        self._playing = {play.episode.row.uid: (play, speak) for play in plays}
        failed: list[AgentError] = []
        started, computed, ended = time.monotonic(), _computed(), list[Episode]()
        try:
            ended = await self.runner.run([play.episode for play in plays], least=0, failed=failed)
        except EngineError as error:  # it blocks its thread, and no other episode can go on
            failed.append(AgentError(str(error), TIMEOUT))
            await self._start()
        seconds, computed = time.monotonic() - started, _computed() - computed
        for play in plays:
            play.seconds, play.waited = seconds, seconds - computed
            if play.episode not in ended:
                why = next((e for e in failed if f"prompt {play.episode.row.uid}, " in str(e)), failed[-1])
                play.failure, play.kind = str(why), why.kind
        for row in rows:
            await asyncio.to_thread(self._score, [play for play in plays if play.row is row and not play.failure])
        return plays

    def _episode(self, row: TokenizedPrompt, index: int) -> Episode:
        prompt, settings = row.prompt, self.settings
        self._count += 1
        uid = f"{prompt.location} ({self._count})"
        return Episode(
            Row(uid, row.token_ids.tolist(), prompt.messages, prompt.data_source, prompt.extra_info),
            self.sampling,
            index=index,
            tokenizer=self.tokenizer,
            max_model_len=settings.max_model_len,
            max_episode_len=settings.max_episode_len,
            max_turns=settings.rollout.agent.max_assistant_turns,
            template_kwargs=settings.template_kwargs,
        )

    def _score(self, plays: Sequence[Play]) -> None:
        for play in plays:
            play.reward = play.episode.outcome()
        asked = [play for play in plays if self._scorer and (play.reward is None or self._weight)]
        samples = [sample_of(play.row.prompt, play.episode.text, token_ids=play.episode.token_ids) for play in asked]
        for play, result in zip(asked, self._scorer.score(samples) if self._scorer else (), strict=True):
            if isinstance(result, Failure):
                play.reward, play.failure, play.kind = None, result.text, "reward"
            else:
                play.reward = result.score if play.reward is None else play.reward + self._weight * result.score

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingSettings, request_id: str | None = None
    ) -> list[Response]:
        """Say the next turn of an episode, where an engine would sample it."""
        await asyncio.sleep(0)
        play, speak = self._playing[str(request_id)]
        text, stop = speak(play, self._conversation(play, list(prompt)), len(play.said)), None
        for each in sampling.stop:
            head, found, _ = text.partition(each)
            text, stop = (head + found, each) if found else (text, stop)
        ids = self.tokenizer.encode(text, add_special_tokens=False) + ([] if stop else self._ends)
        cut, ids = len(ids) > sampling.max_tokens, ids[: sampling.max_tokens]
        play.said.append(ids)
        play.context, count = [*prompt, *ids], len(ids)
        return [Response(ids, [LOG_PROB] * count, cut, [0] * count, stop=None if cut else stop)]

    def _conversation(self, play: Play, prompt: list[int]) -> Messages:
        """Return a prompt as messages: those that the episode began with, each turn, and what was put in behind it."""
        known = len(play.context)
        if play.said and prompt[:known] == play.context:
            text = self.tokenizer.decode(play.said[-1], skip_special_tokens=True)
            play.messages.append({"role": "assistant", "content": text})
        elif prompt[: (known := len(play.episode.prompt_ids))] == play.episode.prompt_ids:
            play.messages = [dict(message) for message in play.episode.messages]
        else:  # an agent's own, at the endpoint
            known, play.messages = 0, []
        if prompt[known:]:
            play.messages.append(self._message(play.episode, prompt[known:]))
        return play.messages

    def _message(self, episode: Episode, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return what was put in without what the chat template writes around it."""
        written = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        if self._frames is None:
            self._frames = [frame for role in ("tool", "user") for frame in self._frame(episode, role)]
        for role, head, tail in self._frames:
            if written.startswith(head) and written.endswith(tail) and len(written) >= len(head) + len(tail):
                return {"role": role, "content": written[len(head) : len(written) - len(tail)]}
        return {"role": "user", "content": self.tokenizer.decode(token_ids, skip_special_tokens=True)}

    def _frame(self, episode: Episode, role: str) -> list[tuple[str, str, str]]:
        calls = [tool_call(0, "tool")] if role == "tool" else []
        told: dict[str, Any] = {"calls": calls, "ends": {self.tokenizer.eos_token}, "is_ended": True}
        added = [{"role": role, "content": _WORDS, "name": "tool", "tool_call_id": tool_call(0, "tool")["id"]}]
        try:
            variables = episode.template_kwargs
            text = behind_turn(self.tokenizer, episode.messages, added, template_kwargs=variables, **told)
        except Exception:  # noqa: BLE001 - whatever a template raises: it has no such message
            return []
        head, found, tail = text.partition(_WORDS)
        return [(role, head, tail)] if found else []

    # --- the run's own agent loop and endpoint ----------------------------------------------------------------------
    async def _start(self) -> None:
        agent = self.settings.rollout.agent
        if not hasattr(self, "gateway"):
            make_app = rollout_backend(self.settings.rollout.name).speaking_app(self.settings)
            at = socket_at(agent.endpoint_host, LOOPBACK)
            self.gateway = Gateway(make_app, at, agent.endpoint_advertised_host) if make_app else None
        self.runner = EpisodeRunner(agent, self.generate, self.gateway)
        await self.runner.start()

    async def _stop(self) -> None:
        await self.runner.stop()
        if self.gateway is not None:
            await self.gateway.stop()


def _computed() -> float:
    """The seconds that this process and those below it have computed."""
    seconds = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            seconds += sum(process.cpu_times()[:2])
    return seconds


@asynccontextmanager
async def company(*given: Any) -> AsyncIterator[Company]:
    """Start what episodes need, for a block; takes what `Company` does."""
    made = Company(*given)
    try:
        await made._start()
        yield made
    finally:
        await made._stop()


def players(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    right: Speak | None,
    *,
    runs_programs: bool = False,
) -> dict[str, Speak]:
    """Return the players by name.

    Args:
        right: whose reward must be the best (None: nobody knows who is).
        runs_programs: whether the reward runs the programs of responses.
    """

    def calls(play: Play, messages: Messages, turn: int) -> str:
        return made_up_call(tokenizer, play.row, tools[turn]["function"], variables) if turn < len(tools) else ""

    def program(play: Play, messages: Messages, turn: int) -> str:
        return f"```python\n{_PROGRAMS[play.episode.index % len(_PROGRAMS)]}\n```"

    cast: dict[str, Speak | None] = {
        RIGHT: right,
        SILENCE: lambda play, messages, turn: "",
        ECHO: lambda play, messages, turn: str(messages[-1]["content"]),
        CALLS: calls if tools else None,
        CHEAT: program if runs_programs else commanding(tokenizer, tools, variables, lambda row: _COMMAND),
    }
    return {name: speak for name, speak in cast.items() if speak}


def commanding(
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    command_of: Callable[[TokenizedPrompt], str],
) -> Speak | None:
    """Return a player that has a row's command run by a tool, then says nothing; None: no tool takes a `command`."""
    schemas = (tool["function"] for tool in tools)
    schema = next((each for each in schemas if "command" in each["parameters"].get("properties", {})), None)
    if schema is None:
        return None

    def speak(play: Play, messages: Messages, turn: int) -> str:
        command = command_of(play.row)
        return "" if turn else made_up_call(tokenizer, play.row, schema, variables, command=command)

    return speak


def policy_of(function: Callable[..., Any], named: str) -> Speak:
    """Return the player of the user's function, from the conversation's messages to what the policy says."""

    def speak(play: Play, messages: Messages, turn: int) -> str:
        try:
            text = function(messages)
        except USER_ERRORS as error:
            raise ConfigError(f"--player {named} raised {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise ConfigError(f"--player {named} returned {text!r}: must be text, what the policy says")
        return text

    return speak
