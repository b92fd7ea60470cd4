"""The forms of an entry of data.train_files."""

from pathlib import Path

import pytest

from grpo_dist.config.data_files import DataFile, DataFileProblem, parse_data_file


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
    assert parse_data_file(name) == expected


def test_files_and_folders(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.parquet").write_text("")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    assert parse_data_file(f"{tmp_path}/a.jsonl") == DataFile("file", f"{tmp_path}/a.jsonl")
    assert parse_data_file(f"{tmp_path}/folder") == DataFile("parquet_folder", f"{tmp_path}/folder")
    assert parse_data_file(f"{tmp_path}/folder:train") == DataFile(
        "parquet_folder", f"{tmp_path}/folder", split="train"
    )
    assert parse_data_file(f"{tmp_path}/saved:dev") == DataFile("saved", f"{tmp_path}/saved", split="dev")


def test_a_name_with_a_colon_that_exists_is_taken_as_it_is(tmp_path):
    (tmp_path / "a:b").mkdir()
    (tmp_path / "a:b" / "x.parquet").write_text("")
    assert parse_data_file(f"{tmp_path}/a:b") == DataFile("parquet_folder", f"{tmp_path}/a:b")


@pytest.mark.parametrize(
    ("name", "text", "missing"),
    [
        ("hf:gsm8k", "must be hf:OWNER/NAME", False),
        ("hf:a/b/c/d", "must be hf:OWNER/NAME", False),
        ("gone.parquet", f"no such file (looked in {Path.cwd()})", True),
        ("/gone.parquet", "no such file", True),
        ("gone", f"no such folder (looked in {Path.cwd()})", True),
        ("gone:train", "no such folder", True),
        ("rows.csv", "must end in .parquet, .jsonl or .json, be a folder", False),
        (".", "is a folder without .parquet files", False),
    ],
)
def test_what_is_wrong(name, text, missing):
    problem = parse_data_file(name)
    assert isinstance(problem, DataFileProblem)
    assert problem.text.startswith(text)
    assert problem.missing == missing


def test_a_missing_library_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr("grpo_dist.config.data_files.find_spec", lambda name: None)
    problem = parse_data_file("hf:openai/gsm8k")
    assert problem == DataFileProblem("needs the datasets library: pip install -e '.[datasets]'", missing=True)
    assert isinstance(parse_data_file("builtin:arithmetic/train"), DataFile)
