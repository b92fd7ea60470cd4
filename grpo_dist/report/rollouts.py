"""The responses of a step as the report shows them: groups side by side, token by token.

Texts and scores are those of rollouts/STEP.jsonl, numbers of tokens those of rollouts/STEP.parquet. Where only the
first is there (runs of before, files removed for room), responses have no tokens.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_dist.algorithms.validation import normal_interval
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.media import THUMBNAIL
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.protocol.sequences import PREDECESSORS, branch_starts
from grpo_dist.redact import redact
from grpo_dist.runs import RunFolder, noting
from grpo_dist.tracking.jsonl import ROLLOUTS, TOKENIZER, VALIDATION, json_objects
from grpo_dist.tracking.rollouts import recorded_steps

_NUMBER = int | float | None
_TYPES: Mapping[str, Any] = {
    "uid": str,
    "input": str,
    "output": str,
    "score": _NUMBER,
    "advantage": _NUMBER,
    "failure": str | None,
}
_OWN = frozenset({"step", "uid", "input", "output", "gts", "score", "advantage", "failure", "parts", "images", "row"})
_BOTH = ["response_mask", "rollout_log_probs", "old_log_probs", PREDECESSORS]  # log-probs of sampler and trainer
_COLUMNS = [*_BOTH, "responses", "ref_log_probs", "advantages", "truncated", "weight_version", "last_weight_version"]
_HALF = "\ufffd"  # what a token that is a part of a character decodes to


@dataclass
class TokenTexts:
    """The text that each token adds, by a tokenizer of transformers."""

    tokenizer: Any

    def __post_init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._anchor = self.tokenizer.encode("a", add_special_tokens=False)
        self._anchor_text = self.tokenizer.decode(self._anchor)

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; a character of several tokens stands at the first of them."""
        missing = [token for token in dict.fromkeys(ids) if token not in self._texts]
        # behind a letter, since some tokenizers leave out the space of the first word
        for token in missing:
            self._texts[token] = self.tokenizer.decode([*self._anchor, token]).removeprefix(self._anchor_text)
        texts = [self._texts[token] for token in ids]
        start = 0
        while start < len(texts):
            end = start
            while end < len(texts) and _HALF in texts[end]:
                end += 1
            if end > start + 1:
                together = self.tokenizer.decode([*self._anchor, *ids[start:end]]).removeprefix(self._anchor_text)
                texts[start:end] = [together, *[""] * (end - start - 1)]
            start = max(end, start + 1)
        return texts


def load_token_texts(run_dir: Path) -> TokenTexts | None:
    """The tokenizer that the run has left in its folder; None if it has left none."""
    from transformers import PreTrainedTokenizerFast

    folder = run_dir / TOKENIZER
    if not folder.is_dir():
        return None
    try:
        return TokenTexts(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing more special
        raise ConfigError(
            f"{folder}: the tokenizer cannot be loaded ({error}); remove the folder to have the report without tokens"
        ) from None


def read_step(run_dir: Path, step: int, texts: TokenTexts | None, kind: str = ROLLOUTS) -> dict[str, Any]:
    """A step's responses for the page. What is damaged is left out and told.

    Returns:
        {"step", "pieces", "groups": [{"uid", "input", "gts", "responses": [...]}], "problems": [...]}: a response has
        "output", "score", "advantage", "failure", "extra" (the reward function's other numbers), and, with tokens,
        "tokens" (positions in "pieces", the step's different token texts), "mask", "advantages", "log_probs" (nats),
        "mismatch" (those of the trainer less those of the sampler), "kl" (less those of the reference), "branches"
        (tokens that do not follow the one before), "truncated" and "versions".
    """
    path = run_dir / kind / f"{step}.jsonl"
    problems: list[str] = []
    groups: dict[str, dict[str, Any]] = {}
    responses: list[dict[str, Any] | None] = []
    with noting(problems, f"the responses of step {step} are left out"):
        for number, row in json_objects(path):
            responses.append(None)
            with noting(problems, f"{path}, line {number}, is left out"):
                responses[-1] = _response(row, groups)
    pieces: dict[str, int] = {}
    parquet = path.with_suffix(".parquet")
    if texts is not None and parquet.is_file():
        with noting(problems, f"the tokens of step {step} are left out"):
            pieces = _add_tokens(responses, read_parquet(parquet, _COLUMNS), texts, parquet)
    return {"step": step, "pieces": list(pieces), "groups": list(groups.values()), "problems": problems}


def against(first: RunFolder, run: RunFolder) -> RunFolder:
    """Return a run with what separates it from another one, on the prompts that both have asked in the same steps. The
    interval is over prompts, each with the mean of its responses and steps, which are not independent: it says what
    other prompts would have shown of these two runs, not what other runs would have shown.
    """
    rows, columns = run.rows, dict[str, str]()
    for what, short, kind in (("reward", "", ROLLOUTS), ("last validation", "val. ", VALIDATION)):
        by_step, by_prompt = defaultdict[int, list[Any]](list), defaultdict[str, list[float]](list)
        both = sorted({*recorded_steps(first.path, kind)} & {*recorded_steps(run.path, kind)})
        for step in both[-1:] if kind == VALIDATION else both:
            read = (read_step(each.path, step, None, kind)["groups"] for each in (first, run))
            old, new = ({(group["uid"], group["input"]): group["responses"] for group in groups} for groups in read)
            for key in (key for key in old if key in new):
                before, now = (np.mean([each.get("score", math.nan) for each in group[key]]) for group in (old, new))
                if not math.isnan(more := float(now - before)):  # all have been scored
                    same = [one["output"] == two["output"] for one, two in zip(old[key], new[key], strict=False)]
                    by_step[step].append((more, np.mean(same)))
                    by_prompt[key[1]].append(more)
        if by_step:
            means = {step: np.mean(pairs, axis=0).tolist() for step, pairs in by_step.items()}
            found = {step: {"paired/score": more, "paired/equal": equal} for step, (more, equal) in means.items()}
            values = np.array([np.mean(more) for more in by_prompt.values()])
            interval = "[{:+.3g}, {:+.3g}]".format(*normal_interval(values))
            columns |= {f"{what} - first": f"{values.mean():+.3g} {interval}", f"{short}prompts": str(len(values))}
            columns[f"{short}steps"] = f"{min(means)} to {max(means)}" if len(means) > 1 else str(*means)
            columns[f"{short}equal"] = f"{np.mean([equal for _, equal in means.values()]):.0%}"
            if kind == ROLLOUTS:
                parted = (str(step) for step, (_, equal) in means.items() if equal < 1)
                columns["parted in step"] = next(parted, "none")
                rows = [{**row, **found.get(int(row["step"]), {})} for row in rows]
    return replace(run, rows=rows, against=columns or {"reward - first": "no prompt in the same step of both"})


def _response(row: Mapping[str, Any] | str, groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if isinstance(row, str):
        raise DataError(row)
    for name, kind in _TYPES.items():
        if not isinstance(row.get(name), kind):
            raise DataError(f"{name} is missing or of another type")
    row = dict(redact(row))
    shown = {name: row.get(name) for name in ("output", "score", "advantage", "failure")}
    shown["extra"] = {name: value for name, value in row.items() if name not in _OWN}
    shown = {name: value for name, value in shown.items() if value not in (None, {}, "") or name == "output"}
    group = groups.setdefault(row["uid"], {"uid": row["uid"], "input": row["input"], "responses": []})
    images = row.get("images")
    if isinstance(images, list):
        group["images"] = [image for image in images if str(image).startswith(THUMBNAIL)]
    truth = row.get("gts")
    group["gts"] = truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    group["responses"].append(shown)
    return shown


def _add_tokens(
    responses: Sequence[dict[str, Any] | None], data: DataProto, texts: TokenTexts, path: Path
) -> dict[str, int]:
    """Add the tokens to all responses, or, if anything is damaged, to none; returns the positions of the pieces."""
    if len(data) != len(responses):
        raise DataError(f"{path} has {len(data)} responses, and the file of their texts beside it {len(responses)}")
    columns, pieces = data.columns(), dict[str, int]()
    ids = data["responses"].rows()
    numbers = _per_token(columns)
    follows = data[PREDECESSORS].rows() if PREDECESSORS in columns else None
    additions: list[dict[str, Any]] = []
    for i in range(len(responses)):
        added: dict[str, Any] = {name: _short(rows[i]) for name, rows in numbers.items()}
        added["tokens"] = [pieces.setdefault(text, len(pieces)) for text in texts.of(ids[i].tolist())]
        if follows is not None and len(starts := branch_starts(follows[i])):
            added["branches"] = starts.tolist()
        if "truncated" in columns and int(columns["truncated"][i]):
            added["truncated"] = True
        if "weight_version" in columns:
            added["versions"] = sorted({int(columns[name][i]) for name in ("weight_version", "last_weight_version")})
        additions.append(added)
    for response, added in zip(responses, additions, strict=True):
        if response is not None:
            response |= added
    return pieces


def _per_token(columns: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
    def less(one: str, other: str) -> Ragged:
        return Ragged(columns[one].values - columns[other].values, columns[one].offsets)

    shown = {"mask": columns["response_mask"]}
    if "advantages" in columns:
        shown["advantages"] = columns["advantages"]
    if "old_log_probs" in columns:
        shown["log_probs"] = columns["old_log_probs"]
        shown["mismatch"] = less("old_log_probs", "rollout_log_probs")
        if "ref_log_probs" in columns:
            shown["kl"] = less("old_log_probs", "ref_log_probs")
    elif "rollout_log_probs" in columns:
        shown["log_probs"] = columns["rollout_log_probs"]
    return {name: column.rows() for name, column in shown.items()}


def _short(row: torch.Tensor) -> Any:
    """Numbers with three decimals; a single one where all are equal."""
    if row.dtype == torch.int8:
        values: list[Any] = row.tolist()
    else:
        values = [round(value, 3) if math.isfinite(value) else None for value in row.tolist()]
    return values[0] if values and all(value == values[0] for value in values) else values


@lru_cache(maxsize=1)  # a page that follows a run asks every few seconds
def mismatch_by_depth(run_dir: Path, step: int, bins: int = 32) -> list[tuple[int, int, float, float]]:
    """How far the log-probs of sampler and trainer are apart, by the number of tokens before the token on its branch.

    Returns:
        (least depth, tokens, mean and 99th percentile of the difference without sign in nats) of up to `bins` bins of
        one width; [] if the step's Parquet file has no log-probs of the trainer, or no tokens that train.
    """
    columns = read_parquet(run_dir / ROLLOUTS / f"{step}.parquet", [*_BOTH, "prompt_length"]).columns()
    if "old_log_probs" not in columns or not (own := columns["response_mask"].values.bool()).any():
        return []
    prompts, offsets = columns["prompt_length"], columns["response_mask"].offsets
    depth = Ragged((prompts - offsets[:-1]).repeat_interleave(offsets.diff()) + torch.arange(int(offsets[-1])), offsets)
    for row, prompt, follows in zip(depth.rows(), prompts, columns.get(PREDECESSORS, depth).rows(), strict=True):
        for start in branch_starts(follows) if PREDECESSORS in columns else ():
            before = follows[start]  # below 0: in the prompt, from its end backwards
            row[start:] += (row[before] if before >= 0 else prompt + before) + 1 - row[start]
    apart = (columns["old_log_probs"].values - columns["rollout_log_probs"].values)[own].abs()
    width = int(depth.values[own].max()) // bins + 1
    places = depth.values[own] // width
    parts = enumerate(apart[places.argsort()].split(places.bincount().tolist()))
    return [(at * width, len(p), float(p.mean()), float(p.sort()[0][99 * len(p) // 100])) for at, p in parts if len(p)]


def chosen_steps(run_dir: Path, steps: Sequence[int], most: int) -> list[int]:
    """The steps whose responses go into the page, `most` in all: first, last, and as many between as fit, evenly."""
    if not steps:
        return []
    sizes = dict.fromkeys(steps, 0)
    for step in steps:
        with noting([], "its responses"), (run_dir / ROLLOUTS / f"{step}.jsonl").open("rb") as file:
            sizes[step] = sum(1 for _ in file)
    count = len(steps)
    while count > 1:
        places = [round(i * (len(steps) - 1) / (count - 1)) for i in range(count)]
        chosen = [steps[place] for place in dict.fromkeys(places)]
        if sum(sizes[step] for step in chosen) <= most:
            return chosen
        count -= 1
    return [steps[-1]]
