"""The import arrows of the package, and what importing a layer loads."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import grpo_dist
from grpo_dist.plan.commands import COMMANDS as PLAN_COMMANDS
from tests.sources import parsed
from tests.tiers import first

PACKAGE = Path(grpo_dist.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

PARTS = {"data", "rewards", "tracking", "engines"}
COMMANDS = ("main.main", "main.reward_model", "main.sft")
# Layer -> the layers it may import. A layer may always import itself.
BASE: dict[str, set[str]] = {
    "errors": set(),
    "plugins": {"errors"},
    "redact": set(),
    "terminal": set(),
    "supervisor": set(),
    "keeper": set(),
    "sandbox": {"errors", "supervisor"},
    "sizes": set(),
    "hosts": set(),
    "assets": {"errors"},
    "config": {"errors", "plugins", "sizes", "redact", "assets"},
    "algorithms": {"errors", "plugins"},
    "protocol": {"errors", "plugins", "algorithms"},
}
ABOVE: dict[str, set[str]] = {
    "data": set(),
    "rewards": set(),
    "engines": set(),
    "tracking": {"plan"},
    "agents": {"engines"},
    "tasks": {"data", "rewards"},
    "plan": {"engines"},
    "runtime": PARTS | {"plan"},
    "workers": PARTS | {"plan", "agents", "runtime"},
    "trainer": PARTS | {"plan", "agents", "runtime", "workers"},
    "checks": PARTS | {"plan", "agents", "runtime", "trainer"},
    "run": PARTS | {"plan", "runtime", "workers", "trainer", "checks"},
    "main": {"plan", "run", "cli"},
    "api": {"plan", "run", "main", "tracking", "trainer", "runtime", "cli"},
    "runs": {"plan", "tracking", "trainer"},
    "report": {"plan", "tracking", "trainer", "runs"},
    "cli": PARTS | {"plan", "agents", "runtime", "workers", "trainer", "checks", "run", "runs", "report"},
}
ARROWS = BASE | {layer: own | BASE.keys() for layer, own in ABOVE.items()} | {"__main__": {"cli"}}
MAY_USE_RAY = {"runtime", "workers", "trainer", "run"}
# Where Ray actors are made: once, in one file.
REMOTE_HOME = "runtime/group.py"


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(source: str | Path, module: str = "grpo_dist.some.module") -> set[str]:
    """Full dotted names of all imports: at the top, in functions and under TYPE_CHECKING; relative ones resolved."""
    names: set[str] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def violations(source: str | Path, layer: str, file: str = "module.py") -> list[str]:
    found = []
    for name in sorted(imported_names(source, f"grpo_dist.{layer}.module")):
        top, *rest = name.split(".")
        if top == "grpo_dist" and rest and rest[0] not in ARROWS[layer] | {layer}:
            found.append(f"{layer} imports {name}")
        if top == "ray" and layer not in MAY_USE_RAY:
            found.append(f"{layer} imports ray")
        if top == "vllm" and not file.startswith("engines/vllm/"):
            found.append(f"{file} imports vllm")
    return found


def count_remote(source: str | Path) -> int:
    """How often the source turns something into a Ray actor or task."""
    attributes = [ast.unparse(node) for node in ast.walk(parsed(source)) if isinstance(node, ast.Attribute)]
    return [*attributes, *imported_names(source)].count("ray.remote")


def test_modules_import_only_what_their_layer_may() -> None:
    root = PACKAGE / "__init__.py"
    names = {name for name in imported_names(root) if name.startswith("grpo_dist.")}
    assert names == {"grpo_dist.api", "grpo_dist.api.TrainingResult", "grpo_dist.api.train"}
    modules = [(path, layer_of(path), str(path.relative_to(PACKAGE))) for path in MODULES if path != root]
    assert [found for module in modules for found in violations(*module)] == []


def dotted(path: Path) -> str:
    return ".".join(("grpo_dist", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def test_no_two_modules_need_each_other() -> None:
    sources = {dotted(path): path for path in MODULES}
    imports = {module: imported_names(source, module) for module, source in sources.items()}
    # a name of a module, or of something in one
    needed = {
        module: {name if name in sources else name.rpartition(".")[0] for name in names} & sources.keys() - {module}
        for module, names in imports.items()
    }
    TopologicalSorter(needed).prepare()  # raises CycleError, which names the circle


def test_every_layer_of_the_design_exists() -> None:
    assert {layer_of(path) for path in MODULES} - {"__init__"} == set(ARROWS)


@pytest.mark.parametrize("folder", ["train", "vllm", "weights"])
def test_engines_know_nothing_of_each_other(folder: str) -> None:
    """Weights travel from one to the other in the terms of `weights`."""
    others = {"train", "vllm"} - {folder}
    for path in (PACKAGE / "engines" / folder).glob("*.py"):
        names = imported_names(path)
        assert not any(name.startswith(f"grpo_dist.engines.{other}.") for name in names for other in others), path.name


@pytest.mark.parametrize(
    ("source", "layer", "found"),
    [
        ("from grpo_dist.rewards import load", "data", ["data imports grpo_dist.rewards.load"]),
        ("from grpo_dist.tasks import gsm8k", "rewards", ["rewards imports grpo_dist.tasks.gsm8k"]),
        ("from grpo_dist import workers", "engines", ["engines imports grpo_dist.workers"]),
        ("def f():\n    import grpo_dist.run.run", "workers", ["workers imports grpo_dist.run.run"]),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from grpo_dist.config.schema import RunConfig",
            "algorithms",
            ["algorithms imports grpo_dist.config.schema.RunConfig"],
        ),
        ("from ..engines import settings", "rewards", ["rewards imports grpo_dist.engines.settings"]),
        ("from grpo_dist.protocol import Ragged", "config", ["config imports grpo_dist.protocol.Ragged"]),
        ("from ray.util import queue", "engines", ["engines imports ray"]),
        ("import vllm", "workers", ["module.py imports vllm"]),
        ("from grpo_dist.engines.settings import EngineSettings\nimport ray", "workers", []),
        ("from .loss import f\nimport torch", "algorithms", []),
    ],
)
def test_the_checker_sees_every_kind_of_import(source: str, layer: str, found: list[str]) -> None:
    assert violations(source, layer) == found


def test_ray_actors_are_made_in_one_place() -> None:
    """Questions to nodes are the only tasks: functions that look at a process or a folder there."""
    counts = {str(path.relative_to(PACKAGE)): count_remote(path) for path in MODULES}
    assert {name: count for name, count in counts.items() if count} == {REMOTE_HOME: 1, "runtime/process.py": 1}


def test_count_remote_sees_decorators_calls_and_imports() -> None:
    source = "import ray\nfrom ray import remote\n@ray.remote\nclass A: ...\nB = ray.remote(num_cpus=1)(A)\nA.remote()"
    assert count_remote(source) == 3


def loaded_by(code: str) -> set[str]:
    """Top-level packages in a fresh interpreter after running `code`."""
    code += "\nimport sys; sys.stdout.write('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.rpartition("\n")[2].split())


HEAVY = {"torch", "ray", "vllm", "transformers"}
SCORING = ("grpo_dist.rewards.scorer", "grpo_dist.tasks.gsm8k", "grpo_dist.tasks.competition_math")
HELP = "from grpo_dist.cli.entry import main\nassert main(['help', 'lr']) == 0"


@pytest.mark.parametrize(
    ("code", "not_loaded"),
    [
        ("import grpo_dist.algorithms", HEAVY - {"torch"} | {"pydantic", "hydra", "omegaconf"}),
        # each process of a scorer would hold 200 MB of a framework
        (f"import {', '.join(SCORING)}", HEAVY | {"numpy", "pyarrow"}),
        # Ray reads its token's mode when it is imported, which a run of a fork sets before
        ("import grpo_dist.cli.fork", {"ray", "vllm"}),
        (HELP, HEAVY | {"numpy", "hydra"}),
    ],
)
def test_what_is_heavy_is_loaded_where_it_is_needed(code: str, not_loaded: set[str]) -> None:
    loaded = loaded_by(code)
    assert "grpo_dist" in loaded
    assert loaded.isdisjoint(not_loaded)


@pytest.mark.parametrize("command", first(PLAN_COMMANDS, "train"))
def test_ray_is_loaded_after_its_environment_is_set(command: str) -> None:
    """`runtime.cluster.prepare` sets variables that Ray reads when it is imported."""
    rows = PLAN_COMMANDS[command].load.partition(":")[0]
    assert "ray" not in loaded_by(f"import grpo_dist.run.run, {rows}")


@pytest.mark.parametrize("command", first(COMMANDS, "main.main"))
def test_a_dry_run_loads_neither_ray_nor_vllm_and_one_of_the_config_no_torch_either(command: str) -> None:
    module, _, function = command.rpartition(".")
    run = f"from grpo_dist.{module} import {function}\nassert {function}(['trainer.dry_run=KIND']) == 0"
    assert loaded_by(run.replace("KIND", "config")).isdisjoint({"torch", "transformers", "ray", "vllm"})
    assert loaded_by(run.replace("KIND", "true")).isdisjoint({"ray", "vllm"})
