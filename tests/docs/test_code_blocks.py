"""The code in the pages: it runs, or would run.

Commands and pieces of the config are read (`code_blocks.py`, `commands.py`). The Python blocks of a page run in order,
in one namespace, in an empty folder, with a `grpo_dist.train` that checks what it is given and trains nothing. Pages
whose blocks another test runs are in `RUN_BY`; blocks that cannot run here are in `NOT_RUN`, with the reason.
"""

from __future__ import annotations

import gzip
import json
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
from tests.docs.code_blocks import Block, blocks, faults
from tests.docs.commands import resolve_imports, run_in_order, undefined_names
from tests.messages import refuses, says
from tests.tiers import first

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md")
    for path in sorted(ROOT.glob(pattern))
}
RUN_BY = {
    "docs/extending.md": "tests/architecture/test_public_api.py",
    "docs/tutorial.md": "tests/examples/test_first_day.py",  # writes its files and calls its commands
}
# (page, a line of the block): why it is compiled only, and what it imports of the package looked up.
NOT_RUN = {
    ("docs/from_trl.md", "from trl import GRPOConfig, GRPOTrainer"): "TRL is not installed; the block is its script",
    ("docs/lora.md", "import peft"): "downloads Qwen3-8B",
}


def python(page: str) -> list[Block]:
    return [block for block in blocks(PAGES[page].read_text()) if block.language == "python"]


def is_run(page: str, block: Block) -> bool:
    return not any((page, line) in NOT_RUN for line in block.text.splitlines())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, and nothing trains in it."""

    def end(given: dict[str, Any], _: Any) -> grpo_dist.TrainingResult:
        config, _ = grpo_dist.api.load_command([*given.items(), ("trainer.dry_run", "config")], grpo_dist.api.GRPO)
        return grpo_dist.TrainingResult(Path(config.trainer.default_local_dir), None, [{"critic/score/mean": 0.0}])

    monkeypatch.setattr(grpo_dist.api, "_run", end)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", first(PAGES, "README.md"))
def test_blocks_have_a_language_and_what_is_no_python_can_be_read(page: str) -> None:
    found = [f"{page}:{block.line}: {fault}" for block in blocks(PAGES[page].read_text()) for fault in faults(block)]
    assert found == []


WITH_PYTHON = [page for page in PAGES if python(page)]


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
    run_in_order({block.line: block.text for block in python(page) if is_run(page, block)}, page)
    for block in python(page):
        resolve_imports(block.text)


def test_the_script_of_the_tutorial_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other test of it trains nothing either, and only compiles this one."""
    by_line = {block.line: block.text for block in python("docs/tutorial.md")}
    _, rewards, script = by_line
    (folder / "rewards.py").write_text(by_line[rewards])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "rewards", None)  # gone again after the test
    del sys.modules["rewards"]
    namespace = run_in_order({script: by_line[script]}, "docs/tutorial.md")
    assert namespace["result"].run_dir.name == "sums_from_python"


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_has_no_undefined_names(page: str) -> None:
    assert list(undefined_names("\n".join(block.text for block in python(page)))) == []


def test_what_is_said_of_pages_is_true() -> None:
    assert [page for page, test in RUN_BY.items() if Path(page).stem not in (ROOT / test).read_text()] == []
    for page, line in NOT_RUN:
        assert sum(line in block.text.splitlines() for block in python(page)) == 1


MAIN = "python -m grpo_dist.main"


@pytest.mark.parametrize(
    ("language", "text", "named"),
    [
        ("sh", "make test", ["'sh'", "bash"]),
        ("bash", "if true", ["unexpected end"]),
        ("bash", "cat <<'EOF'\nmore", ["EOF"]),
        ("bash", f"{MAIN} algorithm.adv_estimater=grpo", ["algorithm.adv_estimater", "adv_estimator"]),
        ("bash", f"{MAIN} algorithm.adv_estimator=grpoo", ["algorithm.adv_estimator=grpoo"]),
        ("bash", f"{MAIN} trainer.nodes=N", ["trainer.nodes", "trainer.nnodes"]),
        ("bash", f"{MAIN} actor_rollout_ref.actor.ppo_mini_batch_size=5", ["ppo_mini_batch_size=5"]),
        ("bash", f"{MAIN} \\\n  'reward.timout_s=1'   # seconds", ["reward.timout_s"]),
        ("bash", f"keys='reward.timout_s=1 data.seed=2'\n{MAIN} $keys", ["reward.timout_s"]),
        ("bash", "python -m grpo_dist.mian", ["grpo_dist.mian"]),
        ("bash", "python -m benchmarks.gone", ["benchmarks.gone"]),
        ("bash", "python -m benchmarks.gpu_check --parts gone", ["gone"]),
        ("bash", "x=$(python -c 'from grpo_dist.agents import Agent')", ["Agent"]),
        ("bash", "grpo-dist rapport RUN_DIR", ["rapport"]),
        ("bash", "grpo-dist report RUN_DIR --comparison OTHER", ["--comparison"]),
        ("bash", "grpo-dist eval RUN_DIR data.seeds=1", ["data.seeds"]),
        ("bash", "grpo-dist data gsm8k --local_save_dir data --seed 1", ["--seed"]),
        ("bash", "make tests DEVICE=cpu", ["tests"]),
        ("bash", "bash examples/gone.sh", ["examples/gone.sh"]),
        ("bash", "sbatch --nodes=2 examples/cluster/slurm.sh trainer.nodes=2", ["trainer.nodes"]),
        ("bash", "pip install 'grpo_dist[gone]'", ["gone"]),
        ("console", "make test", ["$"]),
        ("console", "$ make test\ndone\nhead$ make tests", ["tests"]),
        ("json", '{"a": 1}\n{"a": }', ["line 1"]),
        ("yaml", "a: [1", ["line 1"]),
        ("yaml", "data: {seeds: 1}", ["data.seeds"]),
        ("yaml", "trainer: {nnodes: many}", ["trainer.nnodes=many"]),
        ("toml", "a = [1\nb", ["line 2"]),
    ],
)
def test_what_is_wrong_is_found(language: str, text: str, named: list[str]) -> None:
    (block,) = blocks(f"Words.\n\n```{language}\n{text}\n```\n")
    assert block == Block(language, text + "\n", 4)
    says(list(faults(block)), *named)


@pytest.mark.parametrize(
    "text",
    [
        f"{MAIN} trainer.nnodes=N data.train_files=$FILES actor_rollout_ref.model.path=FOLDER ...",
        f"{MAIN} --quiet 'reward.timeout_s=1'   # a word of it: 'here'",
        "cat > mine.py <<'EOF'\nimport grpo_dist.gone\nEOF\ncd folder || exit 1\n. .venv/bin/activate",
        "grpo-dist eval RUN_DIR --limit 5 data.seed=2",
        "A=1 make test-long && /envs/mine/bin/pip install anything",
    ],
)
def test_what_is_right_is_left_alone(text: str) -> None:
    assert list(faults(Block("bash", text, 1))) == []


def test_a_block_in_a_list_and_one_with_fences_in_it() -> None:
    page = "- Item:\n\n  ```python\n  if 1:\n      pass\n  ```\n\n````text\n```\n````\n"
    assert blocks(page) == [Block("python", "if 1:\n    pass\n", 4), Block("text", "```\n", 9)]


def test_wrong_python_is_found(folder: Path) -> None:
    with pytest.raises(NameError, match="AgentLoop"):
        run_in_order({3: "class Chat(AgentLoop): ..."}, "page")
    with pytest.raises(AttributeError, match="Agent"):
        resolve_imports("import os\nfrom grpo_dist.agents import Agent")
    with pytest.raises(ImportError, match="gone"):
        resolve_imports("import grpo_dist.gone")
    with refuses(ConfigError, "trainer.nodes", "trainer.nnodes"):
        run_in_order({1: "import grpo_dist\ngrpo_dist.train(config={'trainer.nodes': 1})"}, "page")
    says(list(undefined_names("def f():\n    return RATES\n")), "RATES")
    assert run_in_order({1: "a = 1", 3: "b = a + 1"}, "page")["b"] == 2
