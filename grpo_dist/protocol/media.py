"""The pictures of a prompt, as its model's processor has made them: engine and trainer get the same ones."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MEDIA = "media"  # the column
THUMBNAIL = "data:image/jpeg;base64,"  # how each begins
# Models whose pictures are known, by model_type: whether what their processor makes has an axis for a batch too.
BATCHED = {"idefics3": True, "smolvlm": True, "qwen2_5_vl": False, "qwen3_vl": False, "qwen3_5": False}
_TOKENS, _EMBEDDED, _POSITIONS = "token_ids", "embedded", "positions"


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture; all that is here follows from the image and the processor.

    Attributes:
        digest: of the arrays: equal pictures are computed once.
        size: width and height of the image, in pixels.
        thumbnail: a `data:` address, for reports.
        arrays: (K,) `token_ids` and `embedded`, perhaps `positions`, and what the vision part takes.
    """

    digest: str
    size: tuple[int, int]
    thumbnail: str
    arrays: Mapping[str, np.ndarray]

    @property
    def token_ids(self) -> np.ndarray:
        """(K,) int32, what stands in the prompt for it."""
        return self.arrays[_TOKENS]

    @property
    def embedded(self) -> np.ndarray:
        """(K,) bool, the tokens whose embeddings are the vision part's outputs."""
        return self.arrays[_EMBEDDED]

    @property
    def positions(self) -> np.ndarray | None:
        """(K, 3) int32, rotary positions in time, height and width behind the picture's first; None: the usual ones."""
        return self.arrays.get(_POSITIONS)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """What the vision part takes, by name."""
        return {name: array for name, array in self.arrays.items() if name not in (_TOKENS, _EMBEDDED, _POSITIONS)}


@dataclass(frozen=True, eq=False)
class Media:
    """The pictures of a prompt in their order, and the places of their first tokens in it."""

    pictures: tuple[Picture, ...]
    offsets: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Equal prompts with equal digests are one prompt."""
        return " ".join(picture.digest for picture in self.pictures)


def file_of(image: Any) -> bytes | None:
    """Return the file of an image of Pillow, or bytes as they are; None: it is neither."""
    if isinstance(image, bytes | bytearray) or not hasattr(image, "convert"):
        return bytes(image) if isinstance(image, bytes | bytearray) else None
    with io.BytesIO() as file:
        image.convert("RGB").save(file, format="PNG")
        return file.getvalue()


def media_of(data: Any) -> Sequence[Media | None]:
    """Return the pictures of each row of a batch."""
    column: Sequence[Media | None] = data.non_tensor_batch.get(MEDIA, [None] * len(data))
    return column


def packed(column: Sequence[Media | None]) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Return a column for JSON, and its arrays once for each different picture, by digest and name."""
    pictures = {picture.digest: picture for media in column if media for picture in media.pictures}
    arrays = {f"{digest}/{name}": array for digest, each in pictures.items() for name, array in each.arrays.items()}
    rows = [media and [[each.digest for each in media.pictures], media.offsets] for media in column]
    return [{digest: [each.size, each.thumbnail] for digest, each in pictures.items()}, rows], arrays


def unpacked(values: Any, arrays: Mapping[str, np.ndarray]) -> list[Media | None]:
    """Return the column that `packed` tells of."""
    known, rows = values
    own: dict[str, dict[str, np.ndarray]] = {digest: {} for digest in known}
    for key, array in arrays.items():
        digest, _, name = key.partition("/")
        own[digest][name] = array
    pictures = {digest: Picture(digest, tuple(size), small, own[digest]) for digest, (size, small) in known.items()}
    return [row and Media(tuple(pictures[digest] for digest in row[0]), tuple(row[1])) for row in rows]
