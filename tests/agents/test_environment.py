"""Classes as environments: what the policy reads of them, what they pay, how they end, and which are refused."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.agents import Episode, Row, ToolAgent
from grpo_dist.agents.episode import EpisodeEnded
from grpo_dist.agents.tool_agent import EnvironmentClass
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import ConfigError
from tests.agents.speaking import MESSAGES, PARSER, Speaker, call, parts, play, tokenizer_of
from tests.messages import refuses

SOURCE = '''
import asyncio
import time

LOG = []

class Stairs:
    def reset(self, top, told=None, **columns):
        self.top, self.at, self.done = top, 0, False
        LOG.append(("reset", sorted(columns)))
        return f" The top is {top}." if told is None else told

    def up(self, steps: int) -> str:
        """Go up.

        Args:
            steps: How many.
        """
        time.sleep(0.05 * (steps == 1))
        self.at += steps
        LOG.append(("up", steps))
        self.done = self.at >= self.top
        return f"at {self.at}"

    async def look(self) -> str:
        """Look around."""
        await asyncio.sleep(0)
        LOG.append(("look", self.at))
        return f"you see {self.at}"

    def _hidden(self):
        return 1

    def get_reward(self):
        return {"score": self.at / self.top, "acc": float(self.at == self.top), "steps": self.at}

    def close(self):
        LOG.append(("close", self.at))

class Paid:
    def reset(self): ...

    def give(self, what: float) -> tuple[str, float]:
        """Give.

        Args:
            what: How much.
        """
        return "thanks", what

class Plain(Stairs):
    get_reward = None

class Odd(Stairs):
    def get_reward(self):
        return "much"

class Slow(Stairs):
    def up(self, steps: int) -> str:
        """Go up.

        Args:
            steps: How many, which takes for ever.
        """
        while not self.done:
            time.sleep(0.01)
        return "at last"

    async def look(self) -> str:
        """Look, and end what is slow."""
        self.done = True
        return "seen"

class NeverReady(Stairs):  # and close() fails for want of what reset() sets
    async def reset(self, **columns):
        await asyncio.sleep(1000)
'''
UP = '{{"steps": {}}}'
I_LOOK = {"role": "assistant", "content": "I look."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("environments")
    (place / "mine.py").write_text(SOURCE)
    (place / "parser.py").write_text(PARSER)
    return place


def options(folder: Path, name: str, **others: Any) -> dict[str, Any]:
    return {"environment": f"{folder}/mine.py:{name}", "tool_parser": f"{folder}/parser.py:parse", **others}


def loop_of(folder: Path, name: str, **others: Any) -> tuple[ToolAgent, list[Any]]:
    """The loop, and the log of its environments, empty."""
    loop = ToolAgent(**options(folder, name, **others))
    assert loop._environment is not None
    log: list[Any] = loop._environment.made_of.reset.__globals__["LOG"]
    log.clear()
    return loop, log


def turns(folder: Path, name: str, *said: str, row: dict[str, Any] | None = None, **limits: Any) -> Any:
    loop, log = loop_of(folder, name)
    variables = dict(ToolAgent.template_kwargs(options(folder, name)))
    episode = play(loop, Speaker(tokenizer_of(), *said), variables, extra_info={"top": 3, **(row or {})}, **limits)
    return episode, list(log)


def test_the_policy_reads_what_reset_says_and_calls_methods_until_the_environment_is_done(folder: Path) -> None:
    first = call("up", UP.format(1)) + call("look", "{}")
    row = {"color": "red", "name": "x"}
    episode, log = turns(folder, "Stairs", first, call("up", UP.format(2)), "not sampled", row=row)
    prompt = episode.tokenizer.decode(episode.prompt_ids)
    assert "What is 2+3? The top is 3.<|im_end|>" in prompt
    assert re.findall('"name": "(.*?)"', prompt) == ["look", "up"]
    said = parts(episode)
    assert [mask for mask, _ in said] == [1, 0, 1, 0]
    assert said[0] == (1, f"{first}<|im_end|>")
    assert said[1][1].index("at 1") < said[1][1].index("you see 1")
    reset = ("reset", ["color", "data_source", "name", "prompt"])
    assert log == [reset, ("up", 1), ("look", 1), ("up", 2), ("close", 3)], "look waits for the slow call before it"
    assert (episode.reward, episode.num_turns) == (1.0, 2)
    assert episode.metrics == {"tool_calls": 3, "tool_errors": 0, "acc": 1.0, "steps": 3}
    again = episode.next_attempt()
    assert (again.prompt_ids, again.messages) == (list(again.row.prompt_ids), MESSAGES)


def test_each_episode_has_its_own_environment(folder: Path) -> None:
    loop, log = loop_of(folder, "Stairs")
    tokenizer, sampling = tokenizer_of(), SamplingSettings(1, 1.0, 1.0, -1, 3000, 5)
    variables = dict(ToolAgent.template_kwargs(options(folder, "Stairs")))

    def episode(steps: int) -> Episode:
        row = Row("p1", [65] * 10, MESSAGES, extra_info={"top": 4})
        made = Episode(row, sampling, tokenizer=tokenizer, max_model_len=10_000, template_kwargs=variables)
        made.connect(Speaker(tokenizer, call("up", UP.format(steps)), "enough").sample)
        return made

    async def side_by_side() -> list[Episode]:
        made = [episode(steps) for steps in (1, 2, 3)]
        await asyncio.gather(*map(loop.run, made))
        return made

    assert [each.reward for each in asyncio.run(side_by_side())] == [0.25, 0.5, 0.75]
    assert sorted(entry for entry in log if entry[0] == "close") == [("close", 1), ("close", 2), ("close", 3)]


def test_an_episode_that_a_limit_ends_has_earned_what_it_has_until_then(folder: Path) -> None:
    loop, log = loop_of(folder, "Stairs")
    seen: list[Episode] = []

    class Watched(ToolAgent):
        async def run(self, episode: Episode) -> None:
            seen.append(episode)
            await loop.run(episode)

    watched = Watched(**options(folder, "Stairs"))
    with pytest.raises(EpisodeEnded):
        play(watched, Speaker(tokenizer_of(), call("up", UP.format(1))), {}, extra_info={"top": 2}, max_turns=1)
    assert seen[0].reward == 0.5
    assert log[-1] == ("close", 1)


def test_reset_may_tell_messages_or_nothing(folder: Path) -> None:
    for told, roles in (([], ["user"]), ([I_LOOK, {"role": "user", "content": "Go."}], ["user", "assistant", "user"])):
        episode, _ = turns(folder, "Stairs", "no", row={"told": told})
        assert [message["role"] for message in episode.messages] == roles
        assert episode.messages[0] == MESSAGES[0]


def test_environments_that_break_end_the_attempt(folder: Path) -> None:
    for name, row, error, told in (
        ("Stairs", {"told": 5}, TypeError, ["reset()", "5 (int)"]),
        ("Stairs", {"told": [I_LOOK]}, ValueError, ["assistant"]),
        ("Stairs", {"told": "x" * 20_000}, ValueError, ["10000", "data.max_prompt_length"]),
        ("Odd", {}, ValueError, ["get_reward()", "'much'"]),
        ("NeverReady", {}, TimeoutError, ["NeverReady.reset()", "0.2 s"]),
    ):
        loop, log = loop_of(folder, name, **({"tool_timeout_s": 0.2} if error is TimeoutError else {}))
        with refuses(error, *told):
            play(loop, Speaker(tokenizer_of(), "no"), {}, extra_info={"top": 3, **row})
        assert log[-1:] == ([] if name == "NeverReady" else [("close", 0)])


def test_a_method_that_is_given_up_holds_up_the_next_one_and_no_other_episode(folder: Path) -> None:
    """What it does to its object meanwhile, nothing else does; a method that is async goes on."""
    loop, _ = loop_of(folder, "Slow", tool_timeout_s=0.5)
    up = call("up", UP.format(1))
    episode = play(loop, Speaker(tokenizer_of(), up + up + call("look", "{}")), {}, extra_info={"top": 3})
    assert episode.metrics["tool_errors"] == 2
    assert "seen" in parts(episode)[1][1]


def test_methods_may_pay_their_turns(folder: Path) -> None:
    give = call("give", '{"what": 0.5}')
    episode, _ = turns(folder, "Paid", give + give, call("give", '{"what": 2}'), "done")
    assert (episode.reward, episode.outcome()) == (None, 3.0)
    ends = [end - 1 for _, end, _ in episode.turns.spans]
    assert episode.turns.rewards == {ends[0]: 1.0, ends[1]: 2.0}
    assert "thanks" in parts(episode)[1][1]
    assert '"return"' not in episode.tokenizer.decode(episode.prompt_ids), "the policy is told nothing of it"
    assert turns(folder, "Paid", "nothing")[0].outcome() == 0.0


def test_who_scores_is_known_before_the_run(folder: Path) -> None:
    paying = {name: ToolAgent.rewards(options(folder, name)) for name in ("Stairs", "Paid", "Plain")}
    assert paying == {"Stairs": True, "Paid": True, "Plain": False}
    episode, _ = turns(folder, "Plain", "no")
    assert episode.outcome() is None


DOCUMENTED = "\n    def go(self, a: int) -> str:\n        '''Go.\n\n        Args:\n            a: A.\n        '''\n"
RESET = "\n    def reset(self): ...\n"


def test_classes_that_are_no_environments(tmp_path: Path) -> None:
    for source, told in (
        ("Game = 5", ["5 (int)"]),
        (f"class Game:{DOCUMENTED}", ["reset(self, **columns)"]),
        (f"class Game:{RESET}", ["public method"]),
        (f"class Game:{RESET}{DOCUMENTED}\n    def __init__(self, url): ...", ["without arguments"]),
        (f"class Game:{RESET}\n    def go(self, a): ...", ["Game.go", "Args:"]),
        (f"class Game:{RESET}\n    def go(self, *a: int): ...", ["Game.go", "'a'"]),
    ):
        (tmp_path / "mine.py").write_text(source)
        with refuses(ConfigError, "agent_kwargs.environment", f"{tmp_path}/mine.py:Game", *told):
            EnvironmentClass(f"{tmp_path}/mine.py:Game", 1.0)


def test_names_are_those_of_tools_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tools.py").write_text("def look():\n    'Look.'\n\n\ndef listen():\n    'Listen.'\n")
    monkeypatch.chdir(folder)
    both = options(folder, "Stairs", tools=["tools.py:listen"]) | {"environment": "mine.py:Stairs"}
    assert [each["function"]["name"] for each in ToolAgent.template_kwargs(both)["tools"]] == ["listen", "look", "up"]
    whole = {"environment": f"{folder}/mine.py:Stairs", "tools": [f"{folder}/tools.py:listen"]}
    assert ToolAgent.resolved(both) == both | whole
    with refuses(ConfigError, "agent_kwargs.environment", "'look'", "agent_kwargs.tools"):
        ToolAgent.resolved(both | {"tools": ["tools.py:look"]})
    with refuses(ConfigError, "agent_kwargs.tools", "agent_kwargs.environment"):
        ToolAgent.resolved({"tool_parser": "hermes"})
