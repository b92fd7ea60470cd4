"""What the house weighs: no figure rises above its row.

A landing that is over a row pays for it by what goes, or raises the row for an issue that names its share: its package
lines, and with each 100 of them at most 120 test lines and one file. A landing that is under a row lowers it.
"""

import ast
import re
from collections import Counter
from copy import deepcopy
from pathlib import Path

import grpo_dist
from tests.sources import parsed

PACKAGE = Path(grpo_dist.__file__).parent
KEYS = (
    *("defer_grad_sync", "enable_activation_offload", "entropy_coeff", "free_cache_engine", "kl_cov_ratio"),
    *("keep_best_metric", "lora_rank", "max_staleness", "nccl_timeout", "over_sample_rate", "partial_rollout"),
    "ulysses_sequence_parallel_size",
)
# Names that belong in one place -> where; what counts is how many other files have them in their code.
NAMES = {
    "the role critic": (r"\bcritic(?!/)", "nowhere"),
    "vllm outside engines/vllm": (r"(?i)vllm", "engines/vllm/"),
    "placement( and resolved_* outside plan": (r"\bplacement\(|\bresolved_\w+", "plan/"),
}
MOST = {
    "lines beside the rooms": 1505,
    "lines of agents": 2336,
    "lines of algorithms": 2858,
    "lines of assets": 544,
    "lines of checks": 994,
    "lines of cli": 3619,
    "lines of config": 3074,
    "lines of data": 2606,
    "lines of engines": 9564,
    "lines of plan": 3337,
    "lines of plugins": 400,
    "lines of protocol": 837,
    "lines of report": 747,
    "lines of rewards": 1699,
    "lines of workers": 2789,
    "lines of run": 561,
    "lines of runtime": 2321,
    "lines of sandbox": 612,
    "lines of tasks": 1473,
    "lines of tracking": 1547,
    "lines of trainer": 4270,
    "files": 253,
    "lines of tests": 53189,
    "files that name defer_grad_sync": 3,
    "files that name enable_activation_offload": 6,
    "files that name entropy_coeff": 6,
    "files that name free_cache_engine": 6,
    "files that name kl_cov_ratio": 2,
    "files that name keep_best_metric": 3,
    "files that name lora_rank": 6,
    "files that name max_staleness": 6,
    "files that name nccl_timeout": 3,
    "files that name over_sample_rate": 3,
    "files that name partial_rollout": 2,
    "files that name ulysses_sequence_parallel_size": 1,
    "files: the role critic": 8,
    "files: vllm outside engines/vllm": 3,
    "files: placement( and resolved_* outside plan": 0,
}


def code_alone(tree: ast.Module) -> str:
    """The code without docstrings and comments."""
    tree = deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body[:1] = [] if node.body[1:] else [ast.Pass()]
    return ast.unparse(tree)


def figures(package: Path) -> dict[str, int]:
    """Lines of each room of the package and of its tests, and in how many files a name stands."""
    texts = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    lines: Counter[str] = Counter()
    for name, text in texts.items():
        room, inside, _ = name.partition("/")
        lines[f"lines of {room}" if inside else "lines beside the rooms"] += text.count("\n")
    tests = sum(path.read_text().count("\n") for path in (package.parent / "tests").rglob("*.py"))
    files = {f"files that name {key}": sum(key in re.findall(r"\w+", text) for text in texts.values()) for key in KEYS}
    for what, (pattern, home) in NAMES.items():
        having = (name for name, text in texts.items() if re.search(pattern, text) and not name.startswith(home))
        files[f"files: {what}"] = sum(bool(re.search(pattern, code_alone(parsed(package / name)))) for name in having)
    return {**dict(sorted(lines.items())), "files": len(texts), "lines of tests": tests, **files}


def too_much(found: dict[str, int], most: dict[str, int]) -> list[str]:
    """What is above its row, or has none."""
    remedy = "pay for it in this landing, or name the issue and its share"
    over = {what: number for what, number in found.items() if number > most.get(what, -1)}
    return [f"{what}: {number}, at most {most.get(what, 'no row')}: {remedy}" for what, number in over.items()]


def test_no_figure_is_above_its_row() -> None:
    found = figures(PACKAGE)
    assert too_much(found, MOST) == []
    assert MOST.keys() == found.keys(), "a row of something that is no more"


def test_a_line_too_many_is_found(tmp_path: Path) -> None:
    (tmp_path / "package" / "room").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    source = '"""Of vllm and the critic."""\nlora_rank = 1  # critic\nvllm_plan = placement(lora_rank)\n'
    for name in ("room/a.py", "b.py"):
        (tmp_path / "package" / name).write_text(source)
    found = figures(tmp_path / "package")
    held = {"lines of room": 3, "lines beside the rooms": 3, "files": 2, "files that name lora_rank": 2}
    names = {"the role critic": 0, "vllm outside engines/vllm": 2, "placement( and resolved_* outside plan": 2}
    held |= {f"files: {what}": number for what, number in names.items()}
    assert {what: number for what, number in found.items() if number or what in held} == held
    (told,) = too_much(found, found | {"lines of room": 2})
    assert told.startswith("lines of room: 3, at most 2: pay for it in this landing, or name the issue")
    assert len(too_much(found, {})) == len(found)
