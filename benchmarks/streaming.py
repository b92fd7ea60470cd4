"""A step's seconds and idle shares with `trainer.stream_mini_batches` off and on, by workers that only take time.

An engine samples one of a step's four groups at a time, a second each; an update takes a second for each mini-batch.
Trainer, pump and Ray are real. `python -m benchmarks.streaming`
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.runtime.cluster import prepare

address = prepare("local")  # before the others import Ray

from benchmarks import record  # noqa: E402
from grpo_dist.roles.reward import RewardWorker  # noqa: E402
from grpo_dist.runtime.connection import connect  # noqa: E402
from tests.processes import spawned  # noqa: E402
from tests.trainer.fake_run import make_trainer  # noqa: E402
from tests.trainer.fakes import FakeActorWorker, FakePolicyWorker, FakeRolloutWorker  # noqa: E402
from tests.trainer.recorded import history  # noqa: E402

SHOWN = {"step s": "timing_s/step", "actor idle": "perf/idle/actor", "engine idle": "perf/idle/rollout"}
BYPASS = "algorithm.rollout_correction.bypass_mode=true"  # no pass of the actor but the update
NOTHING_ELSE = [f"trainer.{key}=false" for key in ("val_before_train", "export_hf_model", "log_rollouts")]
OVERRIDES = [*NOTHING_ELSE, BYPASS, "data.val_files=null", "trainer.save_freq=-1"]


class OneByOne(FakeRolloutWorker):
    """Samples one group at a time."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()

    async def generate(self, *args: Any) -> Any:
        """A group, after its second."""
        async with self.turn:
            await asyncio.sleep(1.0)
        return await super().generate(*args)


class SlowActor(FakeActorWorker):
    """Takes a second for each mini-batch."""

    def update(self, rows: Any, mini_batches: list[np.ndarray], *args: Any) -> Any:
        """As if it trained."""
        time.sleep(len(mini_batches))
        return super().update(rows, mini_batches, *args)


def main() -> None:
    """Measure and print: by mini-batches of a step, off and on, means over the steps after the first."""
    connect(address, 2)
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        classes = {"actor": SlowActor, "rollout": OneByOne, "ref": FakePolicyWorker, "reward": RewardWorker}
        ranks: dict[str, list[tuple[int, ...]]] = {"actor": [(0, 1)], "rollout": [()], "ref": [(0, 1)], "reward": [()]}
        groups = {role: stack.enter_context(spawned(role, classes[role], ranks[role])) for role in classes}
        for count in (2, 4):
            for streams in ("false", "true"):
                size = f"actor_rollout_ref.actor.ppo_mini_batch_size={4 // count}"
                stream = f"trainer.stream_mini_batches={streams}"
                trainer = make_trainer(folder / f"{count}-{streams}", groups, *OVERRIDES, size, stream)
                trainer.fit()
                steps = history(trainer)[1:]
                means = {label: float(np.mean([step[name] for step in steps])) for label, name in SHOWN.items()}
                rows.append({"mini-batches": count, "streams": streams, **means})
    print(record.table("streaming", rows))


if __name__ == "__main__":
    main()
