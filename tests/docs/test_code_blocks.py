"""The code in the pages: commands and pieces of the config are read, and Python runs, but trains nothing."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import grpo_dist
import grpo_dist.api
from grpo_dist.errors import ConfigError
from grpo_dist.protocol.fields import FIELDS
from grpo_dist.tracking.rollouts import is_recorded
from tests.docs.code_blocks import Block, blocks, faults, resolve_imports, run_in_order
from tests.messages import refuses, says
from tests.tiers import first

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md", "skills/*/SKILL.md")
    for path in sorted(ROOT.glob(pattern))
}
# Pages whose blocks another test runs.
RUN_BY = {
    "docs/extending.md": "tests/architecture/test_public_api.py",
    "docs/tutorial.md": "tests/examples/test_first_day.py",  # writes its files and calls its commands
}
# (page, a line of the block): why it is compiled only, and what it imports of the package looked up.
NOT_RUN = {
    ("docs/from_trl.md", "from trl import GRPOConfig, GRPOTrainer"): "TRL is not installed; the block is its script",
    ("docs/lora.md", "import peft"): "downloads Qwen3-8B",
}


def python(page: str) -> dict[int, str]:
    return {block.line: block.text for block in blocks(PAGES[page].read_text()) if block.language == "python"}


WITH_PYTHON = [page for page in PAGES if python(page)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and nothing trains in it."""

    def end(given: dict[str, Any], _: Any) -> grpo_dist.TrainingResult:
        config, _ = grpo_dist.api.load_command([*given.items(), ("trainer.dry_run", "config")], grpo_dist.api.GRPO)
        return grpo_dist.TrainingResult(Path(config.trainer.default_local_dir), None, [{"critic/score/mean": 0.0}])

    monkeypatch.setattr(grpo_dist.api, "_run", end)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", first(PAGES, "docs/lora.md"))
def test_blocks_have_a_language_and_what_is_no_python_can_be_read(page: str) -> None:
    found = [f"{page}:{block.line}: {fault}" for block in blocks(PAGES[page].read_text()) for fault in faults(block)]
    assert found == []


@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page not in RUN_BY])
def test_python_runs(page: str, folder: Path) -> None:
    (folder / "RUN_DIR" / "rollouts").mkdir(parents=True)  # of docs/report.md
    recorded = pyarrow.table({name: [0.0] for name in FIELDS if is_recorded(name)})
    pyarrow.parquet.write_table(recorded, folder / "RUN_DIR" / "rollouts" / "3.parquet")
    profiles = folder / "RUN_DIR" / "profiles" / "step_3"  # of docs/profiling.md
    profiles.mkdir(parents=True)
    for name in ("ray", "rollout_rank0", "ref_rank0", "actor_rank0", "actor_rank1"):
        with gzip.open(profiles / f"{name}.json.gz", "wt") as stream:
            json.dump({"baseTimeNanoseconds": 0, "traceEvents": [{"ts": 1.0}]}, stream)
    kept_back = [line for where, line in NOT_RUN if where == page]
    run = {place: text for place, text in python(page).items() if not {*kept_back} & {*text.splitlines()}}
    assert len(python(page)) - len(run) == len(kept_back)
    run_in_order(run, page)
    for text in python(page).values():
        resolve_imports(text)


def test_the_script_of_the_tutorial_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (_, rewards), (line, script) = python("docs/tutorial.md").items()
    (folder / "rewards.py").write_text(rewards)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "rewards", None)  # gone again after the test
    del sys.modules["rewards"]
    assert run_in_order({line: script}, "docs/tutorial.md")["result"].run_dir.name == "sums_from_python"
    assert [page for page, test in RUN_BY.items() if Path(page).stem not in (ROOT / test).read_text()] == []


def test_python_has_no_undefined_names(tmp_path: Path) -> None:
    for page in WITH_PYTHON:
        (tmp_path / f"{page.replace('/', '_')}.py").write_text("\n".join(python(page).values()))
    (tmp_path / "wrong.py").write_text("def f():\n    return RATES\n")
    options = ["--isolated", "--select=F821", "--output-format=concise", "-q", "--no-cache"]
    command = [sys.executable, "-m", "ruff", "check", *options, tmp_path]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    (only,) = (found.stdout + found.stderr).splitlines()
    says(only, "wrong.py", "RATES")


MAIN = "python -m grpo_dist.main"


@pytest.mark.parametrize(
    ("language", "text", "named"),
    [
        ("sh", "make test", ["'sh'", "bash"]),
        ("bash", "cat <<'EOF'\nmore", ["EOF"]),
        ("bash", f"{MAIN} trainer.nodes=N", ["trainer.nodes", "trainer.nnodes"]),
        ("bash", f"{MAIN} actor_rollout_ref.actor.ppo_mini_batch_size=5", ["ppo_mini_batch_size=5"]),
        ("bash", f"keys='reward.timout_s=1 data.seed=2'\n{MAIN} \\\n  $keys   # seconds", ["reward.timout_s"]),
        ("bash", "python -m grpo_dist.mian", ["grpo_dist.mian"]),
        ("bash", "python -m benchmarks.gpu_check --parts gone", ["gone"]),
        ("bash", "x=$(python -c 'from grpo_dist.agents import Agent')", ["Agent"]),
        ("bash", "grpo-dist report RUN_DIR --comparison OTHER", ["--comparison"]),
        ("bash", "grpo-dist eval RUN_DIR data.seeds=1", ["data.seeds"]),
        ("bash", "make tests DEVICE=cpu", ["tests"]),
        ("bash", "bash examples/gone.sh", ["examples/gone.sh"]),
        ("bash", "sbatch --nodes=2 examples/cluster/slurm.sh trainer.nodes=2", ["trainer.nodes"]),
        ("bash", "pip install 'grpo_dist[gone]'", ["gone"]),
        ("console", "make test", ["$"]),
        ("console", "$ make test\ndone\nhead$ make tests", ["tests"]),
        ("json", '{"a": 1}\n{"a": }', ["line 1"]),
        ("yaml", "data: {seeds: 1}", ["data.seeds"]),
        ("toml", "a = [1\nb", ["line 2"]),
        ("bash", f"{MAIN} trainer.nnodes=N data.train_files=$FILES actor_rollout_ref.model.path=FOLDER ...", []),
        ("bash", f"{MAIN} --quiet 'reward.timeout_s=1'   # a word of it: 'here'", []),
        ("bash", "cat > m.py <<'EOF'\nimport grpo_dist.gone\nEOF\ncd folder || exit 1\n. .venv/bin/activate", []),
        ("bash", "A=1 make test-long && /envs/mine/bin/pip install anything", []),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(language: str, text: str, named: list[str]) -> None:
    (block,) = blocks(f"Words.\n\n```{language}\n{text}\n```\n")
    assert block == Block(language, text + "\n", 4)
    found = list(faults(block))
    assert bool(found) == bool(named)
    if named:
        says(found, *named)


def test_blocks_in_lists_and_with_fences_and_wrong_python(folder: Path) -> None:
    page = "- Item:\n\n  ```python\n  if 1:\n      pass\n  ```\n\n````text\n```\n````\n"
    assert blocks(page) == [Block("python", "if 1:\n    pass\n", 4), Block("text", "```\n", 9)]
    for source, error, named in (
        ("import os\nfrom grpo_dist.agents import Agent", AttributeError, "Agent"),
        ("import grpo_dist.gone", ImportError, "gone"),
    ):
        with pytest.raises(error, match=named):
            resolve_imports(source)
    with refuses(ConfigError, "trainer.nodes", "trainer.nnodes"):
        run_in_order({1: "a = 1", 3: "import grpo_dist\ngrpo_dist.train(config={'trainer.nodes': a})"}, "page")
