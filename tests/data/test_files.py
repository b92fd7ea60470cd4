"""Folders and hub data sets: the same rows as from a file, splits named, broken rows named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.data import load_prompts
from grpo_dist.data.files import locate_rows, read_rows
from grpo_dist.errors import DataError
from tests.messages import refuses, says

KEY = "data.train_files"


def rows(*questions: str) -> list[dict]:
    return [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"index": index},
        }
        for index, question in enumerate(questions)
    ]


def questions(file: str) -> list[str]:
    return [row["prompt"][0]["content"] for row in read_rows([file], key=KEY)]


def refused(file: str) -> str:
    with pytest.raises(DataError) as error:
        read_rows([file], key=KEY)
    assert str(error.value).startswith(f"{KEY}={file}: ")
    return str(error.value)


def write(path: Path, *texts: str) -> None:
    pq.write_table(pa.Table.from_pylist(rows(*texts)), path)


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets.Dataset.from_list(rows("a", "b", "c")).select([2, 0]).save_to_disk(tmp_path / "saved")
    assert questions(f"{tmp_path}/saved") == ["c", "a"]
    assert [where for where, _ in locate_rows([f"{tmp_path}/saved"], key=KEY)][1] == f"{tmp_path}/saved, row 2"
    says(refused(f"{tmp_path}/saved:train"), "out :train")


def test_a_saved_data_set_with_splits(tmp_path: Path) -> None:
    train, test = (datasets.Dataset.from_list(rows(name)) for name in ("a", "b"))
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "saved")
    assert questions(f"{tmp_path}/saved:test") == ["b"]
    says(refused(f"{tmp_path}/saved"), "several splits", ":test, :train")
    says(refused(f"{tmp_path}/saved:dev"), "'dev'", ":test, :train")


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    write(tmp_path / "train-00001-of-00002.parquet", "b")
    write(tmp_path / "train-00000-of-00002.parquet", "a")
    assert questions(str(tmp_path)) == ["a", "b"]
    write(tmp_path / "test.parquet", "c")
    assert ":test, :train" in refused(str(tmp_path)), "training and test rows are never mixed without a word"
    assert questions(f"{tmp_path}:train") == ["a", "b"]
    assert questions(f"{tmp_path}:test") == ["c"]
    (_, _), (where, _) = locate_rows([f"{tmp_path}:train"], key=KEY)
    assert where == f"{tmp_path}/train-00001-of-00002.parquet, row 1"


@pytest.mark.parametrize("names", [("0000", "0001"), ("part-00000-c000.snappy", "part-00001-c000.snappy")])
def test_numbered_parquet_files_are_one_split(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, text in zip(names, "ab", strict=True):
        write(tmp_path / f"{name}.parquet", text)
    assert questions(str(tmp_path)) == ["a", "b"]


def test_numbers_that_are_part_of_a_name_are_not_shards(tmp_path: Path) -> None:
    write(tmp_path / "math500.parquet", "a")
    write(tmp_path / "aime24.parquet", "b")
    assert questions(f"{tmp_path}:math500") == ["a"]


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: str | None) -> datasets.DatasetDict:
        asked.append(names)
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows("a")))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert questions("hf:openai/gsm8k/main:train") == ["a"]
    assert questions("hf:openai/gsm8k") == ["a"], "the only split"
    assert asked == [("openai/gsm8k", "main"), ("openai/gsm8k", None)]
    says(refused("hf:openai/gsm8k:test"), "'test'", ":train")

    def fail(*names: str | None) -> None:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    says(refused("hf:openai/gsm8k"), "ConnectionError: no network")
    assert "and more" not in refused("hf:openai/gsm8k")


@pytest.mark.parametrize("kind", ["saved", "folder", "hub"])
def test_a_broken_row_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    broken = rows("a", "b")
    broken[1]["reward_model"]["ground_truth"] = None
    found = datasets.Dataset.from_list(broken)
    names = {"saved": f"{tmp_path}/saved", "folder": f"{tmp_path}/folder", "hub": "hf:own/data"}
    found.save_to_disk(names["saved"])
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.Table.from_pylist(broken), tmp_path / "folder" / "train.parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: found)
    place = f"{tmp_path}/folder/train.parquet" if kind == "folder" else names[kind]
    with refuses(DataError, KEY, f"{place}, row 2", "reward_model"):
        load_prompts(
            [names[kind]], key=KEY, prompt_key="prompt", reward_fn_key="data_source", max_samples=-1, shuffle_seed=None
        )


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.json").write_text(json.dumps({}))
    monkeypatch.setattr("grpo_dist.config.data_files.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for file in (str(tmp_path), "hf:openai/gsm8k"):
        says(refused(file), "pip install -e '.[datasets]'")
    monkeypatch.undo()
    says(refused(str(tmp_path)), "load:")  # a damaged folder


def test_folders_that_hold_nothing_to_read(tmp_path: Path) -> None:
    says(refused(str(tmp_path)), "folder", ".parquet")
    says(refused(f"{tmp_path}/gone"), f"{tmp_path}/gone", "no such", "folder")
    says(refused(f"{tmp_path}/gone:train"), f"{tmp_path}/gone", "no such", "folder")
