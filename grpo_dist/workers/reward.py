"""The reward worker: scores responses, turns scores into advantages, and writes samples down. It has the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_dist.algorithms.correction import compute_rollout_correction
from grpo_dist.algorithms.targets import TargetSettings, compute_targets
from grpo_dist.config.names import OVERLONG_PENALTY
from grpo_dist.engines.train.durable_files import FileDigest, digest_file, flush_path
from grpo_dist.errors import CheckpointError, ConfigError, RewardError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.rewards.base import RewardResult
from grpo_dist.rewards.components import chosen_components
from grpo_dist.workers.batch_ref import DataProtoRef, Label
from grpo_dist.workers.process import Process, use_threads

EXTRA = "reward_extra/"  # the reward function's other values, by name
TEXT_CONTEXT = 4  # tokens before one that can change how it is written
SAMPLE_COLUMNS = ("uid", "prompts", "responses", "score")
TARGET_COLUMNS = ("token_level_scores", "response_mask", "rollout_log_probs")


@dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), lengths in tokens.

    Nothing up to `max_length - buffer`, then linearly down to `-factor` at `max_length`.
    """

    max_length: int
    buffer: int
    factor: float

    def __call__(self, lengths: torch.Tensor) -> torch.Tensor:
        """(N,) lengths -> (N,) float32, at most 0."""
        excess = (lengths - (self.max_length - self.buffer)).clamp_min(0)
        return -self.factor * excess.float() / self.buffer


@dataclass(frozen=True)
class RewardSettings:
    """What a reward worker is built from: the tokenizer's folder, and the reward function (path None: built-in).

    A call of the function may take `timeout_s` seconds; a response that it fails on earns `failure_score`. With a
    `step_separator` the steps between separators have rewards of their own (rewards/steps.py).
    """

    tokenizer_path: str
    trust_remote_code: bool
    function_path: str | None
    function_name: str
    reward_kwargs: dict[str, Any]
    timeout_s: float = 60.0
    failure_score: float = 0.0
    overlong_penalty: OverlongPenalty | None = None
    step_separator: str | None = None


@dataclass(frozen=True)
class Task:
    """What the reward function is told about a prompt besides the response; validation knows no overlong penalty."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    validation: bool = False


class RewardWorker(Process):
    """Text side of the pipeline; one process of a pool."""

    def start(self, settings: RewardSettings) -> None:
        """Load tokenizer and reward function, the latter in a process of its own.

        Raises:
            ConfigError: the function cannot be imported.
            RewardError: importing it hangs, or ends its process.
        """
        from grpo_dist.data.tokenize import load_tokenizer
        from grpo_dist.rewards.scorer import Scorer

        use_threads(1)
        self.tokenizer = load_tokenizer(
            self.find_model(settings.tokenizer_path), trust_remote_code=settings.trust_remote_code
        )
        self.overlong_penalty, self.step_separator = settings.overlong_penalty, settings.step_separator
        self.failure_score, self.function_name = settings.failure_score, settings.function_name
        self.scorer = Scorer(
            settings.function_path, settings.function_name, settings.reward_kwargs, timeout_s=settings.timeout_s
        )
        self.scorer.start()

    def score(
        self, group: DataProtoRef, task: Task
    ) -> tuple[tuple[Label, list[str], tuple[list[str], int]], DataProto]:
        """Score the responses to one prompt.

        Returns:
            ((label, failures, printed), data). The data has `token_level_scores` (the score on the last token that
            trains, or a score on the last token of each step, with `step_mask` 1 there). The label has `score`, the
            function's extra values (as `reward_extra/NAME`) and for validation `failed` and `pred_id`, where it finds
            answers. The failures say why responses could not be scored, one text for each. Printed are the first lines
            that the function printed, and how many more.

        Raises:
            RewardError: the function returned step scores that do not fit the steps.
        """
        data = group.fetch(("responses", "response_mask"))
        responses, mask = data["responses"], data["response_mask"]
        results, failures = self._score_texts(self._decode(responses), task)
        scores = torch.tensor([result.score for result in results], dtype=torch.float32)
        penalties = torch.zeros_like(scores)
        names = dict.fromkeys(name for result in results for name in result.extra)
        extras = {EXTRA + name: np.array([r.extra.get(name, np.nan) for r in results], np.float32) for name in names}
        if self.overlong_penalty is not None and not task.validation:
            penalties = self.overlong_penalty(responses.lengths)
            extras[EXTRA + OVERLONG_PENALTY] = penalties.numpy()
        if task.validation and any(result.pred is not None for result in results):
            extras["pred_id"] = pred_ids([result.pred for result in results])
        if task.validation:
            extras["failed"] = np.array([result.failed for result in results])
        columns: dict[str, Any] = {"score": scores + penalties}
        if self.step_separator is None:
            columns["token_level_scores"] = on_last_token(scores + penalties, responses, mask)
        else:
            steps, columns["step_mask"] = self._on_steps(results, responses)
            penalty = on_last_token(penalties, responses)
            columns["token_level_scores"] = Ragged(steps.values + penalty.values, steps.offsets)
        scored = DataProto.from_dict(columns)
        label = Label.of(scored, ("score",))
        label = Label(label.columns, label.small | extras, label.num_rows)
        return (label, failures, self.scorer.printed.take()), scored

    def _score_texts(self, texts: Sequence[str], task: Task) -> tuple[list[RewardResult], list[str]]:
        from grpo_dist.rewards.group import Failure, Sample

        row = (task.data_source, task.ground_truth, task.extra_info, task.messages)
        results: list[RewardResult] = []
        failures: list[str] = []
        for result in self.scorer.score([Sample(text, *row) for text in texts]):
            if isinstance(result, Failure):
                failures.append(result.text)
                result = RewardResult(self.failure_score, {}, failed=True)
            results.append(result)
        return results, failures

    def _on_steps(self, results: Sequence[RewardResult], responses: Ragged) -> tuple[Ragged, Ragged]:
        """Each step's score on its last token, and a mask of those; one step where there are no `step_scores`."""
        from grpo_dist.rewards.steps import step_ends

        assert self.step_separator is not None
        scores, mask = (torch.zeros(len(responses.values), dtype=dtype) for dtype in (torch.float32, torch.int8))
        for result, row, start in zip(results, responses.rows(), responses.offsets.tolist(), strict=False):
            if not len(row):  # no token to carry a score
                continue
            texts = self._token_texts(row.tolist())
            ends = step_ends(texts, self.step_separator) if result.step_scores is not None else [len(row) - 1]
            values = (result.score,) if result.step_scores is None else result.step_scores
            if len(ends) != len(values):
                raise RewardError(
                    f"reward function {self.function_name} returned {len(values)} step_scores for a response of "
                    f"{len(ends)} steps (reward.step_separator={self.step_separator!r}): {''.join(texts)[:200]!r}"
                )
            for end, value in zip(ends, values, strict=True):  # steps that end in one token add up
                scores[start + end] += value
                mask[start + end] = 1
        return Ragged(scores, responses.offsets), Ragged(mask, responses.offsets)

    def compute_targets(
        self, batch: DataProtoRef, settings: TargetSettings, kl_coef: float, seed: int
    ) -> tuple[tuple[Label, dict[str, float]], DataProto]:
        """What the update trains on, from the whole batch; see `algorithms.targets`.

        Returns:
            ((label with `advantage_mean` and `reward` per sequence, metrics), the columns of `algorithms.targets`).
        """
        data = batch.fetch(("uid", *TARGET_COLUMNS, *settings.columns))
        lengths = data["token_level_scores"].lengths
        small = {name: torch.as_tensor(values) for name, values in batch.small.items() if name != "uid"}
        components = {k.removeprefix(EXTRA): v for k, v in small.items() if k.startswith(EXTRA)}
        if settings.adv_estimator == "gdpo":
            settings = self._naming_components(settings, components)
            nobody = torch.full((len(lengths),), torch.nan)  # a declared one may apply to no response of this batch
            components = dict.fromkeys(self.scorer.components, nobody) | components
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

    def _naming_components(self, settings: TargetSettings, returned: Iterable[str]) -> TargetSettings:
        """With the keys and weights of gdpo filled in."""
        chosen = chosen_components(
            settings.options.get("gdpo_reward_keys"),
            settings.options.get("gdpo_reward_weights"),
            declared=self.scorer.components,
            overlong_penalty=self.overlong_penalty is not None,
            returned=returned,
        )
        named = {"gdpo_reward_keys": tuple(chosen), "gdpo_reward_weights": tuple(chosen.values())}
        return replace(settings, options={**settings.options, **named})

    def rollout_diagnostics(self, batch: DataProtoRef, correction: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of `algorithms.correction`, from old log-probs that the update brought."""
        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        data = batch.fetch(names)
        return compute_rollout_correction(**{name: data[name].to_padded(0) for name in names}, **correction)[2]

    def read_samples(self, batch: DataProtoRef, step: int, ground_truths: Mapping[str, Any]) -> list[dict[str, Any]]:
        """step, uid, input, output, gts (ground truth), score and, where there is one, advantage of every row."""
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
            ConfigError: the disk refuses.
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
                f"cannot write {target}: {error}. Make room there, set trainer.default_local_dir to another place, or "
                "trainer.log_rollouts=false"
            ) from error

    def write_groups(self, groups: DataProtoRef, path: str) -> dict[str, FileDigest]:
        """Write all columns of scored groups to `path`.safetensors and `path`.json; returns the files by name.

        Raises:
            CheckpointError: the disk refuses.
        """
        from safetensors import SafetensorError

        # what travels in the handle only becomes a column
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
            (the columns named in `small`, as they travel in a handle; everything).
        """
        data = DataProto.load(path)
        return {name: np.asarray(data[name]) for name in small}, data

    def _token_texts(self, token_ids: list[int]) -> list[str]:
        """What each token adds to the text. Its neighbours before it decide about spaces and split characters."""
        windows = [token_ids[max(0, i - TEXT_CONTEXT) : i + 1] for i in range(len(token_ids))]
        with_token = self.tokenizer.batch_decode(windows, skip_special_tokens=True)
        without = self.tokenizer.batch_decode([window[:-1] for window in windows], skip_special_tokens=True)
        return [text[len(before) :] for text, before in zip(with_token, without, strict=True)]

    def _decode(self, column: Ragged) -> list[str]:
        return self.tokenizer.batch_decode([row.tolist() for row in column.rows()], skip_special_tokens=True)


def pred_ids(preds: Sequence[str | None]) -> np.ndarray:
    """Answers as numbers, since only numbers travel: (N,) float32, equal for equal answers, nan for none."""
    numbers = {pred: i for i, pred in enumerate(dict.fromkeys(preds))}
    return np.array([np.nan if pred is None else numbers[pred] for pred in preds], np.float32)


def on_last_token(scores: torch.Tensor, responses: Ragged, mask: Ragged | None = None) -> Ragged:
    """An outcome reward sits on the last token of its response, zeros elsewhere.

    With a mask, on the last token that trains: estimators that pass rewards from token to token skip the others. On the
    last token where none trains: the reward still counts in its group's mean.
    """
    positions = torch.arange(len(responses.values))
    nonempty = responses.lengths > 0
    last = responses.offsets[1:] - 1
    if mask is not None:
        rows = torch.repeat_interleave(torch.arange(len(responses.lengths)), responses.lengths)
        trained = positions.where(mask.values.bool(), -1)
        found = torch.full_like(last, -1).scatter_reduce(0, rows, trained, "amax")
        last = found.where(found >= 0, last)
    values = torch.zeros(len(responses.values), dtype=torch.float32)
    values[last[nonempty]] = scores[nonempty]
    return Ragged(values, responses.offsets)
