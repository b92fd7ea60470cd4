"""Environments with a planted fault each, and one without; reward functions likewise. `KEPT` is what they leave."""

import asyncio
import random
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from grpo_dist.agents import AgentLoop, Episode, Turn

KEPT: list[Any] = []
END = threading.Event()


class Sound(AgentLoop):
    async def run(self, episode: Episode) -> None:
        episode.append_messages([{"role": "user", "content": self.answer(await episode.generate())}])
        await episode.generate()

    def answer(self, turn: Turn) -> str:
        return "noted"


class RandomWords(Sound):
    def answer(self, turn: Turn) -> str:
        return f"noted under {random.random()}"


class SharedRow(Sound):
    """What its row says stands where the episodes of other rows write too."""

    price: ClassVar[Any] = None

    async def run(self, episode: Episode) -> None:
        SharedRow.price = episode.row.uid.rpartition(" (")[0]
        await super().run(episode)

    def answer(self, turn: Turn) -> str:
        return f"noted for {SharedRow.price}"


class OwnWordsAgain(AgentLoop):
    async def run(self, episode: Episode) -> None:
        episode.append((await episode.generate()).text)
        await episode.generate()


class Raises(Sound):
    count: ClassVar[int] = 0

    def answer(self, turn: Turn) -> str:
        Raises.count += 1
        if Raises.count % 2 == 0:
            raise OSError("no free display")
        return "noted"


class OneByOne(Sound):
    """Takes a second of the clock, in which no other episode goes on."""

    seconds: ClassVar[float] = 0.0

    def answer(self, turn: Turn) -> str:
        OneByOne.seconds += 1
        return "noted"


class Waits(AgentLoop):
    async def run(self, episode: Episode) -> None:
        await episode.generate()
        await asyncio.Event().wait()


class Blocks(AgentLoop):
    async def run(self, episode: Episode) -> None:
        await episode.generate()
        END.wait(600)


class LeavesAll(Sound):
    def answer(self, turn: Turn) -> str:
        KEPT.extend([subprocess.Popen(["sleep", "600"]), socket.create_server(("127.0.0.1", 0)), b"x" * (2 << 20)])
        threading.Thread(target=END.wait, daemon=True).start()
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(b"x")
        return "noted"


class ReadsItsReward:
    """Its tests read a file that the policy can write."""

    def reset(self, **columns: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()

    def bash(self, command: str) -> str:
        """Run a command.

        Args:
            command: The command.
        """
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder.name, capture_output=True, text=True, check=False
        )
        return done.stdout

    def get_reward(self) -> float:
        file = Path(self.folder.name, "reward.txt")
        return float(file.read_text() if file.exists() else 0)

    def close(self) -> None:
        self.folder.cleanup()


def hangs(number: int) -> int:
    """Look a number up.

    Args:
        number: The number.
    """
    END.wait(600)
    return number


def doubles(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    return float(str(ground_truth) in solution_str)


def constant(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    return 1.0


def pays_silence(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    return float(str(ground_truth) in solution_str or not solution_str.strip())


def pays_echo(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    return float(str(ground_truth) in solution_str or "=?" in solution_str)


def differs(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    return float(str(ground_truth) in solution_str) * (1 + time.monotonic())
