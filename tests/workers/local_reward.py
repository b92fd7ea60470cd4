"""A reward worker in the test's own process, and the responses that it is given; `store_here` has their columns."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.workers.reward import RewardWorker
from grpo_dist.workers.scorer import RewardSettings, Task

SCORER = '''
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):
    """Counts the words, adds the bonus for the right first word."""
    words = solution_str.split()
    if "w13" in words:
        raise ValueError("unlucky")
    hit = bool(words) and words[0] == ground_truth
    extra = {"lucky": 1} if "w5" in words else {}
    return {"score": len(words) + bonus * hit, "hit": hit, "text": solution_str, "seen": extra_info["index"], **extra}
'''


class Local(RewardWorker):
    """In this process; gives handles, as the driver makes them of its answers."""

    def score(self, group: DataProtoRef, task: Task) -> tuple[DataProtoRef, list[str], tuple]:
        ([(label, failures)], printed, _), data = super().score(group, [len(group)], [task])
        return DataProtoRef.stored(ray.put(data), label), failures, printed

    def compute_targets(self, *args: Any) -> tuple[DataProtoRef, dict[str, float]]:
        (label, metrics, _), data = super().compute_targets(*args)
        return DataProtoRef.stored(ray.put(data), label), metrics


def local(tokenizer: str, folder: Path, code: str, kwargs: dict[str, Any] | None = None, **changes: Any) -> Local:
    """A worker with this reward function; changes are of its settings."""
    (folder / "mine.py").write_text(code)
    settings = RewardSettings(tokenizer, False, str(folder / "mine.py"), "compute_score", kwargs or {})
    worker = Local()
    worker.start(replace(settings, **changes))
    return worker


RESPONSES = [[5, 6, 2], [6, 2], [5]]
TASK = Task("words", "w5", {"index": 3})


def put(
    responses: list[list[int]],
    masks: list[list[int]] | None = None,
    rewards: list[float] | None = None,
    steps: list[list[float]] | None = None,
    **more: Ragged,
) -> DataProtoRef:
    """Responses of one group, not truncated; the rewards of their episodes and steps, if there are; more columns."""
    masks = [[1] * len(response) for response in responses] if masks is None else masks
    columns: dict[str, Any] = {
        "responses": Ragged.from_rows(responses, torch.int32),
        "response_mask": Ragged.from_rows(masks, torch.int8),
        "rollout_log_probs": Ragged.from_rows([[-float(one) for one in mask] for mask in masks], torch.float32),
    }
    if rewards is not None:
        columns["episode_reward"] = torch.tensor(rewards)
        steps = steps or [[math.nan] * len(response) for response in responses]
        columns["episode_step_rewards"] = Ragged.from_rows(steps, torch.float32)
    handle = DataProtoRef.put(DataProto.from_dict(columns | more, {"uid": ["a"] * len(responses)}))
    return replace(handle, small=handle.small | {"truncated": np.zeros(len(responses))})


def rows(column: Ragged) -> list[list[float]]:
    return [row.tolist() for row in column.rows()]


def column(handle: DataProtoRef, name: str = "token_level_scores") -> list[list[float]]:
    return rows(handle.fetch((name,))[name])
