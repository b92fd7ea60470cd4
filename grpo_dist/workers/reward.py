"""The reward worker: scores responses, turns scores into advantages, and writes samples down. It has the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_dist.algorithms import compute_advantage
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.workers.batch_ref import DataProtoRef
from grpo_dist.workers.process import Process, use_threads


@dataclass(frozen=True)
class RewardSettings:
    """What a reward worker is built from: the tokenizer's folder, and the reward function (path None: built-in)."""

    tokenizer_path: str
    trust_remote_code: bool
    function_path: str | None
    function_name: str
    reward_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What the reward function is told about a prompt besides the response."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class RewardWorker(Process):
    """Text side of the pipeline; one process of a pool."""

    def start(self, settings: RewardSettings) -> None:
        """Load tokenizer and reward function.

        Raises:
            ConfigError: the function cannot be imported.
        """
        from grpo_dist.assets import resolve_model_path
        from grpo_dist.data.tokenize import load_tokenizer
        from grpo_dist.rewards import load_reward_function

        use_threads(1)
        self.tokenizer = load_tokenizer(
            resolve_model_path(settings.tokenizer_path), trust_remote_code=settings.trust_remote_code
        )
        self.function = load_reward_function(settings.function_path, settings.function_name, settings.reward_kwargs)

    def score(self, group: DataProtoRef, task: Task) -> DataProtoRef:
        """Score the responses to one prompt.

        Returns:
            A handle with `token_level_scores` (the score on the last token); `score` and the function's extra
            values (as `reward_extra/NAME`) travel inside it.

        Raises:
            RewardError: the function raised or returned nonsense.
        """
        from grpo_dist.rewards import score_response

        responses = group.fetch(("responses",))["responses"]
        texts = self._decode(responses)
        results = [
            score_response(
                self.function,
                data_source=task.data_source,
                solution_str=text,
                ground_truth=task.ground_truth,
                extra_info=task.extra_info,
            )
            for text in texts
        ]
        scores = torch.tensor([result.score for result in results], dtype=torch.float32)
        data = DataProto.from_dict({"token_level_scores": on_last_token(scores, responses), "score": scores})
        names = dict.fromkeys(name for result in results for name in result.extra)
        extras = {f"reward_extra/{k}": np.array([r.extra.get(k, np.nan) for r in results], np.float32) for k in names}
        handle = DataProtoRef.put(data, small=("score",))
        return replace(handle, small=handle.small | extras)

    def compute_advantages(self, batch: DataProtoRef, estimator: str, options: Mapping[str, Any]) -> DataProtoRef:
        """Advantages and returns of a whole batch.

        Returns:
            A handle with `token_level_rewards`, `advantages` and `returns`. Per sequence, `advantage_mean` and
            `rollout_probs_diff` (mean |p_trainer - p_sampler| over its tokens) travel inside it.
        """
        data = batch.fetch(("uid", "token_level_scores", "response_mask", "rollout_log_probs", "old_log_probs"))
        lengths = data["token_level_scores"].lengths
        rewards = data["token_level_scores"].to_padded(0.0)
        mask = data["response_mask"].to_padded(0)
        advantages, returns = compute_advantage(
            estimator, token_level_rewards=rewards, response_mask=mask, index=data["uid"], config=options
        )
        probs = {name: data[name].to_padded(0.0).exp() for name in ("old_log_probs", "rollout_log_probs")}
        diff = (probs["old_log_probs"] - probs["rollout_log_probs"]).abs() * mask
        columns = {"token_level_rewards": rewards, "advantages": advantages, "returns": returns}
        out: dict[str, Any] = {name: Ragged.from_padded(value, lengths) for name, value in columns.items()}
        out["advantage_mean"] = advantages.sum(-1) / lengths.clamp_min(1)
        out["rollout_probs_diff"] = diff.sum(-1) / lengths.clamp_min(1)
        return DataProtoRef.put(DataProto.from_dict(out), small=("advantage_mean", "rollout_probs_diff"))

    def write_samples(self, batch: DataProtoRef, path: str, step: int, ground_truths: Mapping[str, Any]) -> None:
        """Write prompt, response, score and advantage of every row to `path`, one JSON object per line."""
        data = batch.fetch(("uid", "prompts", "responses", "score"))
        prompts, responses = self._decode(data["prompts"]), self._decode(data["responses"])
        advantages = batch.small.get("advantage_mean")
        lines = []
        for i, uid in enumerate(data["uid"]):
            row = {"step": step, "uid": uid, "input": prompts[i], "output": responses[i]}
            row |= {"gts": ground_truths[uid], "score": float(data["score"][i])}
            row |= {"advantage": float(advantages[i])} if advantages is not None else {}
            lines.append(json.dumps(row, ensure_ascii=False, default=str))
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(target)

    def _decode(self, column: Ragged) -> list[str]:
        return self.tokenizer.batch_decode([row.tolist() for row in column.rows()], skip_special_tokens=True)


def on_last_token(scores: torch.Tensor, responses: Ragged) -> Ragged:
    """An outcome reward sits on the last token of its response, zeros before it."""
    values = torch.zeros(len(responses.values), dtype=torch.float32)
    nonempty = responses.lengths > 0
    values[responses.offsets[1:][nonempty] - 1] = scores[nonempty]
    return Ragged(values, responses.offsets)
