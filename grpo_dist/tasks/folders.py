"""Tasks as folders, in Harbor's layout, played in sandboxes (docs/environments.md#task-folders).

The policy works by a shell in one sandbox. The verifier runs in another one, over a copy of what it has left: the
policy's sandbox never holds the tests or the reward.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from grpo_dist.data.conversion import Row, Written, verl_row, write_splits
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.sandbox import Outcome, Sandbox, SandboxSettings, open_sandbox

COMMAND_S, VERIFIER_S = 60.0, 120.0  # seconds of a command, and of a verifier whose task.toml does not say


def prepare(local_save_dir: str, local_dataset_path: str) -> Written:
    """Write train.parquet, a row for each folder with an instruction.md. Returns rows by file written."""
    folders = sorted(path.parent.resolve() for path in Path(local_dataset_path).glob("**/instruction.md"))
    if not folders:
        raise DataError(f"--local_dataset_path={local_dataset_path}: no folder in it has an instruction.md")
    return write_splits({"train": [make_row(folder, index) for index, folder in enumerate(folders)]}, local_save_dir)


def make_row(folder: Path, index: int) -> Row:
    """The row of a task, which names its folder; its parts are checked.

    Raises:
        DataError: a part is missing.
        ConfigError: the Dockerfile needs what the sandbox cannot give.
    """
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"{folder}: there is no tests/test.sh, which says what an agent has earned")
    _image(folder)
    solution, text = folder / "solution" / "solve.sh", (folder / "instruction.md").read_text()
    own = {"solution": solution.read_text()} if solution.is_file() else {}
    return verl_row("folders", text, "", split="train", index=index, task=str(folder), **own)


def _image(folder: Path) -> tuple[str, dict[str, str], dict[str, bytes]]:
    """What a Dockerfile says: the working folder, variables, and files by their paths from the root."""
    workdir, variables, files = PurePosixPath("/app"), dict[str, str](), dict[str, bytes]()
    path = folder / "environment" / "Dockerfile"
    text = path.read_text().replace("\\\n", " ") if path.is_file() else ""
    for number, line in enumerate(text.splitlines(), 1):
        kind, _, rest = line.strip().partition(" ")
        if kind == "WORKDIR":
            workdir /= rest.strip()
        elif kind == "ENV":
            variables |= dict(word.partition("=")[::2] for word in shlex.split(rest))
        elif kind == "COPY" and not rest.startswith("--"):
            *sources, target = shlex.split(rest)
            for source in (path.parent / name for name in sources):
                name = source.name if source.is_file() and target.endswith(("/", ".")) else ""
                files |= _below(source, workdir / target / name)
        elif kind not in ("", "FROM") and not kind.startswith("#") and SandboxSettings.of_run().image is None:
            raise ConfigError(
                f"{path}, line {number}: {kind} needs an image, and sandbox.backend=bubblewrap has the programs of "
                "this machine; build it, and set sandbox.backend=docker sandbox.image=NAME"
            )
    return str(workdir), variables, files


class Task:
    """An episode's task: the policy's sandbox, with a shell."""

    def reset(self, task: str, **columns: Any) -> None:
        """Begin the task in the folder `task`."""
        self._folder = Path(task)
        self._workdir, self._variables, files = _image(self._folder)
        self._sandbox = open_sandbox(folders=(self._workdir,))
        self._sandbox.put(files)

    def bash(self, command: str) -> str:
        """Run a command in a shell; what it prints is the answer.

        Args:
            command: The command, such as ls -l.
        """
        return _told(self._run(self._sandbox, command, COMMAND_S))

    def get_reward(self) -> dict[str, float]:
        """Run the verifier over a copy of the policy's work: `score`, and the other numbers of a reward.json."""
        toml = self._folder / "task.toml"
        named = tomllib.loads(toml.read_text()) if toml.is_file() else {}
        folders = (self._workdir, "/tests", "/logs/verifier")
        with open_sandbox(folders=folders, copy_of=self._sandbox) as verifier:
            verifier.put(_below(self._folder / "tests", "/tests"))
            seconds = float(named.get("verifier", {}).get("timeout_sec", VERIFIER_S))
            outcome = self._run(verifier, "bash /tests/test.sh", seconds)
            read = self._run(verifier, "cat /logs/verifier/reward.json || cat /logs/verifier/reward.txt", COMMAND_S)
        try:
            found = json.loads(read.stdout)
            numbers = {"reward": found} if isinstance(found, int | float) else {k: float(v) for k, v in found.items()}
            return {"score": float(numbers.pop("reward")), **numbers}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise RuntimeError(
                f"{self._folder}: tests/test.sh wrote no number `reward` into /logs/verifier, reward.json or reward.txt"
                f"\n{_told(outcome)}"
            ) from None

    def close(self) -> None:
        """End the sandbox."""
        self._sandbox.close()

    def _run(self, sandbox: Sandbox, command: str, seconds: float) -> Outcome:
        variables = (f"{name}={value}" for name, value in self._variables.items())
        return sandbox.exec(["env", *variables, "bash", "-c", command], timeout=seconds)


def _below(source: Path, place: str | PurePosixPath) -> dict[str, bytes]:
    """A file, or those in a folder, by the paths that they get."""
    files = (path for path in (source, *source.rglob("*")) if path.is_file())
    return {str(PurePosixPath(place, path.relative_to(source))): path.read_bytes() for path in files}


def _told(outcome: Outcome) -> str:
    """What a program has printed, and how it ended if that was not well."""
    text = (outcome.stdout + outcome.stderr).decode(errors="replace")
    if outcome.ended_by:
        return f"{text}\n[ended by its limit: {outcome.ended_by}]"
    return f"{text}\n[exit code {outcome.exit_code}]" if outcome.exit_code else text
