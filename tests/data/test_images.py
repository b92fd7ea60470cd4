"""Images of rows: every form that they come in, what is told of those that are none, and what the model gets."""

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.data import images
from grpo_dist.data.images import ImageProcessor, open_image
from grpo_dist.data.prompts import Columns, Prompt, checked_prompt
from grpo_dist.data.tokenize import tokenize_prompts
from grpo_dist.errors import ConfigError, DataError
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.media import MEDIA, Media
from tests.messages import refuses
from tests.models import random_qwen3
from tests.pictures import image, mrope_model, picture_model

PNG = image(1)
ADDRESS = "data:image/png;base64," + base64.b64encode(PNG).decode()
ASKED = "How many?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return picture_model(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def processor(folder: str) -> ImageProcessor:
    return ImageProcessor(folder, setting="actor_rollout_ref.model.path=M", trust_remote_code=False)


def read(row: dict[str, Any], image_key: str | None = "images") -> Prompt:
    plain = {"data_source": "s", "reward_model": {"ground_truth": "1"}, "prompt": ASKED}
    return checked_prompt(plain | row, 0, "f, row 1", "data.train_files", Columns(image_key=image_key))


def parts(*content: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": list(content)}]}


TEXT = {"type": "text", "text": ASKED}


def test_every_form_is_the_same_image_before_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    path = str(tmp_path / "a.png")
    for row in (
        {"images": [{"bytes": PNG, "path": None}]},  # verl's and TRL's parquet
        {"images": np.array([{"bytes": PNG, "path": None}], dtype=object)},  # an array of parquet
        {"images": path},
        {"images": [{"image": f"file://{path}"}]},  # verl's
        {"images": [PNG]},
        {"images": [ADDRESS]},
        {"images": [Image.open(io.BytesIO(PNG))]},
        parts({"type": "image", "image": path}, TEXT),
        parts({"type": "image_url", "image_url": {"url": ADDRESS}}, TEXT),  # OpenAI's
        parts({"type": "image"}, TEXT) | {"images": [PNG]},  # a part for the column
    ):
        prompt = read(row)
        assert prompt.messages == [{"role": "user", "content": f"<image>{ASKED}"}]
        opened, expected = (np.asarray(open_image(each, "")) for each in (*prompt.images, PNG))
        assert (opened == expected).all()


def test_marks_say_where_images_stand() -> None:
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": "A <image> or B <image>?"}]
    assert read({"prompt": messages, "images": [PNG, image(2)]}).messages == messages
    mixed = read(parts(TEXT, {"type": "image", "image": PNG}, TEXT, TEXT, {"type": "image", "image": PNG}))
    assert mixed.messages[0]["content"] == f"{ASKED}<image>{ASKED}\n{ASKED}<image>"
    assert read({"images": []}).images == read({}).images == ()


def test_a_row_that_cannot_be_read_is_named() -> None:
    for row, *told in (
        ({"images": ["https://a.org/b.png"]}, "https://a.org/b.png", "path"),
        ({"images": [7]}, "7", "Pillow"),
        ({"images": ["data:image/png;base64,???"]}, "base64"),
        ({"images": [PNG], "prompt": "<image> and <image>"}, "1 images", "2 times <image>"),
        ({"prompt": "<image>?"}, "0 images", "1 times <image>"),
        (parts({"type": "image", "image": PNG}) | {"images": [PNG]}, "data.image_key=images", "leave"),
        ({"videos": ["a.mp4"]}, "videos", "leave out"),
    ):
        with refuses(DataError, "data.train_files: f, row 1", *told):
            read(row)


def test_a_policy_of_text_gets_no_images() -> None:
    with refuses(DataError, "f, row 1", "images", "data.image_key=images"):
        read({"images": [PNG]}, image_key=None)
    with refuses(DataError, "f, row 1", "message 1"):
        read(parts({"type": "image", "image": PNG}, TEXT), image_key=None)


def huge() -> bytes:
    """A PNG of 20,000 x 20,000 pixels, in a few bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    head = (20_000).to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def test_a_file_that_is_no_image_is_told_with_its_row(processor: ImageProcessor, tmp_path: Path) -> None:
    for file, *told in (
        (PNG[:60], "60 bytes", "leave"),
        (b"text", "4 bytes"),
        (huge(), "pixels", "smaller"),
        (str(tmp_path / "gone.png"), "gone.png", "mend"),
    ):
        with refuses(DataError, "f, row 1", *told):
            processor.picture(file, "f, row 1")


def tokenized(processor: ImageProcessor, folder: str, row: dict[str, Any], **limits: Any) -> Any:
    options: dict[str, Any] = {"max_prompt_length": 99, "truncation": "error", "filter_overlong_prompts": False}
    options |= {"apply_chat_template_kwargs": {}, "image_processor": processor}
    tokenizer: Any = load_tokenizer(folder, trust_remote_code=False)
    (prompt,), _ = tokenize_prompts([read(row)], tokenizer, **(options | limits))
    return prompt


def test_a_prompt_is_what_the_models_processor_makes_of_it(processor: ImageProcessor, folder: str) -> None:
    from transformers import AutoProcessor

    images = [PNG, image(2, 20, 28)]
    prompt = tokenized(processor, folder, {"prompt": "A <image> or <image>?", "images": images})
    media = processor.media(images, prompt.token_ids, "")
    assert media is not None
    own = AutoProcessor.from_pretrained(folder)
    before, between, behind = (TEXT | {"text": text} for text in ("A ", " or ", "?"))
    messages = parts(before, {"type": "image"}, between, {"type": "image"}, behind)["prompt"]
    text = own.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = own(text=[text], images=[[open_image(each, "") for each in images]], return_tensors="np")
    assert prompt.token_ids.tolist() == expected["input_ids"][0].tolist()
    for name, whole in expected.items():
        if name not in ("input_ids", "attention_mask"):
            assert (np.concatenate([picture.tensors[name] for picture in media.pictures]) == whole[0]).all()
    assert media.pictures[0].digest == processor.picture(PNG, "").digest != media.pictures[1].digest


def test_pictures_are_not_cut_and_do_not_change(processor: ImageProcessor, folder: str) -> None:
    row = {"images": [PNG]}
    with refuses(DataError, "data.max_prompt_length=20", "f, row 1"):
        tokenized(processor, folder, row, max_prompt_length=20, truncation="left")
    prompt = tokenized(processor, folder, row)
    with refuses(DataError, "p1", "another one"):
        processor.media([PNG], prompt.token_ids[:12], "p1")


def test_a_model_without_images_is_told(tmp_path: Path) -> None:
    path = random_qwen3(tmp_path)
    with refuses(ConfigError, f"actor_rollout_ref.model.path={path}", "data.image_key", "qwen3", "idefics3"):
        ImageProcessor(path, setting=f"actor_rollout_ref.model.path={path}", trust_remote_code=False)


@pytest.mark.parametrize(("there", "remedy"), [(None, "EXTRAS=vision make setup"), (True, "processor")])
def test_a_processor_that_does_not_load_is_told(tmp_path: Path, there: Any, remedy: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(images, "find_spec", lambda name: there)
    with refuses(ConfigError, "M", "data.image_key", remedy):
        ImageProcessor(mrope_model("Qwen3VL", tmp_path), setting="M", trust_remote_code=False)


def test_pictures_come_back_from_a_file_once(processor: ImageProcessor, tmp_path: Path) -> None:
    first, second = processor.picture(PNG, ""), processor.picture(image(2), "")
    column = [Media((first, second), (1, 9)), None, Media((first,), (4,))]
    DataProto.from_dict({}, {"uid": ["a", "b", "c"], MEDIA: column}).save(tmp_path / "part")
    known, _ = json.loads((tmp_path / "part.json").read_text())[MEDIA]
    assert list(known) == [first.digest, second.digest]
    again = DataProto.load(tmp_path / "part")[MEDIA]
    assert again[1] is None
    assert again[0].pictures[0] is again[2].pictures[0]
    for picture, own in zip(again[0].pictures, (first, second), strict=True):
        assert (picture.digest, picture.thumbnail) == (own.digest, own.thumbnail)
        assert all((picture.tensors[name] == own.tensors[name]).all() for name in own.tensors)
        assert (picture.token_ids == own.token_ids).all()
    assert again[0].offsets == (1, 9)
