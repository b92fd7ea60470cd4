"""The pictures of a prompt, as its model's processor has made them: engine and trainer get the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MEDIA = "media"  # the column
# Models whose pictures are known, by model_type: the axis that the processor has too many, since it makes batches.
ITEM_AXES = {"idefics3": 0, "smolvlm": 0}


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture; all that is here follows from the image and the processor.

    Attributes:
        digest: of the rest: equal pictures are computed once.
        size: width and height of the image, in pixels.
        token_ids: (K,) int32, what stands in the prompt for it.
        embedded: (K,) bool, the tokens whose embeddings are the vision part's outputs.
        tensors: what the vision part takes, by name.
        thumbnail: a `data:` address, for reports.
    """

    digest: str
    size: tuple[int, int]
    token_ids: np.ndarray
    embedded: np.ndarray
    tensors: Mapping[str, np.ndarray]
    thumbnail: str = ""


@dataclass(frozen=True, eq=False)
class Media:
    """The pictures of a prompt in their order, and the places of their first tokens in it."""

    pictures: tuple[Picture, ...]
    offsets: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Equal prompts with equal digests are one prompt."""
        return " ".join(picture.digest for picture in self.pictures)


def media_of(data: Any) -> Sequence[Media | None]:
    """Return the pictures of each row of a batch."""
    column: Sequence[Media | None] = data.non_tensor_batch.get(MEDIA, [None] * len(data))
    return column


def to_json(media: Media | None) -> Any:
    """Return what JSON says of a prompt's pictures, whose arrays are stored by digest (`arrays_of`)."""
    return media and [[picture.digest, *picture.size, picture.thumbnail, offset] for picture, offset in _placed(media)]


def arrays_of(column: Any) -> dict[str, np.ndarray]:
    """Return the arrays of all pictures of a column once, by digest and name."""
    pictures = {picture.digest: picture for media in column if media is not None for picture in media.pictures}
    named = {"token_ids": None, "embedded": None}
    return {
        f"{digest}/{name}": getattr(picture, name) if name in named else picture.tensors[name]
        for digest, picture in pictures.items()
        for name in (*named, *picture.tensors)
    }


def from_json(column: Any, arrays: Mapping[str, np.ndarray]) -> list[Media | None]:
    """Return the column that `to_json` and `arrays_of` tell of."""
    of_picture: dict[str, dict[str, np.ndarray]] = {}
    for key, array in arrays.items():
        digest, _, name = key.partition("/")
        of_picture.setdefault(digest, {})[name] = array
    made: dict[str, Picture] = {}

    def picture(digest: str, width: int, height: int, thumbnail: str) -> Picture:
        if digest not in made:
            tensors = dict(of_picture[digest])
            ids, embedded = tensors.pop("token_ids"), tensors.pop("embedded")
            made[digest] = Picture(digest, (width, height), ids, embedded, tensors, thumbnail)
        return made[digest]

    return [rows and Media(tuple(picture(*row[:4]) for row in rows), tuple(row[4] for row in rows)) for rows in column]


def _placed(media: Media) -> zip[tuple[Picture, int]]:
    return zip(media.pictures, media.offsets, strict=True)
