"""Task folders: rows, the policy's sandbox, and a verifier that sees the policy's work and nothing else."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_dist.data import read_rows
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.tasks.folders import Task, make_row
from grpo_dist.tasks.prepare import main
from tests.messages import refuses, says

EXAMPLE = Path(__file__).parents[2] / "examples" / "task_folders"


@pytest.fixture
def task(bwrap: None) -> Iterator[Task]:
    """The example, begun."""
    begun = Task()
    begun.reset(task=str(EXAMPLE / "sum"), prompt=[])
    yield begun
    begun.close()


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE / "sum", tmp_path / "tasks" / "mine"))


def test_a_folder_becomes_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["folders", "--local_dataset_path", str(EXAMPLE), "--local_save_dir", str(tmp_path)]) == 0
    (row,) = read_rows([str(tmp_path / "train.parquet")], key="data.train_files")
    assert row["prompt"] == [{"role": "user", "content": (EXAMPLE / "sum" / "instruction.md").read_text()}]
    assert row["extra_info"]["task"] == str(EXAMPLE / "sum")
    assert main(["folders", "--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path)]) == 2
    says(capsys.readouterr().err, f"--local_dataset_path={tmp_path}", "instruction.md")


def test_its_own_solution_earns_everything(task: Task) -> None:
    assert task.bash((EXAMPLE / "sum" / "solution" / "solve.sh").read_text()) == ""
    assert task.bash("cat sum.txt; pwd; echo $LC_ALL") == "32\n/app\nC.UTF-8\n"
    assert task.get_reward() == {"score": 1.0, "acc": 1.0}


def test_the_verifier_reads_what_was_left_and_the_policy_neither_tests_nor_reward(task: Task) -> None:
    assert task.get_reward() == {"score": 0.0, "acc": 0.0}
    says(task.bash("cat /tests/* /logs/* /solution/*"), "/tests/*", "/logs/*", "/solution/*", "[exit code 1]")
    task.bash("mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; ln -s /etc/passwd link; echo 7 > sum.txt")
    assert task.get_reward() == {"score": 0.5, "acc": 0.0}
    assert task.bash("ls") == "link\nlogs\nnumbers.txt\nsum.txt\n", "it goes on as it was"
    says(task.bash("touch /app/../etc/x"), "[exit code 1]")


def test_a_verifier_that_writes_no_reward_has_failed(tmp_path: Path, task: Task) -> None:
    folder = copied(tmp_path)
    (folder / "tests" / "test.sh").write_text("echo seen; exit 3\n")
    broken = Task()
    broken.reset(task=str(folder))
    with refuses(RuntimeError, folder, "tests/test.sh", "reward.txt", "seen", "[exit code 3]"):
        broken.get_reward()
    (folder / "tests" / "test.sh").write_text("echo 0.25 > /logs/verifier/reward.txt\n")
    assert broken.get_reward() == {"score": 0.25}
    broken.close()


@pytest.mark.parametrize("line", ["RUN pip install numpy", "USER root", "COPY --from=builder /a /b", "ENTRYPOINT x"])
def test_what_needs_an_image_is_named(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(tmp_path)
    dockerfile = folder / "environment" / "Dockerfile"
    dockerfile.write_text(f"FROM python:3.12\nWORKDIR /work\nCOPY . data/\n{line}\n")
    with refuses(ConfigError, f"{dockerfile}, line 4", line.split()[0], "sandbox.backend=docker", "sandbox.image"):
        Task().reset(task=str(folder))
    (folder / "tests" / "test.sh").unlink()
    with refuses(DataError, folder, "tests/test.sh"):
        make_row(folder, 0)
