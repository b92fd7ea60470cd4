"""Folders of runs for the tests of the report."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.plan.commands import load_config
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.tracking.rollouts import write_tokens
from grpo_dist.trainer.checkpoint.config_changes import saved_config

TINY = "builtin:tiny-qwen3"


def write_run(folder: Path, rows: Sequence[dict[str, float]], *overrides: str) -> Path:
    """A run with these metrics, and a real config."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ({name: None if math.isnan(value) else value for name, value in row.items()} for row in rows)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    config, _ = load_config([f"trainer.default_local_dir={folder}", *overrides])
    (folder / "config.yaml").write_text(saved_config(config))
    return folder


def write_step(
    folder: Path, step: int, outputs: Sequence[str], scores: Sequence[float | None], *, tokens: bool = True
) -> None:
    """The files of a step: two responses for each prompt."""
    tokenizer = load_tokenizer(resolve_model_path(TINY), trust_remote_code=False)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in outputs]
    rows = []
    for i, (output, score) in enumerate(zip(outputs, scores, strict=True)):
        row = {"step": step, "uid": f"step{step}-prompt{i // 2}", "input": f"user\n{i // 2}+1=?\nassistant\n"}
        row |= {"row": f"row {i // 2}", "output": output, "gts": str(i // 2 + 1)}
        row |= {"score": score, "advantage": 0.5 - i % 2, "acc": score}
        rows.append(row | ({"failure": "it raised"} if score is None else {}))
    (folder / "rollouts").mkdir(exist_ok=True)
    (folder / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if tokens:
        values = {"rollout_log_probs": -3.0, "old_log_probs": -2.75, "ref_log_probs": -2.25, "advantages": 0.0}
        before = [[0 if t == 2 and i == 1 else t - 1 for t in range(len(row))] for i, row in enumerate(ids)]
        columns = {
            "prompt_length": torch.full((len(ids),), 5),
            "responses": Ragged.from_rows(ids, torch.int32),
            "response_mask": Ragged.from_rows([[1] * len(row) for row in ids], torch.int8),
            "predecessors": Ragged.from_rows(before, torch.int32),
            "truncated": torch.tensor([i == 0 for i in range(len(ids))], dtype=torch.int64),
            "weight_version": torch.full((len(ids),), step - 1),
            "last_weight_version": torch.full((len(ids),), step),
        }
        for name, value in values.items():
            columns[name] = Ragged.from_rows([[value + i] * len(row) for i, row in enumerate(ids)], torch.float32)
        write_tokens(DataProto.from_dict(columns), folder / "rollouts" / f"{step}.parquet", tokenizer.save_pretrained)
