"""What counts as an agent loop, and how it is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_dist.agents import AgentLoop, SingleTurn, load_agent_loop
from grpo_dist.agents.base import AGENT_LOOP
from grpo_dist.errors import ConfigError
from grpo_dist.plugins.names import AGENT_LOOPS
from tests.messages import refuses

LOOPS = """
from grpo_dist.agents import AgentLoop

class Good(AgentLoop):
    def __init__(self, *, depth=2):
        self.depth = depth

    async def run(self, episode):
        await episode.generate()

class NotAsync(AgentLoop):
    def run(self, episode): ...

class NoEpisode(AgentLoop):
    async def run(self): ...

class NoRun(AgentLoop): ...

class Other: ...
"""


@pytest.fixture
def loops(tmp_path: Path) -> str:
    (tmp_path / "loops.py").write_text(LOOPS)
    return f"{tmp_path}/loops.py"


def test_the_config_knows_the_built_in_names() -> None:
    assert sorted(AGENT_LOOP.names()) == sorted(AGENT_LOOPS)
    assert load_agent_loop("single_turn_agent", {}) is SingleTurn


def test_a_class_by_file(loops: str) -> None:
    found = load_agent_loop(f"{loops}:Good", {"depth": 3})
    assert issubclass(found, AgentLoop)
    assert found(depth=3).depth == 3  # type: ignore[call-arg, attr-defined]


@pytest.mark.parametrize(
    ("name", "kwargs", "parts"),
    [
        ("Other", {}, ["class", "grpo_dist.agents.AgentLoop"]),
        ("NoRun", {}, ["NoRun", "`async def run(self, episode)`"]),
        ("NotAsync", {}, ["NotAsync", "`async def run(self, episode)`"]),
        ("NoEpisode", {}, ["NoEpisode", "`async def run(self, episode)`"]),
        ("Goood", {}, ["'Good'"]),
        ("Good", {"api_key": "SECRET123"}, ["agent_kwargs={'api_key': '***'}", "Good:", " 'api_key'"]),
        ("Good", {"width": 3}, ["agent_kwargs={'width': 3}", "Good:", " 'width'"]),
    ],
)
def test_what_is_no_agent_loop(loops: str, name: str, kwargs: dict, parts: list[str]) -> None:
    with refuses(ConfigError, *parts):
        load_agent_loop(f"{loops}:{name}", kwargs)


def test_the_built_in_one_takes_no_arguments() -> None:
    with refuses(ConfigError, "agent_kwargs={'depth': 1}", "SingleTurn"):
        load_agent_loop("single_turn_agent", {"depth": 1})
