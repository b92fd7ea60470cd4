"""The planner's team (examples/planner) as a tool: the policy asks one agent after the other; it writes no plan.

python examples/tools/agents.py agents data/tools/agents                writes train.jsonl and validation.jsonl
custom_reward_function.path=examples/tools/agents.py                    the scorer
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.append(str(Path(__file__).parents[1] / "planner"))

import planner
from planner_rows import SIZES, as_steps, draw_requests

ROWS = {"train": 2000, "validation": 100}
SYSTEM = "You lead a team. Have the agents do what is asked for, step by step, in the order in which it has to be done."
CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def ask(agent: Literal["search", "code", "writer", "translator", "reviewer"], task: str) -> str:
    """Have an agent do one step.

    Args:
        agent: search looks facts up, code computes and draws charts, writer writes texts, translator translates them,
            reviewer checks the work of others.
        task: What to do, in the words of the request.
    """
    return f"The agent {agent} is done: {task}"


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float]:
    """The calls of a response, scored as a plan."""
    steps = []
    for text in CALL.findall(solution_str):
        try:
            steps.append(json.loads(text)["arguments"])
        except (ValueError, KeyError, TypeError):
            steps.append(None)
    return planner.compute_score(data_source, json.dumps(steps), ground_truth, extra_info)


def write_rows(folder: Path) -> None:
    """Write requests whose right plan is known; none stands in both files."""
    requests = iter(draw_requests(sum(ROWS.values()), SIZES["full"], seed=1).items())
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in ROWS.items():
        with (folder / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                plan, request = next(requests)
                messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request}]
                row = {"prompt": messages, "answer": as_steps(plan), "data_source": "agents"}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_rows(Path(sys.argv[2]))
