"""The scorer of plans for a multi-agent system: a JSON list of steps, each `{"agent": ..., "task": ...}`.

    custom_reward_function.path=examples/planner/planner.py
    custom_reward_function.reward_kwargs='{agents: [search, code, writer], tag: plan}'

The response is compared with the plan in `ground_truth`, in parts from 0 to 1 that are also logged one by one:

    part    default weight
    json     0.1   the plan is a JSON list
    schema   0.1   share of its steps that have an agent and a task, both text
    agents   0.1   share of its steps whose agent is allowed
    order    0.3   the right agents in the right order: longest common subsequence of the agents / the longer plan
    tasks    0.3   what they are to do: token F1 of the tasks of steps with the same agent, in order / the longer plan
    steps    0.1   the right number of steps: the shorter plan / the longer plan

The score is the weighted sum: 1.0 for the ground truth itself. Token F1 is SQuAD's (https://arxiv.org/abs/1606.05250);
the pairing of steps is the one, in order, with the greatest sum. A plan without JSON earns 0 in every part.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_dist.errors import ConfigError
from grpo_dist.rewards.format import last_tag_content

WEIGHTS = {"json": 0.1, "schema": 0.1, "agents": 0.1, "order": 0.3, "tasks": 0.3, "steps": 0.1}
_FENCE = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)

Step = tuple[str, str]  # agent, task


def extract_plan(text: str, tag: str | None = None) -> list[Any] | None:
    """The JSON list of a response: in its last ```json fence, or from the first [ to the last ].

    Args:
        tag: only what stands in the last `<tag>...</tag>` is looked at; None: all.

    Returns:
        Its elements, whatever they are; None: no tag, or no JSON list.
    """
    inside = text if tag is None else last_tag_content(text, tag)
    if inside is None:
        return None
    fences = [code for language, code in _FENCE.findall(inside) if language.strip().lower() in ("", "json")]
    source = fences[-1] if fences else inside[inside.find("[") : inside.rfind("]") + 1]
    try:
        plan = json.loads(source)
    except (ValueError, RecursionError):
        return None
    return plan if isinstance(plan, list) else None


def token_f1(prediction: str, truth: str) -> float:
    """Harmonic mean of precision and recall of the words, as bags, in lower case; 0 where they share none."""
    words, expected = (Counter(re.findall(r"\w+", text.lower())) for text in (prediction, truth))
    common = (words & expected).total()
    return 2.0 * common / (words.total() + expected.total()) if common else 0.0


def best_alignment(plan: Sequence[Step], truth: Sequence[Step], similarity: Callable[[Step, Step], float]) -> float:
    """The greatest sum of similarities over pairs of steps in order, each step in one pair at most."""
    above = [0.0] * (len(truth) + 1)
    for step in plan:
        row = [0.0]
        for j, other in enumerate(truth):
            row.append(max(row[j], above[j + 1], above[j] + similarity(step, other)))
        above = row
    return above[-1]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    agents: Sequence[str] | None = None,
    tag: str | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Score the plan.

    Args:
        ground_truth: the right plan: a list of {"agent", "task"}, or that list as JSON text.
        extra_info: its "agents", if there, are the allowed agents of this row.
        agents: the allowed agents of all rows; None: the row's, or those of the ground truth.
        tag: the plan stands in the last `<tag>...</tag>`; None: anywhere.
        weights: of the parts; a part that is not named has none. None: the defaults above.

    Returns:
        score; the parts; and `acc`: 1 for the right agents in the right order with the tasks in the truth's words.

    Raises:
        ValueError: the ground truth is no plan.
    """
    truth = _checked_truth(ground_truth)
    allowed = set(agents or extra_info.get("agents") or (agent for agent, _ in truth))
    plan = extract_plan(solution_str, tag)
    parts = dict.fromkeys(WEIGHTS, 0.0) if plan is None else _parts(plan, truth, allowed)
    score = sum(weight * parts[name] for name, weight in (WEIGHTS if weights is None else weights).items())
    exact = all(math.isclose(parts[name], 1.0) for name in ("schema", "order", "tasks", "steps"))
    return {"score": score, **parts, "acc": float(exact)}


def check_reward_kwargs(
    *, agents: Sequence[str] | None = None, tag: str | None = None, weights: Mapping[str, float] | None = None
) -> None:
    """Check the arguments before a run starts.

    Raises:
        ConfigError: a weight belongs to no part or is no number, or `agents` is no list.
    """
    where = "custom_reward_function.reward_kwargs"
    if agents is not None and (isinstance(agents, str) or not agents):
        raise ConfigError(f"{where}.agents={agents!r}: must be a list of names")
    for name, weight in (weights or {}).items():
        if name not in WEIGHTS:
            raise ConfigError(f"{where}.weights has no part {name!r}; the parts are {', '.join(WEIGHTS)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"{where}.weights.{name}={weight!r}: must be a number")


def _parts(plan: list[Any], truth: list[Step], allowed: set[str]) -> dict[str, float]:
    steps = [step for step in map(_step, plan) if step is not None]
    longer = max(len(plan), len(truth))
    return {
        "json": 1.0,
        "schema": len(steps) / len(plan) if plan else 0.0,
        "agents": sum(agent in allowed for agent, _ in steps) / len(plan) if plan else 0.0,
        "order": best_alignment(steps, truth, lambda a, b: float(a[0] == b[0])) / longer,
        "tasks": best_alignment(steps, truth, lambda a, b: token_f1(a[1], b[1]) if a[0] == b[0] else 0.0) / longer,
        "steps": min(len(plan), len(truth)) / longer,
    }


def _step(value: Any) -> Step | None:
    """Agent and task of a step, stripped; None where one is missing, empty or no text."""
    if not isinstance(value, Mapping):
        return None
    agent, task = value.get("agent"), value.get("task")
    if not isinstance(agent, str) or not isinstance(task, str) or not agent.strip() or not task.strip():
        return None
    return agent.strip(), task.strip()


def _checked_truth(truth: Any) -> list[Step]:
    try:
        plan = json.loads(truth) if isinstance(truth, str) else truth
    except ValueError:
        plan = None
    steps = [_step(value) for value in plan] if isinstance(plan, list | tuple) else []
    read = [step for step in steps if step is not None]
    if not read or len(read) != len(steps):
        raise ValueError(f"ground_truth {truth!r} must be a list of {{'agent': ..., 'task': ...}}")
    return read
