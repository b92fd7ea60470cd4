"""Every way to damage a model folder is told by name, and a good folder passes.

How a model is to be asked, beside the model.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import (
    FILE,
    INDEX,
    SINGLE,
    Usage,
    check_model_folder,
    end_token_ids,
    load_tokenizer,
    read_header,
    read_usage,
)
from grpo_dist.errors import DataError
from tests.messages import refuses, says

SETTING = "actor_rollout_ref.model.path=mine"
TINY = Path(resolve_model_path("builtin:tiny-qwen3"))
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def check(folder: Path, *, trust_remote_code: bool = False) -> object:
    return check_model_folder(folder, setting=SETTING, trust_remote_code=trust_remote_code)


def refused(folder: Path, **options: bool) -> str:
    with pytest.raises(DataError) as caught:
        check(folder, **options)
    message = str(caught.value)
    assert message.startswith(f"{SETTING}: ")
    assert len(message) < 1000
    return message


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same model in two files, of random numbers."""
    shapes = read_header(folder / SINGLE, SETTING)
    names = sorted(shapes)
    parts = {FIRST: names[::2], SECOND: names[1::2]}
    for file, tensors in parts.items():
        save_file({name: np.zeros(shapes[name], np.float32) for name in tensors}, folder / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()
    return folder


def test_good_folders(folder: Path, sharded: Path) -> None:
    found = check_model_folder(TINY, setting=SETTING, trust_remote_code=False)
    assert (found.model_type, found.vocab_size, found.num_files) == ("qwen3", 256, 1)
    assert len(found.shapes) == len(read_header(TINY / SINGLE, SETTING)) > 20
    both = check_model_folder(sharded, setting=SETTING, trust_remote_code=False)
    assert (both.shapes, both.num_files) == (found.shapes, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no config.json"]),
        (b"", ["config.json", "JSON"]),
        (b"{", ["config.json", "JSON"]),
        (b"\xff\xfe", ["config.json", "JSON"]),
        (b"[" * 100_000, ["config.json", "JSON"]),
        (b"[]", ["config.json", "object", "list"]),
        (b"{}", ["config.json", "model_type"]),
        (b'{"model_type": 3}', ["config.json", "model_type"]),
        (b'{"model_type": "qwen99"}', ["model_type='qwen99'", "transformers"]),
        (b'{"model_type": "../bert"}', ["model_type='../bert'"]),
        (b'{"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}', ["trust_remote_code=true"]),
        (b'{"auto_map": {"AutoConfig": "a.B"}}', ["trust_remote_code=true"]),
    ],
)
def test_config_json(folder: Path, text: bytes | None, words: list[str]) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text)
    says(refused(folder), *words)


def test_code_that_comes_with_the_model(folder: Path) -> None:
    change_config(folder, model_type="mine", auto_map={"AutoConfig": "a.B"})
    assert check(folder, trust_remote_code=True).model_type == "mine"
    change_config(folder, model_type="qwen3")
    assert check(folder).model_type == "qwen3", "the library has code of its own for it"


def test_the_vocabulary_of_another_model(folder: Path) -> None:
    change_config(folder, vocab_size=300)
    says(refused(folder), "config.json", "vocab_size=300", "256 rows", "model.embed_tokens.weight")
    change_config(folder, vocab_size="gone")
    assert check(folder).vocab_size is None


def test_no_weights_and_pickled_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()
    says(refused(folder), "no weights", SINGLE, INDEX)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    says(refused(folder), "pickled", "pytorch_model.bin", "save_pretrained")
    (folder / "pytorch_model.bin").unlink()
    (folder / SINGLE).mkdir()
    says(refused(folder), "no weights")


def test_truncated_weights_and_bytes_too_many(folder: Path) -> None:
    raw = (folder / SINGLE).read_bytes()
    for share in (0.0, 1e-6, 1e-5, 1e-3, 0.1, 0.5, 0.999):
        (folder / SINGLE).write_bytes(raw[: int(len(raw) * share)])
        says(refused(folder), SINGLE, "damaged")
    (folder / SINGLE).write_bytes(raw + b"more")
    says(refused(folder), SINGLE, "copy")


HEADERS = {
    "not an object": [],
    "a tensor without a shape": {"a": {"dtype": "F32", "data_offsets": [0, 4]}},
    "a tensor that is a number": {"a": 3},
    "a negative offset": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}},
    "a shape of text": {"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}},
    "another size": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    "a hole": {"a": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}},
    "overlaps": {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"},
    "a type that cannot be loaded": {"a": {"dtype": "F3", "shape": [5], "data_offsets": [0, 4]}},
    "beyond the end": {"a": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}},
}


def write_header(folder: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_contradict_themselves(folder: Path, case: str) -> None:
    write_header(folder, HEADERS[case])
    says(refused(folder), SINGLE, "damaged")


def test_types_of_numbers_that_numpy_does_not_have_and_no_tensors(folder: Path) -> None:
    for dtype, count in (("BF16", 2), ("F8_E4M3", 4), ("F4", 8)):
        write_header(folder, {"a": {"dtype": dtype, "shape": [count], "data_offsets": [0, 4]}})
        assert check(folder).num_parameters == count
    (folder / SINGLE).write_bytes(struct.pack("<Q", 2) + b"{}")
    says(refused(folder), "no tensors", SINGLE)


def exchange_shards(folder: Path) -> None:
    (folder / FIRST).rename(folder / "kept")
    (folder / SECOND).rename(folder / FIRST)
    (folder / "kept").rename(folder / SECOND)


def write_index(content: object) -> Callable[[Path], object]:
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda folder: (folder / INDEX).write_text(text)


INDEXES = {
    "a missing shard": (lambda folder: (folder / SECOND).unlink(), [INDEX, "files", SECOND]),
    "exchanged shards": (exchange_shards, [INDEX, "tensors", FIRST]),
    "not JSON": (write_index("{"), [INDEX, "JSON"]),
    "a list": (write_index([]), [INDEX, "object"]),
    "no map": (write_index({}), [INDEX, "weight_map"]),
    "an empty map": (write_index({"weight_map": {}}), [INDEX, "weight_map"]),
    "a map of numbers": (write_index({"weight_map": {"a": 3}}), [INDEX, "of a", "folder"]),
    "a way out": (write_index({"weight_map": {"a": "../x.safetensors"}}), [INDEX, "of a", "../x.safetensors"]),
    "a folder": (write_index({"weight_map": {"a": ".."}}), [INDEX, "files"]),
    "a name too long": (write_index({"weight_map": {"a": "x" * 5000}}), [SETTING, "long"]),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_does_not_fit(sharded: Path, case: str) -> None:
    damage, words = INDEXES[case]
    damage(sharded)
    says(refused(sharded), *words)


def test_the_tokens_that_end_a_response(folder: Path) -> None:
    """Of config.json and generation_config.json together, each one number, several or none."""
    generation = folder / "generation_config.json"
    assert end_token_ids(folder, setting=SETTING) == {2}
    change_config(folder, eos_token_id=[5, 7])
    assert end_token_ids(folder, setting=SETTING) == {2, 5, 7}
    generation.write_text(json.dumps({"eos_token_id": [5, 9]}))
    change_config(folder, text_config={"eos_token_id": None})
    assert end_token_ids(folder, setting=SETTING) == {5, 9}
    generation.write_text("{")
    with refuses(DataError, SETTING, "generation_config.json"):
        end_token_ids(folder, setting=SETTING)
    generation.unlink()
    assert end_token_ids(folder, setting=SETTING) == set()


def test_usage_is_read_as_it_was_written_and_nothing_else(tmp_path: Path) -> None:
    assert read_usage(tmp_path) == Usage()
    usage = Usage(3, "Be brief.", {"enable_thinking": False}, {"stop": ["end"]}, "ab", "cd", "bf16")
    usage.write(tmp_path)
    usage.write(tmp_path)
    assert read_usage(tmp_path) == usage
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    for text in ('{"steps": 3}', "[]", "{"):
        (tmp_path / FILE).write_text(text)
        with refuses(DataError, tmp_path / FILE):
            read_usage(tmp_path)


def test_load_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    def without(*parts: str, folder: Path = tmp_path) -> None:
        with refuses(DataError, f"actor_rollout_ref.model.path={folder}:", *parts):
            load_tokenizer(str(folder), trust_remote_code=False)

    without("no such", "folder", folder=tmp_path / "gone")
    without("no config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    without("no tokenizer")  # transformers alone would return an empty one
    (tmp_path / "tokenizer.json").write_text("not json")
    without("load", "tokenizer:")
