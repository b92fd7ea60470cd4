"""Images of rows: found in the row, opened, and made into pictures by the model's own processor.

A row has them in the column `data.image_key` (one, or a list), or as parts of its messages. Each is a path, the bytes
of a file, the object {"bytes": ..., "path": ...} of parquet files, a `data:` address, or an image of Pillow. In a
message's text `<image>` stands for the next one, as in verl; where no message has it they stand before the user's first
text, as in TRL. `Prompt.messages` have it too, so that whoever reads their text sees where the images are.

The prompt's tokens have one token for each image, for which the processor's tokens are put in. Each image is processed
alone, so what comes of it does not depend on its company.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from grpo_dist.data.files import shown
from grpo_dist.errors import ConfigError, DataError, in_a_line
from grpo_dist.protocol.media import BATCHED, THUMBNAIL, Media, Picture, file_of

MARK = "<image>"
KEY = "data.image_key"
_FIELDS = ("bytes", "image", "image_url", "url", "path")  # of objects, the one that has most first
MOST_SHOWN = 128  # pixels of a side
_NOT_MEDIA = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


# --- rows ------------------------------------------------------------------------------------------------------------
def text_with_marks(parts: Any, found: list[Any] | None) -> Any:
    """Return the text of a message's parts, a line or more for each text, with a mark for each image.

    Images that are in the parts go to `found`; None: there may be none. What is no list of these is returned as it is.
    """
    if not isinstance(parts, list) or not parts:
        return parts
    text, after_text = "", False
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text += "\n" * after_text + part["text"]
        elif kind in ("image", "image_url") and found is not None:
            text += MARK
            found += [value for name in _FIELDS if (value := part.get(name)) is not None][:1]
        else:
            return parts
        after_text = kind == "text"
    return text


def take_images(
    messages: list[dict[str, Any]], found: Sequence[Any], column: Any, key: str, where: str
) -> tuple[bytes | str, ...]:
    """Return a row's images, of its messages or of a column, in order: a file's bytes or its path.

    Messages without a mark get one for each image before the first text of the user.

    Raises:
        DataError: it has images in both places, or another number of marks, or one of them is none.
    """
    given = [] if column is None else list(column) if isinstance(column, list | tuple | np.ndarray) else [column]
    if given and found:
        raise DataError(f"{where}: images are in {key} and in the messages; leave one out ({KEY}={key})")
    images = tuple(_reference(value, where) for value in (given or found))
    marks = sum(message["content"].count(MARK) for message in messages)
    if images and not marks:
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"], marks = MARK * len(images) + first["content"], len(images)
    if marks != len(images):
        raise DataError(
            f"{where}: {len(images)} images in {key}, and {marks} times {MARK} in the messages; write one for each"
        )
    return images


def _reference(value: Any, where: str) -> bytes | str:
    """The bytes of an image's file, or its path."""
    if isinstance(value, Mapping):
        inner = next((value[name] for name in _FIELDS if value.get(name) is not None), None)
        if inner is not None:
            return _reference(inner, where)
    if (file := file_of(value)) is not None:
        return file
    if isinstance(value, str) and value.startswith("data:"):
        head, _, body = value.partition(",")
        try:
            return base64.b64decode(body, validate=True) if head.endswith(";base64") else body.encode()
        except binascii.Error as error:
            raise DataError(f"{where}: an image is a data: address that is no base64: {error}") from None
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(f"{where}: the image {value} is on another machine; load it, and write its path or its bytes")
    if isinstance(value, str | Path) and str(value):
        return str(value).removeprefix("file://")
    raise DataError(
        f"{where}: an image must be a path, bytes, an object with one of them, or of Pillow; got {shown(value)}"
    )


class Images(Sequence[Any]):
    """A row's images for a reward function: images of Pillow in RGB, opened when they are looked at."""

    def __init__(self, files: Sequence[bytes | str], where: str) -> None:
        self._files, self._where = files, where

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return open_image(self._files[place], self._where)


def read_image(image: bytes | str, where: str) -> bytes:
    """Return the bytes of an image's file."""
    if isinstance(image, bytes):
        return image
    try:
        return Path(image).expanduser().read_bytes()
    except OSError as error:
        raise DataError(f"{where}: the image {image} cannot be read: {error.strerror}; mend the path") from None


def open_image(image: bytes | str, where: str) -> Any:
    """Return an image of Pillow, in RGB, turned as its file says.

    Raises:
        DataError: it is no image, damaged, or has more pixels than Pillow takes for safe.
    """
    from PIL import Image, ImageOps

    data = read_image(image, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as file:
                return ImageOps.exif_transpose(file).convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise DataError(
            f"{where}: an image has more than {Image.MAX_IMAGE_PIXELS} pixels; make it smaller, or leave out the row"
        ) from None
    except Exception as error:  # noqa: BLE001 - decoders raise errors of many kinds
        what = f"an image of {len(data)} bytes cannot be read ({type(error).__name__}: {error})"
        raise DataError(f"{where}: {what}; mend it, or leave out the row") from None


def _thumbnail(opened: Any) -> str:
    small = opened.copy()
    small.thumbnail((MOST_SHOWN, MOST_SHOWN))
    with io.BytesIO() as file:
        small.save(file, format="JPEG")
        return THUMBNAIL + base64.b64encode(file.getvalue()).decode()


# --- prompts ---------------------------------------------------------------------------------------------------------
def as_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates of models with images take them: parts in place of texts with marks."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(text: str) -> str | list[dict[str, str]]:
    pieces = [piece for piece in re.split(f"({MARK})", text) if piece]
    parts = [{"type": "image"} if piece == MARK else {"type": "text", "text": piece} for piece in pieces]
    return parts if MARK in text else text


class ImageProcessor:
    """The processor of a model folder.

    Args:
        setting: the key and value that name the model, for messages.

    Raises:
        ConfigError: the model takes no images, or none that are known here.
    """

    def __init__(self, folder: str, *, setting: str, trust_remote_code: bool) -> None:
        from transformers import AutoConfig, AutoProcessor

        kind = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).model_type
        if kind not in BATCHED:
            known = ", ".join(BATCHED)
            raise ConfigError(f"{setting}, {KEY}: model_type={kind} takes no images here; those of {known} do")
        self._is_batched, self._lock = BATCHED[kind], Lock()  # processors are not made for several threads
        try:
            self._processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
            self._token, self._token_id = self._processor.image_token, int(self._processor.image_token_id)
        except Exception as error:  # noqa: BLE001 - of many kinds
            problem = f"its processor does not load: {in_a_line(error)}"
            remedy = "add the files of its processor" if find_spec("torchvision") else "EXTRAS=vision make setup"
            raise ConfigError(f"{setting}, {KEY}: {problem}; {remedy}") from None

    def token_ids(self, image: bytes | str, where: str) -> list[int]:
        """Open an image, and return the tokens that stand for it in a prompt."""
        return [int(token) for token in self._made(open_image(image, where))["input_ids"][0]]

    def _made(self, opened: Any) -> Any:
        with self._lock:
            return self._processor(text=[self._token], images=[[opened]], add_special_tokens=False, return_tensors="np")

    def picture(self, image: bytes | str, where: str) -> Picture:
        """Open an image, and make it into what the engine and the trainer take."""
        opened = open_image(image, where)
        made = self._made(opened)
        ids = np.asarray(made["input_ids"][0], np.int32)
        arrays = {"token_ids": ids, "embedded": ids == self._token_id}
        for name in sorted(set(made) - _NOT_MEDIA):
            arrays[name] = np.ascontiguousarray(made[name][0] if self._is_batched else made[name])
        if (grid := arrays.get("image_grid_thw")) is not None:  # arXiv 2409.12191: M-RoPE
            merged = grid[0] // (1, *[self._processor.image_processor.merge_size] * 2)
            arrays["positions"] = np.indices(merged, np.int32).reshape(3, -1).T.copy()
        digest = hashlib.blake2b(digest_size=16)
        for name, array in arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        return Picture(digest.hexdigest(), opened.size, _thumbnail(opened), arrays)

    def put_in(self, token_ids: Sequence[int], images: Sequence[bytes | str], where: str) -> list[int]:
        """Put the tokens of images in the places of the tokens that stand for them."""
        places = [i for i, token in enumerate(token_ids) if token == self._token_id]
        if len(places) != len(images):
            raise DataError(
                f"{where}: the model's chat template has written {len(places)} times {self._token} for {len(images)} "
                "images; use the template of a model with images"
            )
        expanded: list[int] = []
        for start, end, image in zip([-1, *places], places, images, strict=False):
            expanded += [*token_ids[start + 1 : end], *self.token_ids(image, where)]
        return expanded + list(token_ids[places[-1] + 1 :])

    def media(self, images: Sequence[bytes | str], token_ids: np.ndarray, where: str) -> Media | None:
        """Return the pictures of a prompt whose tokens they are among; None: it has none.

        Raises:
            DataError: they are others than those that the tokens were made with.
        """
        pictures, offsets, end = tuple(self.picture(image, where) for image in images), [], 0
        for picture in pictures:
            own, rest = picture.token_ids, token_ids[end:]
            windows: Any = np.lib.stride_tricks.sliding_window_view(rest, min(len(own), len(rest)))
            found = np.flatnonzero((windows == own).all(1)) if len(own) <= len(rest) else np.empty(0)
            if not len(found):
                break
            offsets.append(end + int(found[0]))
            end = offsets[-1] + len(own)
        if (
            len(offsets) < len(pictures)
            or sum(p.embedded.sum() for p in pictures) != (token_ids == self._token_id).sum()
        ):
            raise DataError(f"{where}: an image is another one than at the start of the run; mend the file")
        return Media(pictures, tuple(offsets)) if pictures else None
