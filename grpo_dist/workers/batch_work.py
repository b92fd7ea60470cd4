"""What reward processes do with whole batches: advantages, diagnostics, samples as text, groups of a checkpoint.

The driver holds only handles, so work on tensors and text needs a worker. The reward processes have the tokenizer, and
are idle while the actor is updated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpo_dist.algorithms.correction import compute_rollout_correction
from grpo_dist.algorithms.targets import TargetSettings, compute_targets
from grpo_dist.engines.train.durable_files import FileDigest, digest_file, flush_path
from grpo_dist.errors import CheckpointError, ConfigError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import EXTRA
from grpo_dist.rewards.components import chosen_components
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.process import Process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_COLUMNS = ("uid", "prompts", "responses", "score")
TARGET_COLUMNS = ("token_level_scores", "response_mask", "rollout_log_probs")


class BatchWork(Process):
    """The methods for whole batches. A subclass sets the attributes.

    Attributes:
        tokenizer: the model's tokenizer.
        components: the reward components that the reward function declares, with their weights.
        overlong_penalty: the penalty for long responses; None: no penalty.
    """

    tokenizer: PreTrainedTokenizerBase
    components: Mapping[str, float]
    overlong_penalty: Callable[[torch.Tensor], torch.Tensor] | None

    def compute_targets(
        self, batch: DataProtoRef, settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[tuple[Label, dict[str, float]], DataProto]:
        """Advantages and the other inputs of the update, from the whole batch; see `algorithms.targets`.

        Returns:
            ((label with `advantage_mean` and `reward` per sequence, metrics), the columns of `algorithms.targets`).
        """
        data = batch.fetch(("uid", *TARGET_COLUMNS, *settings.columns))
        lengths = data["token_level_scores"].lengths
        small = {name: torch.as_tensor(values) for name, values in batch.small.items() if name != "uid"}
        components = {k.removeprefix(EXTRA): v for k, v in small.items() if k.startswith(EXTRA)}
        if "reward_components" in settings.needs:
            settings = self._with_components(settings, components)
            absent = torch.full(
                (len(lengths),), torch.nan
            )  # a declared component may apply to no response of this batch
            components = dict.fromkeys(self.components, absent) | components
        out, metrics = compute_targets(
            {name: data[name].to_padded(0.0) for name in (*TARGET_COLUMNS, *settings.columns)},
            settings,
            index=data["uid"],
            truncated=small["truncated"],
            kl_coef=kl_coef,
            reward_baselines=small.get("reward_baseline"),
            reward_components=components,
            generator=torch.Generator().manual_seed(seed),
        )
        out["response_mask"] = out["response_mask"].to(torch.int8)
        columns: dict[str, Any] = {name: Ragged.from_padded(value, lengths) for name, value in out.items()}
        columns["advantage_mean"] = out["advantages"].sum(-1) / out["response_mask"].sum(-1).clamp_min(1)
        columns["reward"] = out["token_level_rewards"].sum(-1)
        found = DataProto.from_dict(columns)
        return (Label.of(found, ("advantage_mean", "reward")), metrics), found

    def _with_components(self, settings: TargetSettings, returned: Iterable[str]) -> TargetSettings:
        """The settings with gdpo's reward keys and weights filled in."""
        chosen = chosen_components(
            settings.options.get("gdpo_reward_keys"),
            settings.options.get("gdpo_reward_weights"),
            declared=self.components,
            overlong_penalty=self.overlong_penalty is not None,
            returned=returned,
        )
        named = {"gdpo_reward_keys": tuple(chosen), "gdpo_reward_weights": tuple(chosen.values())}
        return replace(settings, options={**settings.options, **named})

    def rollout_diagnostics(self, batch: DataProtoRef, correction: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of `algorithms.correction`, from the old log-probs that the update returned."""
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        data = batch.fetch(names)
        return compute_rollout_correction(**{name: data[name].to_padded(0) for name in names}, **correction)[2]

    def read_samples(self, batch: DataProtoRef, step: int, ground_truths: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A dict per row: step, uid, input, output, gts (ground truth), score and, if known, advantage."""
        data = batch.fetch(SAMPLE_COLUMNS)
        prompts, responses = self._decode(data["prompts"]), self._decode(data["responses"])
        advantages = batch.small.get("advantage_mean")
        samples = []
        for i, uid in enumerate(data["uid"]):
            row = {"step": step, "uid": uid, "input": prompts[i], "output": responses[i]}
            row |= {"gts": ground_truths[uid], "score": float(data["score"][i])}
            row |= {"advantage": float(advantages[i])} if advantages is not None else {}
            samples.append(row)
        return samples

    def write_samples(self, batch: DataProtoRef, path: str, step: int, ground_truths: Mapping[str, Any]) -> None:
        """Write `read_samples` to `path`, one JSON object per line.

        Raises:
            ConfigError: the file cannot be written.
        """
        samples = self.read_samples(batch, step, ground_truths)
        lines = [json.dumps(sample, ensure_ascii=False, default=str) for sample in samples]
        target = Path(path)
        temporary = target.with_suffix(".tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text("\n".join(lines) + "\n")
            temporary.replace(target)
        except OSError as error:
            raise ConfigError(
                f"cannot write {target}: {error}. Free disk space, set trainer.default_local_dir to another folder, or "
                "trainer.log_rollouts=false"
            ) from error

    def write_groups(self, groups: DataProtoRef, path: str) -> dict[str, FileDigest]:
        """Write all columns of scored groups to `path`.safetensors and `path`.json; returns the files by name.

        Raises:
            CheckpointError: the files cannot be written.
        """
        from safetensors import SafetensorError

        # small columns that are only in the handle become columns of the file
        extra = {name: torch.tensor(values) for name, values in groups.small.items() if name not in groups.columns}
        data = groups.fetch(groups.columns).union(DataProto.from_dict(extra))
        target = Path(path)
        files = [target.with_name(f"{target.name}.{ending}") for ending in ("safetensors", "json")]
        try:
            target.parent.mkdir(exist_ok=True)
            data.save(target)
            for file in files:
                flush_path(file)
            return {file.name: digest_file(file) for file in files}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error

    def read_groups(self, path: str, small: Sequence[str]) -> tuple[dict[str, np.ndarray], DataProto]:
        """Read what `write_groups` wrote.

        Returns:
            (the columns named in `small`, as numpy arrays for a handle; the whole batch).
        """
        data = DataProto.load(path)
        return {name: np.asarray(data[name]) for name in small}, data

    def _decode(self, column: Ragged) -> list[str]:
        return self.tokenizer.batch_decode([row.tolist() for row in column.rows()], skip_special_tokens=True)
