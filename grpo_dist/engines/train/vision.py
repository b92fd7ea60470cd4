"""The vision part of a model, frozen, beside the language part that trains.

It stands whole on every rank, outside of FSDP: ranks may have pictures in some passes and none in others. A pass
computes each different picture once, however many rows have it; where a prompt is there once for all its responses, so
are its pictures. Its outputs take the place of the embeddings of the picture's tokens, as in the model's own class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.model_loading import load_vision_part
from grpo_dist.protocol.media import Picture


class VisionTower:
    """What a model folder has besides its language part; see above."""

    def __init__(self, settings: ModelSettings, language: Any, device: torch.device) -> None:
        self._model, self._device = load_vision_part(settings, language.base_model, str(device)), device
        self._features: Tensor | None = None
        self._numbers: Tensor | None = None
        language.get_input_embeddings().register_forward_hook(self._place)

    @torch.no_grad()
    def show(self, pictures: Sequence[Picture], numbers: Tensor | None) -> None:
        """Compute pictures for the next pass of the language part.

        Args:
            numbers: of each of the pass's tokens, (B, L) int64; see `MicroBatch.features`.
        """
        self._features, self._numbers = None, numbers
        if not pictures:
            return
        parts: list[Tensor] = [torch.empty(0)] * len(pictures)
        shapes = [sorted((name, array.shape[1:]) for name, array in p.tensors.items()) for p in pictures]
        for shape in [shape for i, shape in enumerate(shapes) if shape not in shapes[:i]]:
            alike = [i for i, other in enumerate(shapes) if other == shape]
            features = self._compute([pictures[i] for i in alike])
            sizes = [int(pictures[i].embedded.sum()) for i in alike]
            for i, part in zip(alike, features.split(sizes), strict=True):
                parts[i] = part
        self._features = torch.cat(parts)

    def _compute(self, pictures: Sequence[Picture]) -> Tensor:
        """The outputs of pictures of one shape, (F, H)."""
        tensors = {
            name: torch.cat([torch.tensor(picture.tensors[name]) for picture in pictures])[None].to(self._device)
            for name in pictures[0].tensors
        }
        features: Tensor = self._model.get_image_features(**tensors, return_dict=True).pooler_output
        return features.flatten(0, -2)

    def _place(self, module: nn.Module, arguments: Any, embeddings: Tensor) -> Tensor:
        """A hook behind the embedding."""
        if self._features is None or self._numbers is None:
            return embeddings
        features = self._features[self._numbers.clamp(min=0)].to(embeddings.dtype)
        return torch.where((self._numbers >= 0).unsqueeze(-1), features, embeddings)
