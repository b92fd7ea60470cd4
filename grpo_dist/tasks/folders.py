"""Tasks as folders, in Harbor's layout (https://www.harborframework.com/docs/tasks), played in sandboxes.

    grpo-dist data folders --local_dataset_path TASKS --local_save_dir data/tasks         a row for each folder
    actor_rollout_ref.rollout.agent.agent_kwargs={environment: "grpo_dist.tasks.folders:Task", tool_parser: hermes}

    instruction.md           the prompt
    environment/Dockerfile   FROM, WORKDIR, COPY and ENV; with bubblewrap nothing else, since programs are the machine's
    tests/test.sh            the verifier, which writes /logs/verifier/reward.txt or reward.json
    solution/solve.sh        optional: the row's `solution`, which `grpo-dist check-env` plays
    task.toml                of which [verifier] timeout_sec is read

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
    _Image(folder)
    solution, text = folder / "solution" / "solve.sh", (folder / "instruction.md").read_text()
    own = {"solution": solution.read_text()} if solution.is_file() else {}
    return verl_row("folders", text, "", split="train", index=index, task=str(folder), **own)


class _Image:
    """What a Dockerfile says: the working folder, variables, and files by their paths from the root."""

    def __init__(self, folder: Path) -> None:
        self.workdir, self.variables, self.files = "/app", dict[str, str](), dict[str, bytes]()
        path = folder / "environment" / "Dockerfile"
        text = path.read_text().replace("\\\n", " ") if path.is_file() else ""
        for number, line in enumerate(text.splitlines(), 1):
            kind, _, rest = line.strip().partition(" ")
            if kind == "WORKDIR":
                self.workdir = str(PurePosixPath(self.workdir, rest.strip()))
            elif kind == "ENV":
                self.variables |= dict(word.partition("=")[::2] for word in shlex.split(rest))
            elif kind == "COPY" and not rest.startswith("--"):
                *sources, target = shlex.split(rest)
                for source in sources:
                    self._copy(path.parent / source, target)
            elif kind not in ("", "FROM") and not kind.startswith("#") and SandboxSettings.of_run().image is None:
                raise ConfigError(
                    f"{path}, line {number}: {kind} needs an image, and sandbox.backend=bubblewrap has the programs of "
                    "this machine; build it, and set sandbox.backend=docker sandbox.image=NAME"
                )

    def _copy(self, source: Path, target: str) -> None:
        place = PurePosixPath(self.workdir, target)
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            is_in = source.is_dir() or target.endswith(("/", "."))
            name = file.relative_to(source if source.is_dir() else source.parent)
            if file.is_file() and file.name != "Dockerfile":
                self.files[str(place / name if is_in else place)] = file.read_bytes()


class Task:
    """An episode's task: the policy's sandbox, with a shell."""

    def reset(self, task: str, **columns: Any) -> None:
        """Begin the task in the folder `task`."""
        self._folder, self._image = Path(task), _Image(Path(task))
        self._sandbox = open_sandbox(folders=(self._image.workdir,))
        self._sandbox.put(self._image.files)

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
        folders = (self._image.workdir, "/tests", "/logs/verifier")
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
        variables = [f"{name}={value}" for name, value in self._image.variables.items()]
        return sandbox.exec(["env", *variables, "bash", "-c", command], b"", seconds)


def _below(folder: Path, place: str) -> dict[str, bytes]:
    return {f"{place}/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _told(outcome: Outcome) -> str:
    """What a program has printed, and how it ended if that was not well."""
    text = (outcome.stdout + outcome.stderr).decode(errors="replace")
    if outcome.ended_by:
        return f"{text}\n[ended by its limit: {outcome.ended_by}]"
    return f"{text}\n[exit code {outcome.exit_code}]" if outcome.exit_code else text
