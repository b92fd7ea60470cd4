"""What reward processes do with whole batches: advantages, diagnostics, samples as text, groups of a checkpoint.

The driver holds only handles, so work on tensors and text needs a worker. The reward processes have the tokenizer, and
are idle while the actor is updated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpo_dist.algorithms.agreement import apart
from grpo_dist.algorithms.correction import compute_rollout_correction
from grpo_dist.algorithms.mismatch import mismatch_by_cause
from grpo_dist.algorithms.settings import TargetSettings
from grpo_dist.algorithms.targets import compute_targets
from grpo_dist.data.step_tokens import split_steps
from grpo_dist.engines.train.durable_files import FileDigest, digest_file, flush_path
from grpo_dist.errors import CheckpointError, DiskError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.branches import PREDECESSORS, branch_starts, scored_branches, with_branches
from grpo_dist.protocol.fields import EXTRA, SOURCE
from grpo_dist.rewards.output_lines import printing_to
from grpo_dist.rewards.weighted import chosen_components
from grpo_dist.runtime.batch_ref import DataProtoRef, Label
from grpo_dist.runtime.process import Process
from grpo_dist.tracking.rollouts import is_recorded, make_room, write_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_COLUMNS = ("uid", "prompts", "responses", "response_mask", "score", "failure", "said")
COMPARED_COLUMNS = ("uid", "responses", "response_mask", "weight_versions", "rollout_log_probs", "old_log_probs")
TARGET_COLUMNS = ("token_level_scores", "response_mask", "rollout_log_probs")
# Why sampler and trainer may differ: see `trainer.metrics.mismatch_causes`.
Causes = tuple[np.ndarray | None, np.ndarray | None, bool]


class BatchWork(Process):
    """The methods for whole batches. A subclass sets the attributes.

    Attributes:
        components: the reward components that the reward function declares, with their weights.
        overlong_penalty: the penalty for long responses; None: no penalty.
        step_separator: what is between the steps of a response; None: responses are judged as a whole.
    """

    tokenizer: PreTrainedTokenizerBase
    components: Mapping[str, float]
    overlong_penalty: Callable[[torch.Tensor], torch.Tensor] | None
    step_separator: str | None

    def compute_targets(
        self, batch: DataProtoRef, settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[tuple[Label, dict[str, float], tuple[list[str], int]], DataProto]:
        """Advantages and the other inputs of the update, from the whole batch; see `algorithms.targets`.

        Returns:
            ((label with `advantage_mean` and `reward` per sequence, metrics, what custom estimators have printed), the
            columns of `algorithms.targets`).
        """
        data = batch.fetch(("uid", *TARGET_COLUMNS, *settings.columns))
        label, metrics, targets = self.targets_of(data, batch.small, settings, kl_coef, seed)
        return (label, metrics, self.take_printed()), targets

    def targets_of(
        self, data: DataProto, given: Mapping[str, np.ndarray], settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[Label, dict[str, float], DataProto]:
        """The same for a batch that is here, and numbers of its sequences (`truncated`, `score`, ...)."""
        lengths = data["token_level_scores"].lengths
        small = {name: torch.as_tensor(values) for name, values in given.items() if values.dtype.kind in "fiub"}
        components = {k.removeprefix(EXTRA): v for k, v in small.items() if k.startswith(EXTRA)}
        if "reward_components" in settings.needs:
            settings = self._with_components(settings, components)
            # a declared component may apply to no response of this batch
            absent = torch.full((len(lengths),), torch.nan)
            components = dict.fromkeys(self.components, absent) | components
        with printing_to(self.printed):
            out, metrics = compute_targets(
                {
                    name: data[name].to_padded(-1 if name == PREDECESSORS else 0)
                    for name in (*TARGET_COLUMNS, *settings.columns)
                },
                settings,
                index=data["uid"],
                truncated=small["truncated"],
                scored=~small["score"].isnan(),
                kl_coef=kl_coef,
                sources=small.get(SOURCE),
                reward_baselines=small.get("reward_baseline"),
                reward_components=components,
                generator=torch.Generator().manual_seed(seed),
            )
        out["response_mask"] = out["response_mask"].to(torch.int8)
        columns: dict[str, Any] = {name: Ragged.from_padded(value, lengths) for name, value in out.items()}
        columns["advantage_mean"] = out["advantages"].sum(-1) / out["response_mask"].sum(-1).clamp_min(1)
        columns["reward"] = out["token_level_rewards"].sum(-1)
        targets = DataProto.from_dict(columns)
        return Label.of(targets, ("advantage_mean", "reward")), metrics, targets

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

    def rollout_diagnostics(
        self, batch: DataProtoRef, correction: Mapping[str, Any] | None, causes: Causes | None = None
    ) -> dict[str, float]:
        """The metrics of `algorithms.correction`, from old log-probs that the update returned, and of `mismatch`."""
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        data = batch.fetch((*names, "weight_versions") if causes is not None else names)
        columns: dict[str, Any] = {name: data[name].to_padded(0) for name in names}
        metrics = {} if correction is None else compute_rollout_correction(**columns, **correction)[2]
        if causes is not None:
            newest, lacks_routes, filtered = causes
            versions = data["weight_versions"].to_padded(0)
            stale = None if newest is None else versions < torch.as_tensor(newest)[:, None]
            lacks = None if lacks_routes is None else torch.as_tensor(lacks_routes)
            metrics |= mismatch_by_cause(**columns, is_stale=stale, lacks_routes=lacks, filtered=filtered)
        return metrics

    def compare_log_probs(self, batch: DataProtoRef, version: int) -> tuple[int, float, float, str]:
        """Compare the sampler's log-probs with the old ones.

        Returns:
            (number of tokens that train and were sampled by weights of this version, or newer ones; how far they are
            apart on average and at most, nats; the token where that is, in words).
        """
        data = batch.fetch(COMPARED_COLUMNS)
        mask = (data["response_mask"].values > 0) & (data["weight_versions"].values >= version)
        if not mask.any():
            return 0, 0.0, 0.0, ""
        sampler, trainer, offsets = (
            data["rollout_log_probs"].values,
            data["old_log_probs"].values,
            data["responses"].offsets,
        )
        mean, largest, worst = apart(sampler, trainer, mask)
        row, token = int((offsets <= worst).sum()) - 1, int(data["responses"].values[worst])
        place = f"token {worst - int(offsets[row])} of a response to prompt {data['uid'][row]}"
        both = f"log-prob {sampler[worst]:.6g} in the engine, {trainer[worst]:.6g} in the trainer"
        return int(mask.sum()), mean, largest, f"{self.tokenizer.decode([token])!r} (id {token}), {place}: {both}"

    def read_samples(self, batch: DataProtoRef, step: int, ground_truths: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A dict per row: step, uid, input, output, gts (ground truth), score and, if known, advantage.

        Beside them stands what the reward function has returned besides the score: texts, and numbers such as the score
        of each function of several. A response that it failed on has `failure`, which says why; its score may be None.
        The output of an episode into which its environment put text is there in `parts` too: who wrote it ("policy" or
        "environment"), what, and "branch" where it does not go on from what stands before it.
        """
        data = batch.fetch(with_branches(SAMPLE_COLUMNS, batch.columns))
        prompts, responses = self._decode(data["prompts"]), self._decode(data["responses"])
        follows = data[PREDECESSORS].rows() if PREDECESSORS in data.columns() else [None] * len(data)
        written = list(zip(data["responses"].rows(), data["response_mask"].rows(), follows, strict=True))
        advantages = batch.small.get("advantage_mean")
        extras = {name.removeprefix(EXTRA): column for name, column in batch.small.items() if name.startswith(EXTRA)}
        samples = []
        for i, uid in enumerate(data["uid"]):
            row = {"step": step, "uid": uid, "input": prompts[i], "output": responses[i]}
            score, failure = float(data["score"][i]), data["failure"][i]
            row |= {"gts": ground_truths[uid], "score": None if math.isnan(score) else score}
            row |= {"failure": failure} if failure else {}
            row |= self._parts(*written[i])
            row |= {"advantage": float(advantages[i])} if advantages is not None else {}
            values = {name: float(column[i]) for name, column in extras.items()}
            values = {name: value for name, value in values.items() if not math.isnan(value)}
            samples.append(json.loads(data["said"][i]) | values | row)
        return samples

    def write_samples(self, batch: DataProtoRef, path: str, step: int, ground_truths: Mapping[str, Any]) -> None:
        """Write `read_samples` to `path`, one JSON object per line.

        Raises:
            DiskError: the file cannot be written.
        """
        _write_rows(self.read_samples(batch, step, ground_truths), path, "trainer.log_rollouts=false")

    def write_rollouts(
        self, batch: DataProtoRef, path: str, step: int, ground_truths: Mapping[str, Any], most_bytes: float
    ) -> None:
        """Write a training batch as text to `path`, and its columns beside it (tracking/rollouts.py).

        Args:
            batch: a whole step.
            path: RUN_DIR/rollouts/STEP.jsonl.
            ground_truths: by uid.
            most_bytes: that the folder may hold; the oldest steps are removed.

        Raises:
            DiskError: the files cannot be written.
        """
        file = Path(path)
        columns = [name for name in batch.columns if is_recorded(name)]
        write_tokens(_whole(batch, columns), file.with_suffix(".parquet"), self.tokenizer.save_pretrained)
        self.write_samples(batch, path, step, ground_truths)
        make_room(file.parent, most_bytes)

    def write_judged(
        self, batch: DataProtoRef, path: str, conversations: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> None:
        """Write responses with the labels of their steps to `path`, in the form of data/judged_responses.py.

        A response without text is left out, and one that the reward function failed on.

        Args:
            batch: with `rule_labels`: rows of the labels of a response's steps, or with one for the whole response.
            conversations: the messages of each prompt, by uid.

        Raises:
            DiskError: the file cannot be written.
        """
        data = batch.fetch(with_branches(("uid", "responses", "rule_labels"), batch.columns))
        texts = self._decode(scored_branches(data))
        rows = []
        for uid, text, labels in zip(data["uid"], texts, data["rule_labels"].rows(), strict=True):
            steps = [text] if self.step_separator is None else split_steps(text, self.step_separator)
            if text.strip() and len(labels) == len(steps):
                rows.append({"prompt": conversations[uid], "completions": steps, "labels": labels.bool().tolist()})
        _write_rows(rows, path, "reward_model.retrain.freq=-1")

    def write_groups(self, groups: DataProtoRef, path: str) -> dict[str, FileDigest]:
        """Write all columns of scored groups to `path`.safetensors and `path`.json; returns the files by name.

        Raises:
            CheckpointError: the files cannot be written.
        """
        from safetensors import SafetensorError

        data = _whole(groups, groups.columns)
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
        """Read what `write_groups` wrote: the columns named in `small`, for a handle, and the whole batch."""
        data = DataProto.load(path)
        return {name: np.asarray(data[name]) for name in small}, data

    def _parts(
        self, response: torch.Tensor, mask: torch.Tensor, follows: torch.Tensor | None
    ) -> dict[str, list[list[str]]]:
        """Who wrote which part of a response, if not all of it is the policy's."""
        begins = [] if follows is None else branch_starts(follows).tolist()
        if mask.bool().all() and not begins:
            return {}
        starts = sorted({0, *begins, *((mask[1:] != mask[:-1]).nonzero().flatten() + 1).tolist()})
        ends = [*starts[1:], len(mask)]
        ids = [response[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return {
            "parts": [
                ["policy" if mask[start] else "environment", text, *(["branch"] if start in begins else [])]
                for start, text in zip(starts, texts, strict=True)
            ]
        }

    def _decode(self, column: Ragged) -> list[str]:
        return self.tokenizer.batch_decode([row.tolist() for row in column.rows()], skip_special_tokens=True)


def _whole(batch: DataProtoRef, columns: Sequence[str]) -> DataProto:
    """These columns, and the small ones that only the handle has."""
    extra = {name: torch.tensor(values) for name, values in batch.small.items() if name not in batch.columns}
    return batch.fetch(columns).union(DataProto.from_dict(extra))


def _write_rows(rows: Sequence[Mapping[str, Any]], path: str, without: str) -> None:
    """Write rows to `path`, one JSON object per line; the file is complete and on disk, or not there.

    Raises:
        DiskError: it cannot be written; the message names the setting `without` which it is not needed.
    """
    target = Path(path)
    temporary = target.with_suffix(".tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Row by row: together they are a second copy of the batch's text. Half a surrogate pair stays as JSON's escape.
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        flush_path(temporary)
        temporary.replace(target)
        flush_path(target.parent)
    except OSError as error:
        raise DiskError(
            f"cannot write {target}: {error}. Free disk space, set trainer.default_local_dir to another folder, or "
            f"{without}"
        ) from error
