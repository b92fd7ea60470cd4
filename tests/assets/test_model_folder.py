"""Every way to damage the folder of a model or an adapter is told by name; how a model is to be asked."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_dist.assets import resolve_model_path
from grpo_dist.assets.model_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FILE,
    INDEX,
    SINGLE,
    ModelFolder,
    Usage,
    check_base,
    check_model_folder,
    end_token_ids,
    load_tokenizer,
    read_adapter_folder,
    read_header,
    read_usage,
)
from grpo_dist.errors import DataError
from tests.adapters import write_adapter
from tests.messages import refuses, says

SETTING = "actor_rollout_ref.model.path=mine"
TINY = Path(resolve_model_path("builtin:tiny-qwen3"))
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def check(folder: Path, *, trust_remote_code: bool = False) -> ModelFolder:
    return check_model_folder(folder, setting=SETTING, trust_remote_code=trust_remote_code)


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        check(folder)
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
    shapes = read_header(folder / SINGLE, SETTING)
    names = sorted(shapes)
    weight_map = dict.fromkeys(names[::2], FIRST) | dict.fromkeys(names[1::2], SECOND)
    for file in (FIRST, SECOND):
        tensors = {name: np.zeros(shapes[name], np.float32) for name in names if weight_map[name] == file}
        save_file(tensors, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()
    return folder


def test_good_folders(folder: Path, sharded: Path) -> None:
    found, both = check(TINY), check(sharded)
    assert (found.model_type, found.vocab_size, found.num_files) == ("qwen3", 256, 1)
    assert len(found.shapes) == len(read_header(TINY / SINGLE, SETTING)) > 20
    assert (both.shapes, both.num_files) == (found.shapes, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no config.json"]),
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


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", [INDEX, "JSON"]),
        ("[]", [INDEX, "object"]),
        ("{}", [INDEX, "weight_map"]),
        ('{"weight_map": {}}', [INDEX, "weight_map"]),
        ('{"weight_map": {"a": 3}}', [INDEX, "of a", "folder"]),
        ('{"weight_map": {"a": "../x.safetensors"}}', [INDEX, "of a", "../x.safetensors"]),
        ('{"weight_map": {"a": ".."}}', [INDEX, "files"]),
        pytest.param(json.dumps({"weight_map": {"a": "x" * 5000}}), [SETTING, "long"], id="a name too long"),
    ],
)
def test_an_index_that_does_not_fit(sharded: Path, index: str, words: list[str]) -> None:
    (sharded / INDEX).write_text(index)
    says(refused(sharded), *words)


def test_exchanged_shards_and_a_missing_one(sharded: Path) -> None:
    kept = (sharded / FIRST).rename(sharded / "kept")
    (sharded / SECOND).rename(sharded / FIRST)
    says(refused(sharded), INDEX, "files", SECOND)
    kept.rename(sharded / SECOND)
    says(refused(sharded), INDEX, "tensors", FIRST)


def test_the_tokens_that_end_a_response(folder: Path) -> None:
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


# --- adapters --------------------------------------------------------------------------------------------------------
ADAPTER = "actor_rollout_ref.model.lora_adapter_path=mine"
LAYERS = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.1.mlp.up_proj": (8, 12)}


def test_a_good_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", LAYERS, init_lora_weights="gaussian", lora_dropout=0.05)
    found = read_adapter_folder(folder, ADAPTER)
    assert (found.rank, found.alpha, found.layers) == (4, 8.0, LAYERS)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"bias": "lora_only"}, ['bias="lora_only"']),
        ({"modules_to_save": ["lm_head"]}, ['modules_to_save=["lm_head"]']),
        ({"init_lora_weights": "pissa"}, ['init_lora_weights="pissa"']),
        ({"peft_type": "IA3", "use_dora": True}, ['peft_type="IA3"', "use_dora=true"]),
        ({"r": 0}, ["r", "0"]),
        ({"r": None}, ["r", "null"]),
        ({"lora_alpha": "much"}, ["lora_alpha", '"much"']),
        ({"r": 2}, ["r=2", "(4, 8)"]),
    ],
)
def test_configs_that_are_not_taken(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    folder = write_adapter(tmp_path, LAYERS, **changes)
    with refuses(DataError, ADAPTER, ADAPTER_CONFIG, *parts):
        read_adapter_folder(folder, ADAPTER)


FACTOR = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
EMBEDDING = {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 8), np.float32)}


def change_tensors(folder: Path, **changes: Any) -> None:
    tensors = load_file(folder / ADAPTER_WEIGHTS) | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / ADAPTER_WEIGHTS)


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda folder: (folder / ADAPTER_CONFIG).unlink(), [ADAPTER_CONFIG, "save_pretrained"]),
    "no JSON": (lambda folder: (folder / ADAPTER_CONFIG).write_text("{"), [ADAPTER_CONFIG]),
    "no object": (lambda folder: (folder / ADAPTER_CONFIG).write_text("[]"), [ADAPTER_CONFIG, "list"]),
    "no weights": (
        lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), [ADAPTER_WEIGHTS, "save_pretrained(FOLDER)"]
    ),
    "pickled": (
        lambda folder: (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin"),
        ["adapter_model.bin", ADAPTER_WEIGHTS],
    ),
    "cut off": (
        lambda folder: (folder / ADAPTER_WEIGHTS).write_bytes((folder / ADAPTER_WEIGHTS).read_bytes()[:300]),
        [ADAPTER_WEIGHTS, "damaged"],
    ),
    "a factor is missing": (lambda folder: change_tensors(folder, **{FACTOR: None}), [FACTOR]),
    "empty": (lambda folder: save_file({}, folder / ADAPTER_WEIGHTS), ["no tensors"]),
    "an embedding": (lambda folder: change_tensors(folder, **EMBEDDING), [*EMBEDDING, "merge_and_unload"]),
    "no folder": (lambda folder: folder.rename(f"{folder}.gone"), [ADAPTER_CONFIG]),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_folders(tmp_path: Path, case: str) -> None:
    damage, parts = DAMAGES[case]
    folder = write_adapter(tmp_path / "adapter", LAYERS)
    damage(folder)
    with refuses(DataError, ADAPTER, *parts):
        read_adapter_folder(folder, ADAPTER)


def test_the_base_model(tmp_path: Path) -> None:
    adapter = read_adapter_folder(write_adapter(tmp_path, LAYERS), ADAPTER)
    shapes = {f"{name}.weight": (outputs, inputs) for name, (inputs, outputs) in LAYERS.items()}
    check_base(adapter, shapes, ADAPTER)
    check_base(adapter, {f"language_model.{name}": shape for name, shape in shapes.items()}, ADAPTER)
    check_base(adapter, {name.removeprefix("model."): shape[::-1] for name, shape in shapes.items()}, ADAPTER)
    with refuses(DataError, ADAPTER, "model.layers.1.mlp.up_proj", "8", "12", "(24, 8)", "base_model_name_or_path"):
        check_base(adapter, shapes | {"model.layers.1.mlp.up_proj.weight": (24, 8)}, ADAPTER)
    shapes.pop("model.layers.0.self_attn.q_proj.weight")
    with refuses(DataError, ADAPTER, "model.layers.0.self_attn.q_proj", "base_model_name_or_path"):
        check_base(adapter, shapes, ADAPTER)
