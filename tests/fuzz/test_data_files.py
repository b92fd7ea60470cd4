"""Broken data files: a row is used as it stands, or one DataError names file, row and column; nothing is dropped."""

import copy
import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.assets import resolve_model_path
from grpo_dist.data import load_prompts, load_tokenizer, tokenize_prompts
from grpo_dist.data.prompts import Prompt
from grpo_dist.errors import DataError
from grpo_dist.rewards.contract import Sample
from tests.messages import says

KEY = "data.train_files"
ROWS, PARQUET_ROWS, BYTES = 800, 200, 600
LONGEST_MESSAGE = 2000

GOOD: dict[str, Any] = {
    "data_source": "gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train", "tags": ["a", "b"]},
}
PATHS: list[tuple[Any, ...]] = [
    ("data_source",), ("prompt",), ("prompt", 0), ("prompt", 1), ("prompt", 1, "role"), ("prompt", 1, "content"),
    ("ability",), ("reward_model",), ("reward_model", "style"), ("reward_model", "ground_truth"), ("extra_info",),
    ("extra_info", "index"), ("extra_info", "tags"),
]  # fmt: skip
COLUMNS = {path[0] for path in PATHS}
JUNK: list[Any] = [
    None, True, False, 0, -1, 2**63, 10**400, 0.0, -0.0, 1e308, math.nan, math.inf, -math.inf, "", " ", "\n", "text",
    "nan", "\x00", "\x07\x1b[31m", "\u202e\u200b\ufeff", "\ud800", "\udfff x", "e\u0301" * 50, "🙂👩‍👩‍👧", "﷽" * 20,
    "x" * 5000, "<|im_start|>", "{{ 7 * 7 }}", "{% for", "</s><s>[INST]", [], [[]], [None], ["a", 1, None],
    [{"role": "user"}], {}, [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}], {"a": {"b": {}}}, [{"role": None, "content": "x"}],
    [{"role": "user", "content": "x", "tool_calls": [{"x": 1}]}], {"ground_truth": None},
    {"ground_truth": [1, {"x": None}]}, {"": 1}, {"role": "user", "content": "x"}, [1] * 1000,
    {str(i): i for i in range(99)},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve_model_path("builtin:tiny-qwen3"), trust_remote_code=False)


def broken_row(rng: random.Random) -> dict[str, Any]:
    """A good row with one or two places changed or left out."""
    row = copy.deepcopy(GOOD)
    for _ in range(rng.choice([1, 1, 2])):
        *parents, last = rng.choice(PATHS)
        place: Any = row
        try:
            for name in parents:
                place = place[name]
            if rng.random() < 0.15:
                del place[last]
            else:
                place[last] = copy.deepcopy(rng.choice(JUNK))
        except (KeyError, IndexError, TypeError):
            continue  # the first change has taken the place away
    return row


def load(file: Path, tokenizer: Any) -> list[Prompt]:
    """What a run does with a file before it starts."""
    columns = {"prompt_key": "prompt", "reward_fn_key": "data_source"}
    prompts = load_prompts([str(file)], key=KEY, **columns, max_samples=-1, shuffle_seed=None)
    limits: dict[str, Any] = {"max_prompt_length": 512, "truncation": "left", "filter_overlong_prompts": False}
    tokenized, overlong = tokenize_prompts(prompts, tokenizer, **limits, apply_chat_template_kwargs={})
    assert len(tokenized) == len(prompts)
    assert len(overlong) <= len(prompts)
    for prompt in prompts:  # what a run does with a row later: hand it to the scorer, write it down
        Sample("response", prompt.data_source, prompt.ground_truth, prompt.extra_info, prompt.messages)
        json.dumps({"gts": prompt.ground_truth, "source": prompt.data_source}, ensure_ascii=False, default=str).encode()
    return prompts


def outcome(file: Path, tokenizer: Any, case: str) -> list[Prompt] | str:
    try:
        return load(file, tokenizer)
    except DataError as error:
        message = str(error)
        assert file.name in message, f"{case}: {message}"
        assert len(message) < LONGEST_MESSAGE, case
        return message
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {str(error)[:300]}") from error


def refused(file: Path, tokenizer: Any, case: str, *words: str) -> None:
    found = outcome(file, tokenizer, case)
    assert isinstance(found, str), case
    says(found, file.name, *words)


def cases(count: int, part: int) -> Iterator[tuple[random.Random, str]]:
    for seed in range(count):
        yield random.Random(seed * 10 + part), f"case {seed}"


def test_broken_rows_of_a_jsonl_file(tmp_path: Path, tokenizer: Any) -> None:
    good, used = json.dumps(GOOD), 0
    for rng, case in cases(ROWS, 0):
        row = broken_row(rng)
        file = tmp_path / "rows.jsonl"
        file.write_text(f"{good}\n{json.dumps(row)}\n{good}\n")
        case = f"{case}: {json.dumps(row)[:500]}"
        found = outcome(file, tokenizer, case)
        if isinstance(found, str):
            assert f"{file}, line 2: " in found, f"{case}: {found}"
            assert any(column in found for column in COLUMNS) or "not valid JSON" in found, f"{case}: {found}"
        else:
            assert [prompt.index for prompt in found] == [0, 1, 2], case
            kept = [row["reward_model"]["ground_truth"], row.get("extra_info") or {}]
            assert json.dumps([found[1].ground_truth, found[1].extra_info]) == json.dumps(kept), case
            used += 1
    assert ROWS / 10 < used < ROWS * 0.9


def canonical(value: Any) -> Any:
    """A row of a table has the fields and types of all rows: null stands for "not there", 1.0 for 1."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, dict):
        return {name: canonical(each) for name, each in value.items() if each is not None}
    return [canonical(each) for each in value] if isinstance(value, list) else value


def said(prompt: Prompt) -> list[Any]:
    return [prompt.data_source, prompt.messages, prompt.ground_truth, prompt.extra_info]


def written(row: dict[str, Any]) -> list[Any]:
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [row["data_source"], messages, row["reward_model"]["ground_truth"], row.get("extra_info") or {}]


def text(rows: list[list[Any]]) -> str:
    return json.dumps(canonical(rows), sort_keys=True)


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> bool:
    """Whether parquet has a form for the rows; a column that the first row lacks is there as well."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        arrays = [pa.array([row.get(name) for row in rows]) for name in columns]
        pq.write_table(pa.table(arrays, names=columns), file)
    except (pa.ArrowException, OverflowError, ValueError, TypeError, IndexError):
        return False
    return True


def test_broken_rows_of_a_parquet_file(tmp_path: Path, tokenizer: Any) -> None:
    """Between good rows; and alone, as what gives its columns their types, where the other rows have other ones."""
    file, used, refused = tmp_path / "rows.parquet", [0, 0], [0, 0]
    for rng, case in cases(PARQUET_ROWS, 1):
        row = broken_row(rng)
        alone = not write_parquet(file, [GOOD, row, GOOD])
        if alone and not write_parquet(file, [row]):
            continue
        case = f"{case}: {json.dumps(row)[:500]}"
        found = outcome(file, tokenizer, case)
        if isinstance(found, str):
            refused[alone] += 1
            assert f"{file}, row {1 if alone else 2}: " in found, f"{case}: {found}"
            assert any(column in found for column in COLUMNS), f"{case}: {found}"
        else:
            used[alone] += 1
            rows = [row] if alone else [GOOD, row, GOOD]
            assert text(list(map(said, found))) == text(list(map(written, rows))), case
    assert min(used + refused) > PARQUET_ROWS / 20, (used, refused)


def files(folder: Path) -> dict[str, bytes]:
    rows = [GOOD | {"extra_info": {"index": i}} for i in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "good.parquet")
    return {
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        "rows.json": json.dumps(rows).encode(),
        "rows.parquet": (folder / "good.parquet").read_bytes(),
    }


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Bits flipped, bytes put in or taken out, or the end cut off."""
    at = rng.randrange(len(raw))
    kind = rng.randrange(5)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + rng.randbytes(rng.choice([1, 3, 50])) + raw[at:]
    if kind == 2:
        return raw[:at] + raw[at + rng.choice([1, 10, 100]) :]
    for _ in range(rng.choice([1, 1, 5])):
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
    return raw


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_damaged_files(tmp_path: Path, tokenizer: Any, name: str) -> None:
    raw, found = files(tmp_path)[name], []
    for rng, case in cases(BYTES // 3, 2):
        (tmp_path / name).write_bytes(damaged(raw, rng))
        found.append(outcome(tmp_path / name, tokenizer, case))
    assert all(found)
    assert sum(isinstance(each, str) for each in found) > BYTES / 12


def good_text(**changes: Any) -> str:
    return json.dumps(GOOD | changes)


CONTENTS = {
    "nothing": (b"", ["no rows"]),
    "blank lines": (b"\n  \n\r\n", ["no rows"]),
    "a mark of byte order": (b"\xef\xbb\xbf", ["valid JSON"]),
    "another encoding": ('{"a": 1}'.encode("utf-16"), ["line 1", "valid JSON"]),
    "latin-1": (b'{"prompt": "\xe9"}', ["line 1", "valid JSON"]),
    "half a character": (good_text(prompt="\ud83d x").encode(), ["line 1", "valid JSON"]),
    "the other half": (good_text(data_source="\udc00").encode(), ["line 1", "valid JSON"]),
    "very deep": (b"[" * 200_000, ["line 1", "valid JSON"]),
    "a very long number": (b'{"a": ' + b"1" * 10_000 + b"}", ["line 1", "valid JSON"]),
    "a name twice": (b'{"prompt": "a", "prompt": "b"}', ["'prompt'", "twice"]),
    "a list": (b"[1]", ["line 1", "object"]),
    "null": (b"null", ["line 1", "object"]),
    "zeros": (b"\0" * 100, ["line 1", "valid JSON"]),
    "nan as the truth": (good_text(reward_model={"ground_truth": math.nan}).encode(), ["ground_truth", "nan"]),
    "infinity": (good_text(reward_model={"ground_truth": -math.inf}).encode(), ["ground_truth", "-inf"]),
    "many columns": (json.dumps({f"column {i}": i for i in range(10_000)}).encode(), ["no column", "'data_source'"]),
}


@pytest.mark.parametrize("case", CONTENTS)
def test_contents_of_a_jsonl_file(tmp_path: Path, tokenizer: Any, case: str) -> None:
    raw, words = CONTENTS[case]
    (tmp_path / "rows.jsonl").write_bytes(raw)
    refused(tmp_path / "rows.jsonl", tokenizer, case, *words)


def test_a_character_of_two_halves_a_row_twice_and_a_large_one_are_good(tmp_path: Path, tokenizer: Any) -> None:
    large = {"text": "x" * 2**20, "numbers": list(range(50_000)), "deep": json.loads("[" * 300 + "]" * 300)}
    halves = good_text(prompt="\U0001f642")
    assert "\\ud83d" in halves
    (tmp_path / "rows.jsonl").write_text("\n".join([halves, halves, good_text(extra_info=large)]))
    prompts = load(tmp_path / "rows.jsonl", tokenizer)
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert [prompt.messages[0]["content"] for prompt in prompts[:2]] == ["\U0001f642"] * 2
    assert prompts[2].extra_info == large


def text_of(*values: bytes) -> pa.Array:
    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(values), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))])


@pytest.mark.parametrize("nested", [False, True])
def test_a_prompt_in_parquet_that_is_not_utf8(tmp_path: Path, tokenizer: Any, nested: bool) -> None:
    """The rows before it can be read; the message says how many these are."""
    texts = text_of(b"1+1?", b"caf\xe9 \xff", "2+2? \u00e9".encode())
    if nested:
        messages = pa.StructArray.from_arrays([pa.array(["user"] * 3), texts], ["role", "content"])
        texts = pa.ListArray.from_arrays([0, 1, 2, 3], messages)
    rows = pa.Table.from_pylist([{name: value for name, value in GOOD.items() if name != "prompt"}] * 3)
    pq.write_table(rows.append_column("prompt", texts), tmp_path / "rows.parquet")
    refused(tmp_path / "rows.parquet", tokenizer, "not UTF-8", "after row 1", "'utf-8'")


def test_parquet_without_rows_or_columns_and_with_strange_ones(tmp_path: Path, tokenizer: Any) -> None:
    good = pa.Table.from_pylist([GOOD])
    twice = pa.table([good["data_source"], good["data_source"], good["prompt"]], names=["prompt", "prompt", "x"])
    dates = pa.array([2**62], pa.timestamp("us"))
    tables = {
        "no rows": (good.slice(0, 0), ["no rows"]),
        "no columns": (pa.table({}), ["no rows"]),
        "a column twice": (twice, ["several columns", "'prompt'"]),
        "no such column": (good.drop_columns(["prompt"]), ["row 1", "no column", "'prompt'"]),
        "bytes that are no text": (good.set_column(0, "data_source", text_of(b"\xff\xfe")), ["parquet file"]),
        "a date beyond all calendars": (good.append_column("when", dates), ["parquet file"]),
        "bytes for a prompt": (good.set_column(1, "prompt", pa.array([b"caf\xe9"])), ["row 1", "prompt", "bytes"]),
        "bytes for text": (good.set_column(0, "data_source", pa.array([b"gsm8k"])), ["row 1", "data_source"]),
    }
    for case, (table, words) in tables.items():
        pq.write_table(table, tmp_path / "rows.parquet")
        refused(tmp_path / "rows.parquet", tokenizer, case, *words)


def test_what_is_no_file_or_may_not_be_read(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    for name in ("folder.jsonl", "pipe.jsonl", "loop.jsonl", "gone.jsonl", "x" * 300 + ".jsonl"):
        refused(tmp_path / name, tokenizer, name)
    (tmp_path / "rows.jsonl").write_text(good_text())

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "rows.jsonl"))

    monkeypatch.setattr(Path, "open", refuse)
    refused(tmp_path / "rows.jsonl", tokenizer, "no permission", "read", "file:")
