"""Saves groups that were sampled ahead and scored before a checkpoint, so that they need not be sampled again.

A reward process writes and reads them; the driver has only handles. Tensors are stored as safetensors, the rest as
JSON. Log-probs of the reference are not saved but computed again, which is cheap compared with sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.engines.train.durable_files import FileDigest
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.workers.reward import RewardPool

FOLDER = "groups"

# Handles to a group's responses and to its scores.
Group = tuple[DataProtoRef, DataProtoRef]


@dataclass(frozen=True)
class FinishedGroups:
    """The finished groups of one batch of prompts.

    Attributes:
        name: name of its files, without suffix.
        groups: handles by uid.
    """

    name: str
    groups: Mapping[str, Group]

    def begin_write(self, folder: Path, reward: RewardPool) -> asyncio.Task[dict[str, FileDigest]]:
        """Start writing them into a checkpoint's folder; the task returns the files by name."""
        responses, scores = self._handles()
        return reward.write_groups(responses.union(scores), str(folder / FOLDER / self.name))

    def describe(self) -> dict[str, Any]:
        """The JSON description that `read_finished` needs."""
        responses, scores = self._handles()
        labels = [{"columns": list(label.columns), "small": list(label.small)} for label in (responses, scores)]
        rows = {uid: len(responses) for uid, (responses, _) in self.groups.items()}
        return {"name": self.name, "rows": rows, "responses": labels[0], "scores": labels[1]}

    def _handles(self) -> Group:
        responses, scores = zip(*self.groups.values(), strict=True)
        return DataProtoRef.concat(responses), DataProtoRef.concat(scores)


async def read_finished(folder: Path, described: Sequence[Mapping[str, Any]], reward: RewardPool) -> dict[str, Group]:
    """Read the groups of a checkpoint, by uid, as if they had just been sampled and scored.

    Raises:
        GrpoDistError: the files cannot be read.
    """
    groups: dict[str, Group] = {}
    for description in described:
        if "said" not in description["scores"]["columns"]:  # of an earlier version: they are sampled again
            continue
        rows: dict[str, int] = description["rows"]
        names = [*description["responses"]["small"], *description["scores"]["small"]]
        small, data = await reward.read_groups(str(folder / FOLDER / description["name"]), names)
        parts = []
        for label in (description["responses"], description["scores"]):
            own = {name: small[name] for name in label["small"]}
            handle = DataProtoRef.stored(data, Label(tuple(label["columns"]), own, sum(rows.values())))
            parts.append(handle.split(list(rows.values())))
        groups |= dict(zip(rows, zip(*parts, strict=True), strict=True))
    return groups
