"""What reward processes write of batches: samples as text, rollouts, judged responses, and groups of a checkpoint.

The driver holds only handles, so text needs a worker, and these have the tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from grpo_dist.data.step_tokens import split_steps
from grpo_dist.engines.train.durable_files import FileDigest, digest_file, flush_path
from grpo_dist.errors import CheckpointError, DiskError
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.fields import EXTRA, columns_for
from grpo_dist.protocol.sequences import PREDECESSORS, branch_starts, scored_branches
from grpo_dist.runtime.batch_ref import DataProtoRef
from grpo_dist.runtime.process import Process
from grpo_dist.tracking.rollouts import is_recorded, make_room, write_tokens
from grpo_dist.workers.scorer import decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RecordWriter(Process):
    """Writes records; without a `step_separator` responses are judged as a whole."""

    tokenizer: PreTrainedTokenizerBase
    step_separator: str | None

    def read_samples(self, batch: DataProtoRef, step: int, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A dict per row: step, uid, input, output, score and, if known, advantage.

        By uid `asked` adds gts (the ground truth) and row (what names the row, see `Prompt.digest`).
        Beside them stands what the reward function has returned besides the score: texts, and numbers such as the score
        of each function of several. A response that it failed on has `failure`, which says why; its score may be None.
        The output of an episode into which its environment put text is there in `parts` too: who wrote it ("policy" or
        "environment"), what, and "branch" where it does not go on from what stands before it.
        """
        data = batch.fetch(columns_for(batch.columns, "samples"))
        prompts, responses = decoded(self.tokenizer, data["prompts"]), decoded(self.tokenizer, data["responses"])
        follows = data[PREDECESSORS].rows() if PREDECESSORS in data.columns() else [None] * len(data)
        written = list(zip(data["responses"].rows(), data["response_mask"].rows(), follows, strict=True))
        advantages = batch.small.get("advantage_mean")
        extras = {name.removeprefix(EXTRA): column for name, column in batch.small.items() if name.startswith(EXTRA)}
        samples = []
        for i, uid in enumerate(data["uid"]):
            row = {"step": step, "uid": uid, "input": prompts[i], "output": responses[i]}
            score, failure = float(data["score"][i]), data["failure"][i]
            row |= asked[uid] | {"score": None if math.isnan(score) else score}
            row |= {"failure": failure} if failure else {}
            row |= self._parts(*written[i])
            row |= {"images": data["images"][i]} if "images" in data.columns() else {}
            row |= {"advantage": float(advantages[i])} if advantages is not None else {}
            values = {name: float(column[i]) for name, column in extras.items()}
            values = {name: value for name, value in values.items() if not math.isnan(value)}
            samples.append(json.loads(data["said"][i]) | values | row)
        return samples

    def write_samples(self, batch: DataProtoRef, path: str, step: int, asked: Mapping[str, Any]) -> None:
        """Write `read_samples` to `path`, one JSON object per line.

        Raises:
            DiskError: the file cannot be written.
        """
        _write_rows(self.read_samples(batch, step, asked), path, "trainer.log_rollouts=false")

    def write_rollouts(
        self, batch: DataProtoRef, path: str, step: int, asked: Mapping[str, Any], most_bytes: float
    ) -> None:
        """Write a training batch as text to RUN_DIR/rollouts/STEP.jsonl, its columns beside it (tracking/rollouts.py).

        The folder may hold `most_bytes`; the oldest steps are removed. `asked` is by uid.

        Raises:
            DiskError: the files cannot be written.
        """
        file = Path(path)
        columns = [name for name in batch.columns if is_recorded(name)]
        write_tokens(_whole(batch, columns), file.with_suffix(".parquet"), self.tokenizer.save_pretrained)
        self.write_samples(batch, path, step, asked)
        make_room(file.parent, most_bytes)

    def write_judged(
        self, batch: DataProtoRef, path: str, conversations: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> None:
        """Write responses with the labels of their steps to `path`, in the form of data/training_rows.py.

        A response without text is left out, and one that the reward function failed on. `rule_labels` are rows of the
        labels of a response's steps, or of one for the whole response; `conversations` are by uid.

        Raises:
            DiskError: the file cannot be written.
        """
        data = batch.fetch(columns_for(batch.columns, "judged"))
        texts = decoded(self.tokenizer, scored_branches(data))
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
