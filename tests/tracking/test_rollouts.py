"""The files of rollouts: what is recorded, the tokenizer beside them, and the limit of their size."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from grpo_dist.errors import DiskError
from grpo_dist.protocol import DataProto, Ragged
from grpo_dist.protocol.fields import FIELDS
from grpo_dist.protocol.parquet import read_parquet
from grpo_dist.tracking.rollouts import is_recorded, make_room, recorded_steps, write_tokens
from tests.messages import refuses


class Tokenizer:
    saved = 0

    def save_pretrained(self, folder: str) -> None:
        Tokenizer.saved += 1
        Path(folder).mkdir()
        Path(folder, "tokenizer.json").write_text(json.dumps({"saved": Tokenizer.saved}))


def data() -> DataProto:
    return DataProto.from_dict({"responses": Ragged.from_rows([[1, 2]], torch.int32)})


def test_all_columns_but_the_large_ones_are_recorded() -> None:
    large = {"ref_hidden_states", "prompt_routes", "routes", "ref_top_ids", "ref_top_log_probs"}
    assert {name for name in FIELDS if not is_recorded(name)} == large
    assert is_recorded("reward_extra/acc")
    assert not is_recorded("mine")


def test_tokens_and_once_the_tokenizer(tmp_path: Path) -> None:
    Tokenizer.saved = 0
    for step in (1, 2):
        write_tokens(data(), tmp_path / "rollouts" / f"{step}.parquet", Tokenizer().save_pretrained)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")) == [
        "rollouts/1.parquet",
        "rollouts/2.parquet",
        "tokenizer/tokenizer.json",
    ]
    assert Tokenizer.saved == 1
    assert read_parquet(tmp_path / "rollouts" / "2.parquet")["responses"].values.tolist() == [1, 2]


def test_a_disk_that_refuses_is_told_with_the_keys_that_help(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("no folder")
    with refuses(DiskError, tmp_path / "rollouts" / "1.parquet", "trainer.log_rollouts=false"):
        write_tokens(data(), tmp_path / "rollouts" / "1.parquet", Tokenizer().save_pretrained)


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    """30 bytes a step: with 65 the newest two stay, in the order of numbers, not of names."""
    for step in (2, 9, 10, 11):
        (tmp_path / f"{step}.jsonl").write_bytes(b"0" * 10)
        (tmp_path / f"{step}.parquet").write_bytes(b"0" * 20)
    (tmp_path / "notes.txt").write_text("mine")
    assert make_room(tmp_path, 120) == []
    assert make_room(tmp_path, 65) == [2, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "10.jsonl", "10.parquet", "11.jsonl", "11.parquet", "notes.txt",
    ]  # fmt: skip
    assert make_room(tmp_path, 1) == [10], "the newest step stays"
    assert recorded_steps(tmp_path.parent) == []


def test_steps_in_order(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for name in ("10.jsonl", "9.jsonl", "9.parquet", "11.tmp"):
        (tmp_path / "rollouts" / name).touch()
    assert recorded_steps(tmp_path) == [9, 10]
