"""Generated requests for the planner: which agents are to do what, in which order.

    python examples/planner/planner_rows.py --local_save_dir data/planner [--size small]

A request names two to four steps in one of four forms, two of which name them in another order than they are done in:

    Before you write a short report, look up the area of Peru, then plot the growth rate.

    <plan>[{"agent": "search", "task": "look up the area of Peru"}, {"agent": "code", "task": "plot the growth rate"},
    {"agent": "writer", "task": "write a short report"}]</plan>

The verb says which agent it is for, and the task is the text of the step, so that the right plan is exact. The
scorer is planner.py's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_dist.data.conversion import Row, Written, check_sizes, verl_row, write_splits
from grpo_dist.errors import DataError, GrpoDistError

TAG = "plan"
TRIES_PER_REQUEST = 50

Plan = tuple[tuple[str, str], ...]  # agent and task of each step


@dataclass(frozen=True)
class Agent:
    """The things that an agent is asked for: every verb with every object."""

    duty: str
    verbs: tuple[str, ...]
    objects: tuple[str, ...]


@dataclass(frozen=True)
class Size:
    """The numbers that say how large requests are.

    Attributes:
        agents: by name.
        steps: how many steps a request may have.
        system: the system message; `{agents}` stands for the agents.
        separators: of the JSON in answers, between items and behind keys.
    """

    agents: Mapping[str, Agent]
    steps: Sequence[int]
    system: str
    separators: tuple[str, str]


_GOODS = (
    *("tea", "rice", "salt", "wood", "coal", "silk", "corn", "wool", "iron", "wine", "milk", "gold"),
    *("beer", "clay", "dye", "fish", "glue", "hemp", "ink", "jade", "lamp", "oats", "rope", "yarn"),
)
SIZES = {
    "full": Size(
        agents={
            "search": Agent(
                "looks facts up",
                ("find", "look up", "search for"),
                (
                    *(
                        f"the {what} of {place}"
                        for what in ("area", "population")
                        for place in ("Peru", "Kenya", "Japan")
                    ),
                    *("the latest bus timetable", "the opening hours of the museum", "three reviews of the camera"),
                    *("the price of copper since 1990", "last year's sales figures", "the rules of curling"),
                ),
            ),
            "code": Agent(
                "computes and draws charts",
                ("compute", "plot", "simulate"),
                (
                    *("the growth rate", "the average waiting time", "the distance per day", "the yearly costs"),
                    *("the share of each region", "the demand for next month", "the temperature curve"),
                    *("the odds of three sixes in a row", "a queue with two counters", "the interest over ten years"),
                ),
            ),
            "writer": Agent(
                "writes texts",
                ("write", "draft", "compose"),
                (
                    *("a short report", "a letter to the mayor", "a summary for beginners", "a press release"),
                    *("an invitation to the workshop", "a poem about rivers", "the opening speech", "a product text"),
                    *("a note of thanks to the team", "five questions for the interview"),
                ),
            ),
            "translator": Agent(
                "translates texts",
                ("translate", "render"),
                tuple(
                    f"{what} into {language}"
                    for what in ("the abstract", "the user manual", "the menu", "our website")
                    for language in ("French", "Hindi", "Polish")
                ),
            ),
            "reviewer": Agent(
                "checks the work of others",
                ("check", "proofread", "review"),
                (
                    *("all names and dates", "the contract", "the list of sources", "the figures in the appendix"),
                    *("the slides", "the safety instructions", "the tone of the answer", "the final draft"),
                ),
            ),
        },
        steps=(2, 3, 4),
        system="You plan for a team of agents: {agents}. Divide the request into steps, each for one agent, in the "
        "order in which they have to be done. The task of a step is in the words of the request. Answer with a JSON "
        'list in <plan> </plan> tags, and nothing else, for example <plan>[{{"agent": "search", "task": "find the '
        'area of Chile"}}, {{"agent": "writer", "task": "write a quiz"}}]</plan>.',
        separators=(", ", ": "),
    ),
    "small": Size(
        agents={
            "search": Agent("finds", ("find", "get"), _GOODS),
            "code": Agent("counts", ("sum", "plot"), _GOODS),
            "writer": Agent("writes", ("note", "draft"), _GOODS),
        },
        steps=(2,),
        system="Plan in JSON.",
        separators=(",", ":"),
    ),
}
# Forms of a request: texts of the steps, in the order in which they are done, to a sentence without its full stop.
FORMS: tuple[Callable[[Sequence[str]], str], ...] = (
    lambda steps: ", then ".join(steps),
    lambda steps: f"after you {steps[0]}, {', then '.join(steps[1:])}",
    lambda steps: f"before you {steps[-1]}, {', then '.join(steps[:-1])}",
    lambda steps: f"{', then '.join(steps[1:])}, but first {steps[0]}",
)


def draw_plan(rng: random.Random, size: Size) -> Plan:
    """Random steps; no agent comes twice in a row."""
    plan: list[tuple[str, str]] = []
    for _ in range(rng.choice(size.steps)):
        name = rng.choice([name for name in size.agents if not plan or name != plan[-1][0]])
        agent = size.agents[name]
        plan.append((name, f"{rng.choice(agent.verbs)} {rng.choice(agent.objects)}"))
    return tuple(plan)


def draw_requests(count: int, size: Size, seed: int) -> dict[Plan, str]:
    """Requests by their plans, which are all different."""
    rng = random.Random(seed)
    sentences: dict[Plan, str] = {}
    for _ in range(TRIES_PER_REQUEST * count):
        if len(sentences) == count:
            break
        plan = draw_plan(rng, size)
        sentence = rng.choice(FORMS)([task for _, task in plan])
        sentences.setdefault(plan, f"{sentence[0].upper()}{sentence[1:]}.")
    if len(sentences) < count:
        raise DataError(
            f"--train_size, --test_size and --sft_size ask for {count:,} different requests; "
            f"only {len(sentences):,} were found"
        )
    return sentences


def make_prompt(request: str, size: Size) -> list[dict[str, str]]:
    """The messages of a request."""
    agents = ", ".join(f"{name} ({agent.duty})" for name, agent in size.agents.items())
    return [{"role": "system", "content": size.system.format(agents=agents)}, {"role": "user", "content": request}]


def make_row(plan: Plan, request: str, *, size: Size, split: str, index: int) -> Row:
    """One request in verl's schema; the ground truth is the plan, a list of {"agent", "task"}."""
    extra = {"split": split, "index": index, "agents": list(size.agents)}
    return verl_row("planner", make_prompt(request, size), as_steps(plan), ability="planning", **extra)


def make_answer(plan: Plan, request: str, *, size: Size) -> Row:
    """One request with this plan as its answer, for supervised fine-tuning."""
    return {
        "prompt": make_prompt(request, size),
        "completion": f"<{TAG}>{json.dumps(as_steps(plan), separators=size.separators)}</{TAG}>",
    }


def as_named(plan: Plan, request: str) -> Plan:
    """The steps in the order in which the request names them, which a hasty planner takes for that of the work."""
    return tuple(sorted(plan, key=lambda step: request.lower().index(step[1].lower())))


def as_steps(plan: Plan) -> list[dict[str, str]]:
    """The plan as a model writes it in JSON."""
    return [{"agent": agent, "task": task} for agent, task in plan]


def prepare(
    local_save_dir: str, *, train_size: int, test_size: int, sft_size: int, hasty_share: float, size: str, seed: int
) -> Written:
    """Write train.parquet, test.parquet and sft.parquet (requests with answers); no plan stands in two of them.

    Args:
        hasty_share: share of its answers whose steps stand as the request names them, in the right order or not.
        seed: the same seed makes the same files, everywhere.
    """
    numbers = {"test": test_size, "train": train_size, "sft": sft_size}
    check_sizes(**{f"{split}_size": number for split, number in numbers.items()})
    if not 0.0 <= hasty_share <= 1.0:
        raise DataError(f"--hasty_share={hasty_share}: must be from 0 to 1")
    sizing, rng = SIZES[size], random.Random(seed)
    drawn = iter(draw_requests(sum(numbers.values()), sizing, seed).items())
    requests = {split: [next(drawn) for _ in range(number)] for split, number in numbers.items()}
    rows = {
        split: [make_row(*request, size=sizing, split=split, index=i) for i, request in enumerate(requests[split])]
        for split in ("train", "test")
    }
    rows["sft"] = [
        make_answer(as_named(plan, request) if rng.random() < hasty_share else plan, request, size=sizing)
        for plan, request in requests["sft"]
    ]
    return write_splits(rows, local_save_dir)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files. Returns the exit code: 0, or 2 for something the user can mend."""
    parser = argparse.ArgumentParser(description="Rows that ask for a plan of what several agents are to do.")
    parser.add_argument("--local_save_dir", required=True, help="folder to write to")
    parser.add_argument("--size", choices=SIZES, default="full", help="of the requests (%(default)s)")
    parser.add_argument("--train_size", type=int, default=8000, help="rows in train.parquet (%(default)s)")
    parser.add_argument("--test_size", type=int, default=200, help="rows in test.parquet (%(default)s)")
    parser.add_argument("--sft_size", type=int, default=2000, help="rows with answers, in sft.parquet (%(default)s)")
    hasty = "share of answers with steps in the order in which they are named (%(default)s)"
    parser.add_argument("--hasty_share", type=float, default=0.0, help=hasty)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other rows (%(default)s)")
    try:
        written = prepare(**vars(parser.parse_args(arguments)))
    except GrpoDistError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for path, num_rows in written.items():
        print(f"{path}: {num_rows:,} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
