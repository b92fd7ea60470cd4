"""The forms of an entry of data.train_files."""

from pathlib import Path

import pytest

from grpo_dist.config.data_files import DataFile, parse_data_file
from grpo_dist.config.keys import Problem
from tests.messages import says


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("builtin:arithmetic/train", DataFile("builtin", "arithmetic/train")),
        ("hf:openai/gsm8k", DataFile("hub", "openai/gsm8k")),
        ("hf:openai/gsm8k:train", DataFile("hub", "openai/gsm8k", None, "train")),
        ("hf:openai/gsm8k/main", DataFile("hub", "openai/gsm8k", "main")),
        ("hf:openai/gsm8k/main:test", DataFile("hub", "openai/gsm8k", "main", "test")),
    ],
)
def test_names(name, expected):
    assert parse_data_file("data.train_files", name) == expected


def test_files_and_folders(tmp_path):
    for name in ("a.jsonl", "folder/train.parquet", "saved/state.json", "a:b/x.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for name, kind, split in (
        ("a.jsonl", "file", None),
        ("folder", "parquet_folder", None),
        ("folder:train", "parquet_folder", "train"),
        ("saved:dev", "saved", "dev"),
        ("a:b", "parquet_folder", None),  # there is a folder of this name
    ):
        path = f"{tmp_path}/{name}".removesuffix(f":{split}")
        assert parse_data_file("data.train_files", f"{tmp_path}/{name}") == DataFile(kind, path, split=split)


@pytest.mark.parametrize(
    ("name", "parts", "missing"),
    [
        ("hf:gsm8k", ["hf:OWNER/NAME"], False),
        ("hf:a/b/c/d", ["hf:OWNER/NAME"], False),
        ("gone.parquet", ["file", Path.cwd()], True),
        ("/gone.parquet", ["file"], True),
        ("gone", ["folder", Path.cwd()], True),
        ("gone:train", ["folder"], True),
        ("rows.csv", [".parquet, .jsonl or .json", "folder"], False),
        (".", ["folder", ".parquet"], False),
    ],
)
def test_what_is_wrong(name, parts, missing):
    problem = parse_data_file("data.train_files", name)
    assert isinstance(problem, Problem)
    says(problem.text, *parts)
    assert problem.missing_file == missing


def test_a_missing_file_is_answered_with_the_one_beside_it_that_is_meant(tmp_path):
    (tmp_path / "train.parquet").touch()
    problem = parse_data_file("data.train_files", f"{tmp_path}/trian.parquet")
    assert isinstance(problem, Problem)
    says(problem.text, "'train.parquet'")
    unlike = parse_data_file("data.train_files", f"{tmp_path}/0.jsonl")
    assert isinstance(unlike, Problem)
    assert "train.parquet" not in unlike.text


def test_a_missing_library_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr("grpo_dist.config.data_files.find_spec", lambda name: None)
    problem = parse_data_file("data.train_files", "hf:openai/gsm8k")
    assert isinstance(problem, Problem)
    assert problem.missing_file
    says(problem.text, "pip install -e '.[datasets]'")
    assert isinstance(parse_data_file("data.train_files", "builtin:arithmetic/train"), DataFile)
