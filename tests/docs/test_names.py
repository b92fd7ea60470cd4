"""What a config can name is in the pages: estimators, losses, scorers, loops, values of keys. The glossary's terms."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from grpo_dist import errors
from grpo_dist.agents.base import AGENT_LOOP
from grpo_dist.algorithms.advantage import ADVANTAGE
from grpo_dist.algorithms.kl import KL
from grpo_dist.algorithms.policy_loss import POLICY_LOSS
from grpo_dist.cli.entry import ENTRIES
from grpo_dist.config.command import all_keys
from grpo_dist.config.field_types import Section
from grpo_dist.config.schema_health import RULES
from grpo_dist.plan.commands import COMMANDS, GRPO
from grpo_dist.plugins.names import LOGGERS, LOSS_AGG_MODES, ROLLOUT_ENGINES, WeightTransport
from grpo_dist.rewards.load import SCORERS

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| \[([^]]+)\]\(([^)]+)\) \| (.+) \| ?(.*) \|$")
VERLS_KEYS = {line.split("\t")[0] for line in (ROOT / "tests/golden/verl_grpo_keys.tsv").read_text().splitlines()}
SCORING = [
    path.parent.name if path.name == "task.py" else path.stem
    for folder in ("rewards", "tasks")
    for path in sorted((ROOT / "grpo_dist" / folder).rglob("*.py"))
    if "\ndef compute_score(" in path.read_text()
]


def lacking(page: str, names: Iterable[str]) -> list[str]:
    """The names that stand in a page neither as code nor as a cell; those that end in / begin a name."""
    return [name for name in names if not re.search(rf"`{re.escape(name)}(`|(?<=/)\w)|\| {re.escape(name)} \|", page)]


def choices(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The texts that keys may have, where they are a fixed set."""
    for name, field in section.model_fields.items():
        for kind in parts(field.annotation):
            if get_origin(kind) is Literal:
                yield from ((prefix + name, value) for value in get_args(kind) if isinstance(value, str))
            elif isinstance(kind, type) and issubclass(kind, Section):
                yield from choices(kind, f"{prefix}{name}.")


def parts(kind: Any) -> Iterator[Any]:
    yield kind
    for part in () if get_origin(kind) is Literal else get_args(kind):
        yield from parts(part)


GROUPS = [group for command in COMMANDS.values() for group in command.group_options().items()]
OPTIONS = [f"{group}={option}" for group, options in GROUPS for option in options]
NAMES = {
    "algorithms": (ADVANTAGE.names(), POLICY_LOSS.names(), KL.names(), LOSS_AGG_MODES, GRPO.group_options()["recipe"]),
    "environments": (AGENT_LOOP.names(),),
    "rewards": (SCORING, SCORERS),
    "metrics": (set(LOGGERS) - {"console", "jsonl"}, RULES),  # these two are always on
    "architecture": (get_args(WeightTransport),),
    "config": (ROLLOUT_ENGINES, OPTIONS),
}


@pytest.mark.parametrize("page", NAMES)
def test_every_name_is_explained(page: str) -> None:
    assert all(NAMES[page])
    names = [name for kind in NAMES[page] for name in kind]
    # Where an option is the default, that is said behind it.
    text = (ROOT / "docs" / f"{page}.md").read_text().replace("` (used where none is chosen)", "`")
    assert lacking(text, names) == []


def test_every_command_is_on_its_page() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in ENTRIES if f"`grpo-dist {name}" not in page] == []


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_choice_of_a_key_is_explained(command: Any) -> None:
    """In its comment or, of the health rules, in docs/metrics.md."""
    found = dict.fromkeys([*choices(command.schema), *(("trainer.logger", name) for name in LOGGERS)])
    keys = all_keys(command)
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    assert ("trainer.resume_mode", "resume_path") in found
    for key, value in found:
        in_comment = re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", keys[key].comment)
        assert in_comment or (key.startswith("trainer.health.") and not lacking(metrics, [value])), (key, value)


# --- skills for code agents ----------------------------------------------------------------------------------------
SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_a_skill_has_the_header_by_which_agents_find_it(skill: Path) -> None:
    before, header, text = skill.read_text().split("---\n", 2)
    found = yaml.safe_load(header)
    assert (before, found.keys(), bool(text.strip())) == ("", {"name", "description"}, True)
    assert found["name"] == skill.parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", found["name"])
    assert (len(found["name"]) <= 64, 0 < len(found["description"]) <= 1024) == (True, True)


def test_the_skill_of_a_run_knows_every_alarm_and_exit_code() -> None:
    (text,) = [skill.read_text() for skill in SKILLS if skill.parent.name == "train-and-debug"]
    tables = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    codes = {value.exit_code for value in vars(errors).values() if hasattr(value, "exit_code")}
    cells = {cell.strip(" `") for first in tables for cell in first.split(",")}
    assert ({str(code) for code in codes | {0}} | RULES.keys()) - cells == set()
    assert len(codes) > 4
    assert [cell for cell in cells if cell.isdecimal() and int(cell) not in codes | {0}] == []
    named = {cell for cell in cells if re.fullmatch(r"[a-z_]{2,}", cell)} - {"rule"}
    assert named == RULES.keys(), "no rule of the past"


# --- the glossary --------------------------------------------------------------------------------------------------
def rows() -> list[tuple[str, ...]]:
    lines = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("|")][2:]
    found = [match.groups() for match in map(ROW.match, lines) if match]
    assert len(found) == len(lines)
    return found


def test_terms_are_in_order_and_what_verl_has_is_not_called_our_own() -> None:
    terms = [term.casefold() for term, *_ in rows()]
    assert terms == sorted(set(terms))
    assert {*LOSS_AGG_MODES, "k1", "k2", "k3", "advantage", "group", "staleness", "weight version"} <= set(terms)
    assert [term for term, _, meaning, _ in rows() if len(re.findall(r"[.](?= |$)", meaning)) not in (1, 2)] == []
    own = [key for _, _, _, keys in rows() if keys.startswith("*own*") for key in re.findall(r"`([\w.]+)`", keys)]
    assert len(own) > 5
    assert set(own) & VERLS_KEYS == set()
