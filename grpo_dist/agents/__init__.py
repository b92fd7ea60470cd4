"""Agent loops: code that runs an episode turn by turn, with the policy and whatever it is up against."""

from grpo_dist.agents.base import AgentLoop, SingleTurn, load_agent_loop
from grpo_dist.agents.episode import Episode, Row, Turn
from grpo_dist.agents.external import External
from grpo_dist.agents.tool_agent import ToolAgent

__all__ = ["AgentLoop", "Episode", "External", "Row", "SingleTurn", "ToolAgent", "Turn", "load_agent_loop"]
