"""The responses of a step as the report shows them: groups side by side, token by token.

Texts and scores are those of rollouts/STEP.jsonl, numbers of tokens those of rollouts/STEP.parquet. Where only the
first is there (runs of before, files removed for room), responses have no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_dist.errors import ConfigError, DataError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.redact import redact
from grpo_dist.tracking.record import ROLLOUTS, TOKENIZER

_OWN = frozenset({"step", "uid", "input", "output", "gts", "score", "advantage", "failure", "parts"})
_COLUMNS = [
    "responses",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "truncated",
    "weight_version",
    "last_weight_version",
]
_HALF = "\ufffd"  # what a token that is a part of a character decodes to


@dataclass
class TokenTexts:
    """What each token adds to the text.

    Attributes:
        tokenizer: of transformers.
    """

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
    """The tokenizer that the run has left in its folder; None if it has left none.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import PreTrainedTokenizerFast

    folder = run_dir / TOKENIZER
    if not folder.is_dir():
        return None
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; remove the folder to have the report without tokens")
    return TokenTexts(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))


def read_step(run_dir: Path, step: int, texts: TokenTexts | None) -> dict[str, Any]:
    """A step's responses for the page.

    Returns:
        {"step", "pieces", "groups": [{"uid", "input", "gts", "responses": [...]}]}: a response has "output", "score",
        "advantage", "failure", "extra" (the reward function's other numbers), and, with tokens, "tokens" (positions in
        "pieces", the step's different token texts), "mask", "advantages", "log_probs" (nats), "mismatch" (those of the
        trainer less those of the sampler), "kl" (less those of the reference), "truncated" and "versions".

    Raises:
        DataError: the step's files are not there or cannot be read.
    """
    path = run_dir / ROLLOUTS / f"{step}.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        parquet = path.with_suffix(".parquet")
        data = read_parquet(parquet, _COLUMNS) if texts is not None and parquet.is_file() else None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the responses of step {step} cannot be read: {error}") from None
    if data is not None and len(data) != len(rows):
        raise DataError(f"{path} has {len(rows)} responses, and the Parquet file beside it {len(data)}")
    groups: dict[str, dict[str, Any]] = {}
    responses = []
    for row in rows:
        shown = {name: redact(row.get(name)) for name in ("output", "score", "advantage", "failure", "parts")}
        shown["extra"] = {name: value for name, value in row.items() if name not in _OWN}
        shown = {name: value for name, value in shown.items() if value not in (None, {}, "") or name == "output"}
        group = groups.setdefault(row["uid"], {"uid": row["uid"], "input": redact(row["input"]), "responses": []})
        group["gts"] = row["gts"] if isinstance(row["gts"], str) else json.dumps(row["gts"], ensure_ascii=False)
        group["responses"].append(shown)
        responses.append(shown)
    pieces: dict[str, int] = {}
    if data is not None and texts is not None:
        _add_tokens(responses, data, texts, pieces)
    return {"step": step, "pieces": list(pieces), "groups": list(groups.values())}


def _add_tokens(
    responses: Sequence[dict[str, Any]], data: DataProto, texts: TokenTexts, pieces: dict[str, int]
) -> None:
    columns = data.columns()
    ids = data["responses"].rows()
    numbers = _per_token(columns)
    for i, response in enumerate(responses):
        found = texts.of(ids[i].tolist())
        response["tokens"] = [pieces.setdefault(text, len(pieces)) for text in found]
        for name, rows in numbers.items():
            response[name] = _short(rows[i])
        if "truncated" in columns and int(columns["truncated"][i]):
            response["truncated"] = True
        if "weight_version" in columns:
            ends = sorted({int(columns[name][i]) for name in ("weight_version", "last_weight_version")})
            response["versions"] = ends


def _per_token(columns: Mapping[str, Any]) -> dict[str, list[torch.Tensor]]:
    """Rows of the numbers that tokens are coloured by."""

    def less(one: str, other: str) -> Ragged:
        return Ragged(columns[one].values - columns[other].values, columns[one].offsets)

    found = {"mask": columns["response_mask"]}
    if "advantages" in columns:
        found["advantages"] = columns["advantages"]
    if "old_log_probs" in columns:
        found["log_probs"] = columns["old_log_probs"]
        found["mismatch"] = less("old_log_probs", "rollout_log_probs")
        if "ref_log_probs" in columns:
            found["kl"] = less("old_log_probs", "ref_log_probs")
    elif "rollout_log_probs" in columns:
        found["log_probs"] = columns["rollout_log_probs"]
    return {name: column.rows() for name, column in found.items()}


def _short(row: torch.Tensor) -> Any:
    """Numbers with three decimals; a single one where all are equal."""
    if row.dtype == torch.int8:
        values: list[Any] = row.tolist()
    else:
        values = [round(value, 3) if value == value else None for value in row.tolist()]
    return values[0] if values and all(value == values[0] for value in values) else values


def chosen_steps(run_dir: Path, steps: Sequence[int], most: int) -> list[int]:
    """The steps whose responses go into the page: first, last, and as many between as fit, evenly.

    Args:
        run_dir: the run's folder.
        steps: those that are there.
        most: responses in all.
    """
    if not steps:
        return []
    sizes = {}
    for step in steps:
        with (run_dir / ROLLOUTS / f"{step}.jsonl").open("rb") as file:
            sizes[step] = sum(1 for _ in file)
    count = len(steps)
    while count > 1:
        places = [round(i * (len(steps) - 1) / (count - 1)) for i in range(count)]
        found = [steps[place] for place in dict.fromkeys(places)]
        if sum(sizes[step] for step in found) <= most:
            return found
        count -= 1
    return [steps[-1]]
