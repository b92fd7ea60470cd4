"""Rows in verl's schema: what is read, and how a broken row is named."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.data import Prompt, load_prompts, read_rows
from grpo_dist.data.prompts import add_system_prompt
from grpo_dist.errors import ConfigError, DataError
from tests.messages import refuses

KEY = "data.train_files"


def row(question: str = "1+1?", truth: object = "2", **changes: object) -> dict:
    return {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": 7, "split": "train"},
    } | changes


def write_jsonl(path: Path, *lines: object) -> str:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return str(path)


def load(*files: str, max_samples: int = -1, shuffle_seed: int | None = None, **keys: Any) -> list[Prompt]:
    names = {"prompt_key": "prompt", "reward_fn_key": "data_source"} | keys
    return load_prompts(files, key=KEY, max_samples=max_samples, shuffle_seed=shuffle_seed, **names)


def test_jsonl_json_and_parquet_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [row(), row("Wie groß? \u2028 両", "3")]
    write_jsonl(tmp_path / "a.jsonl", *[json.dumps(r, ensure_ascii=False) for r in rows])
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected = [("gsm8k", r["prompt"], r["reward_model"]["ground_truth"], r["extra_info"]) for r in rows]
    for suffix in ("jsonl", "json", "parquet"):
        prompts = load(str(tmp_path / f"a.{suffix}"))
        assert [(p.data_source, p.messages, p.ground_truth, p.extra_info) for p in prompts] == expected
        assert [p.index for p in prompts] == [0, 1]
        assert prompts[1].location.endswith(f"a.{suffix}, {'line' if suffix == 'jsonl' else 'row'} 2")


def test_read_rows_joins_files_in_order_and_skips_blank_lines(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "1.jsonl", {"x": 1}, "", {"x": 2})
    second = write_jsonl(tmp_path / "2.jsonl", "\ufeff" + json.dumps({"x": 3}))
    assert read_rows([second, first], key=KEY) == [{"x": 3}, {"x": 1}, {"x": 2}]


def test_parquet_arrays_become_lists_and_padding_nulls_go(tmp_path: Path) -> None:
    messages = np.array([{"role": "system", "content": "s", "name": "bot"}, {"role": "user", "content": "u"}])
    table = pa.Table.from_pylist([row(prompt=list(messages), extra_info={"targets": list(np.array([1, 2]))})])
    pq.write_table(table, tmp_path / "a.parquet")
    (prompt,) = load(str(tmp_path / "a.parquet"))
    assert prompt.messages == [{"role": "system", "content": "s", "name": "bot"}, {"role": "user", "content": "u"}]
    assert type(prompt.messages) is list
    assert type(prompt.extra_info["targets"]) is list
    assert prompt.extra_info["targets"] == [1, 2]


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_rows_of_calls_are_the_same_from_every_kind_of_file(tmp_path: Path) -> None:
    """Arrow gives every object of a column the fields of all: the arguments of the other tools, at any depth."""
    import datasets

    asked, answered = {"role": "user", "content": "do it"}, {"role": "tool", "content": "ok", "name": "x"}
    parts = {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "?", "cache": 1}]}
    several = [
        calls("move", to={"x": 0, "y": [1, None]}),
        calls("weather", city="Bern", at={"day": {"of": "month"}}),
        calls("stop"),
    ]
    rows = [row(prompt=[asked, call, answered, asked]) for call in several]
    in_parts = [row(prompt=[parts]), row(prompt=[parts | {"name": "Ann"}])]
    for number, group in enumerate((rows, in_parts)):
        write_jsonl(tmp_path / "a.jsonl", *group)
        pq.write_table(pa.Table.from_pylist(group), tmp_path / "a.parquet")
        datasets.Dataset.from_list(group).save_to_disk(tmp_path / f"saved{number}")
        lines, table, saved = (
            [p.messages for p in load(str(tmp_path / name))] for name in ("a.jsonl", "a.parquet", f"saved{number}")
        )
        assert lines == table == saved
    found = load(write_jsonl(tmp_path / "a.jsonl", *rows))[0].messages[1]
    assert found == {**several[0], "content": ""}, "null among the entries of a list stays"


def test_nulls_of_truths_and_of_extra_info_stay(tmp_path: Path) -> None:
    """Nobody knows what they say: a list of what is right may have one, and a function of one's own reads the rest."""
    truth, info = {"x": None, "y": [None, 1]}, {"tools_kwargs": {"calc": {"truth": None}}}
    pq.write_table(pa.Table.from_pylist([row(truth=truth, extra_info=info)]), tmp_path / "a.parquet")
    (prompt,) = load(str(tmp_path / "a.parquet"))
    assert (prompt.ground_truth, prompt.extra_info) == (truth, info)


def test_a_prompt_may_end_in_a_begun_turn_but_not_in_a_call(tmp_path: Path) -> None:
    asked, begun = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "Let me see:"}
    (prompt,) = load(write_jsonl(tmp_path / "a.jsonl", row(prompt=[asked, begun])))
    assert prompt.messages == [asked, begun]
    with refuses(DataError, f"{tmp_path}/a.jsonl, line 1", "prompt", "tool"):
        load(write_jsonl(tmp_path / "a.jsonl", row(prompt=[asked, calls("add", a=1)])))


def test_plain_string_other_columns_and_no_extra_info(tmp_path: Path) -> None:
    changed = row(question="Who?", task="qa")
    changed["text"] = changed.pop("prompt")[0]["content"]
    changed["extra_info"] = None
    file = write_jsonl(tmp_path / "a.jsonl", changed)
    (prompt,) = load(file, prompt_key="text", reward_fn_key="task")
    assert prompt.messages == [{"role": "user", "content": "Who?"}]
    assert (prompt.data_source, prompt.extra_info) == ("qa", {})


def test_where_a_model_scores_a_row_is_a_prompt(tmp_path: Path) -> None:
    """As in TRL's tldr rows; what a row has of the others is read and checked as ever."""
    rows = [
        {"prompt": "POST: a long story TL;DR:", "completion": "short"},
        {"prompt": "What?", "data_source": "hh", "reward_model": {"style": "model"}},
        row(),
    ]
    files = write_jsonl(tmp_path / "a.jsonl", *rows)
    found = load(files, needs_ground_truth=False, data_source="data")
    assert [(p.data_source, p.ground_truth) for p in found] == [("data", None), ("hh", None), ("gsm8k", "2")]
    assert found[0].messages == [{"role": "user", "content": "POST: a long story TL;DR:"}]
    with refuses(DataError, "a.jsonl, line 1", "data_source"):
        load(files)
    broken = write_jsonl(tmp_path / "b.jsonl", {"prompt": "What?", "reward_model": "yes"})
    with refuses(DataError, "b.jsonl, line 1", "reward_model"):
        load(broken, needs_ground_truth=False, data_source="data")


def test_max_samples_first_or_seeded_subset(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", *[row(f"q{i}") for i in range(20)])
    assert [p.index for p in load(file, max_samples=3)] == [0, 1, 2]
    subset = [p.index for p in load(file, max_samples=5, shuffle_seed=1)]
    assert subset == [p.index for p in load(file, max_samples=5, shuffle_seed=1)]
    assert subset == sorted(set(subset))
    assert subset != [p.index for p in load(file, max_samples=5, shuffle_seed=2)]
    assert [p.messages[0]["content"] for p in load(file, max_samples=5, shuffle_seed=1)] == [f"q{i}" for i in subset]
    assert len(load(file, max_samples=99)) == 20


def test_builtin_rows_come_from_the_task_module(monkeypatch: pytest.MonkeyPatch) -> None:
    task = types.ModuleType("grpo_dist.tasks.arithmetic")
    task.rows = lambda split: [row(split)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, task.__name__, task)
    (prompt,) = load("builtin:arithmetic/validation")
    assert prompt.messages[0]["content"] == "validation"
    assert prompt.location == "builtin:arithmetic/validation, row 1"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("missing.parquet", "file"),
        ("missing.csv", ".parquet, .jsonl or .json"),
        ("builtin:arithmetic/test", "builtin:arithmetic/train, builtin:arithmetic/validation"),
        ("builtin:chess/train", "built-in"),
    ],
)
def test_a_file_that_cannot_be_is_named_with_its_key(file: str, words: str) -> None:
    with refuses(DataError, words, f"{KEY}={file}") as error:
        load(file)
    assert isinstance(error.value, ConfigError)
    assert error.value.exit_code == 2


def test_folder_empty_file_no_files_and_broken_files(tmp_path: Path) -> None:
    (tmp_path / "dir.parquet").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "object.json").write_text('{"data_source": "x"}')
    (tmp_path / "lines.json").write_text("{}\n{}\n")
    (tmp_path / "latin.jsonl").write_bytes(b'\n{"a": "\xe9"}\n')
    cases = {
        "dir.parquet": ["folder"],
        "bad.parquet": ["parquet file"],
        "object.json": ["list", "dict"],
        "lines.json": ["valid JSON", ".jsonl"],
        "latin.jsonl": ["line 2", "valid JSON"],
    }
    for name, words in cases.items():
        with refuses(DataError, KEY, name, *words):
            load(str(tmp_path / name))
    with refuses(DataError, "empty.jsonl", "no rows"):
        load(write_jsonl(tmp_path / "empty.jsonl", ""))
    with refuses(DataError, f"{KEY}=[]", "no files", ".parquet"):
        load()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"prompt": ', ["valid JSON"]),
        ("[1, 2]", ["object", "list"]),
        (row(data_source=None), ["'data_source'", "data.reward_fn_key=data_source"]),
        (row(data_source=3), ["data_source", "string", "int 3"]),
        (row(prompt=None), ["'prompt'", "data.prompt_key=prompt", "data_source, prompt"]),
        (row(prompt=[]), ["prompt", "list"]),
        (row(prompt=5), ["prompt", "int 5"]),
        (row(prompt=["hello"]), ["role", "str 'hello'"]),
        (row(prompt=[{"content": "x"}]), ["role"]),
        (row(prompt=[{"role": "user"}]), ["content", "message 1", "text", "NoneType"]),
        (row(prompt=[{"role": "user", "content": [{"type": "image"}]}]), ["text", "list"]),
        (row(prompt="  "), ["prompt", "empty"]),
        (row(prompt=json.dumps([{"role": "user", "content": "1+1=?"}])), ["prompt", "JSON", "list"]),
        (row(reward_model=None), ["'reward_model'"]),
        (row(reward_model="2"), ["reward_model", "str '2'"]),
        (row(reward_model={"style": "rule"}), ["reward_model", "ground_truth"]),
        (row(extra_info=[1]), ["extra_info", "object", "list"]),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, bad: object, words: list[str]) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", row(), "", bad, row())
    with refuses(DataError, KEY, f"{file}, line 3", *words) as error:
        load(file)
    assert "\n" not in str(error.value)


def test_a_broken_parquet_row_beyond_the_sample_is_still_found(tmp_path: Path) -> None:
    rows = [row(f"q{i}") for i in range(6)]
    rows[4]["reward_model"] = {"style": "rule", "ground_truth": None}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with refuses(DataError, "a.parquet, row 5", "reward_model"):
        load(str(tmp_path / "a.parquet"), max_samples=2)


def test_the_system_prompt_goes_before_prompts_that_have_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "u"}]
    prompts = load(write_jsonl(tmp_path / "a.jsonl", row("q"), row(prompt=own)))
    changed, num_kept = add_system_prompt(prompts, "Be brief.")
    assert changed[0].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    assert changed[1] is prompts[1]
    assert num_kept == 1
    assert len(prompts[0].messages) == 1, "the rows themselves are not changed"


def test_a_broken_json_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([row(), row(prompt=[])]))
    with refuses(DataError, "a.json, row 2", "prompt", "list"):
        load(str(tmp_path / "a.json"))
