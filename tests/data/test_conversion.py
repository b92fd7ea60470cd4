from pathlib import Path

import pyarrow.parquet as pq

from grpo_dist.data.conversion import local_examples, require_text, write_parquet, write_splits
from grpo_dist.errors import DataError
from tests.messages import refuses


def test_the_first_kind_is_read_and_shards_in_order(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(2):
        write_parquet([{"i": i}], tmp_path / "data" / f"train-0000{i}-of-00002.parquet")
    assert [row["i"] for _, row in local_examples(str(tmp_path), "train")] == [0, 1]
    (tmp_path / "train.jsonl").write_text('{"i": 7}\n')
    assert [(where, row["i"]) for where, row in local_examples(str(tmp_path), "train")] == [
        (f"{tmp_path}/train.jsonl, line 1", 7)
    ]
    with refuses(DataError, f"--local_dataset_path={tmp_path}", "test.jsonl"):
        local_examples(str(tmp_path), "test")


def test_require_text() -> None:
    require_text({"a": "x"}, ("a",), "here")
    for bad in ({}, {"a": ""}, {"a": " "}, {"a": None}, {"a": 4}):
        with refuses(DataError, "here:", "'a'"):
            require_text(bad, ("a",), "here")


def test_write_splits(tmp_path: Path) -> None:
    assert write_splits({"x": [{"i": 1}]}, str(tmp_path / "new")) == {f"{tmp_path}/new/x.parquet": 1}
    assert pq.read_table(tmp_path / "new" / "x.parquet").to_pylist() == [{"i": 1}]
    (tmp_path / "file").write_text("")
    with refuses(DataError, "--local_save_dir=", "file:", "write"):
        write_splits({"x": [{"i": 1}]}, str(tmp_path / "file"))
