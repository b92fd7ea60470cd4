"""Rows of files, folders and hub data sets: splits named, what cannot be read refused; and rows written by commands."""

from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.data.conversion import local_examples, write_parquet
from grpo_dist.data.files import locate_rows, read_rows
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.tasks import arithmetic
from tests.messages import refuses, says

KEY = "data.train_files"


def questions(file: str) -> list[str]:
    return [row["question"] for row in read_rows([file], key=KEY)]


def refused(file: str) -> str:
    with pytest.raises(DataError) as error:
        read_rows([file], key=KEY)
    assert str(error.value).startswith(f"{KEY}={file}: ")
    assert isinstance(error.value, ConfigError)
    return str(error.value)


def rows(*questions: str) -> list[dict[str, str]]:
    return [{"question": question} for question in questions]


def write(path: Path, *texts: str) -> None:
    pq.write_table(pa.Table.from_pylist(rows(*texts)), path)


def test_read_rows_joins_files_in_order_and_skips_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"x": 1}\n\n{"x": 2}\n')
    (tmp_path / "2.jsonl").write_text('\ufeff{"x": 3}\n')
    assert read_rows([f"{tmp_path}/{i}.jsonl" for i in (2, 1)], key=KEY) == [{"x": 3}, {"x": 1}, {"x": 2}]
    place, row = next(locate_rows(["builtin:arithmetic/validation"], key=KEY))
    assert (place, row) == ("builtin:arithmetic/validation, row 1", arithmetic.rows("validation")[0])


def test_what_cannot_be_read_is_named_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dir.parquet").mkdir()
    Path("object.json").write_text('{"data_source": "x"}')
    Path("lines.json").write_text("{}\n{}\n")
    for name, *parts in (
        ("missing.parquet", "file", f"{KEY}=missing.parquet"),
        ("builtin:arithmetic/test", "builtin:arithmetic/train, builtin:arithmetic/validation"),
        ("builtin:chess/train", "built-in"),
        ("dir.parquet", "folder"),
        ("object.json", "list", "dict"),
        ("lines.json", "valid JSON", ".jsonl"),
    ):
        with refuses(DataError, KEY, name, *parts):
            read_rows([name], key=KEY)
    with refuses(DataError, f"{KEY}=[]", "no files", ".parquet"):
        read_rows([], key=KEY)


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets.Dataset.from_list(rows("a", "b", "c")).select([2, 0]).save_to_disk(tmp_path / "saved")
    assert questions(f"{tmp_path}/saved") == ["c", "a"]
    assert [where for where, _ in locate_rows([f"{tmp_path}/saved"], key=KEY)][1] == f"{tmp_path}/saved, row 2"
    says(refused(f"{tmp_path}/saved:train"), "out :train")
    train, test = (datasets.Dataset.from_list(rows(name)) for name in ("a", "b"))
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    assert questions(f"{tmp_path}/both:test") == ["b"]
    says(refused(f"{tmp_path}/both"), "several splits", ":test, :train")
    says(refused(f"{tmp_path}/both:dev"), "'dev'", ":test, :train")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/state.json").write_text("{}")
    says(refused(f"{tmp_path}/damaged"), "load:")


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
    (tmp_path / "named").mkdir()  # numbers that are part of a name
    write(tmp_path / "named/math500.parquet", "a")
    write(tmp_path / "named/aime24.parquet", "b")
    assert questions(f"{tmp_path}/named:math500") == ["a"]


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: str | None) -> datasets.DatasetDict:
        asked.append(names)
        return datasets.DatasetDict(train=datasets.Dataset.from_list(rows("a")))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    ((place, _),) = locate_rows(["hf:openai/gsm8k/main:train"], key=KEY)
    assert place == "hf:openai/gsm8k/main:train, row 1"
    assert questions("hf:openai/gsm8k") == ["a"], "the only split"
    assert asked == [("openai/gsm8k", "main"), ("openai/gsm8k", None)]
    says(refused("hf:openai/gsm8k:test"), "'test'", ":train")

    def fail(*names: str | None) -> None:
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    says(refused("hf:openai/gsm8k"), "ConnectionError: no network")
    assert "and more" not in refused("hf:openai/gsm8k")


# --- rows that commands write ----------------------------------------------------------------------------------------
def test_the_first_kind_is_read_and_shards_in_order(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(2):
        write_parquet([{"i": i}], tmp_path / "data" / f"train-0000{i}-of-00002.parquet")
    assert [row["i"] for _, row in local_examples(str(tmp_path), "train")] == [0, 1]
    (tmp_path / "train.jsonl").write_text('{"i": 7}\n')
    assert list(local_examples(str(tmp_path), "train")) == [(f"{tmp_path}/train.jsonl, line 1", {"i": 7})]
    with refuses(DataError, f"--local_dataset_path={tmp_path}", "test.jsonl"):
        local_examples(str(tmp_path), "test")
