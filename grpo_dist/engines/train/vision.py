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
from grpo_dist.protocol.media import BATCHED, Picture


class VisionTower:
    """What a model folder has besides its language part; see above."""

    def __init__(self, settings: ModelSettings, language: Any, device: torch.device) -> None:
        self._model, self._device = load_vision_part(settings, language.base_model, str(device)), device
        self._is_batched = BATCHED[self._model.config.model_type]
        self._features: Tensor | None = None
        self._deep: list[Tensor] = []
        self._numbers: Tensor | None = None
        language.get_input_embeddings().register_forward_hook(self._place)

    @torch.no_grad()
    def show(self, pictures: Sequence[Picture], numbers: Tensor | None) -> None:
        """Compute pictures for the next pass of the language part.

        Args:
            numbers: of each of the pass's tokens, (B, L) int64; see `MicroBatch.features`.
        """
        self._features, self._numbers, self._deep = None, numbers, []
        if not pictures:
            return
        parts: list[list[Tensor]] = [[]] * len(pictures)
        shapes = [sorted((name, array.shape[1:]) for name, array in p.tensors.items()) for p in pictures]
        for shape in [shape for i, shape in enumerate(shapes) if shape not in shapes[:i]]:
            alike = [i for i, other in enumerate(shapes) if other == shape]
            sizes = [int(pictures[i].embedded.sum()) for i in alike]
            split = [levels.split(sizes) for levels in self._compute([pictures[i] for i in alike])]
            for i, part in zip(alike, zip(*split, strict=True), strict=True):
                parts[i] = list(part)
        self._features, *self._deep = (torch.cat(level) for level in zip(*parts, strict=True))

    def inputs(self) -> dict[str, Any]:
        """What the language part's first layers take of them besides (DeepStack, arXiv 2406.04334)."""
        if not self._deep or self._numbers is None:
            return {}
        seen = self._numbers >= 0
        return {
            "visual_pos_masks": seen,
            "deepstack_visual_embeds": [level[self._numbers[seen]] for level in self._deep],
        }

    def _compute(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The outputs of pictures of one shape, (F, H), and what goes into the first layers."""
        tensors = {
            name: torch.cat([torch.tensor(picture.tensors[name]) for picture in pictures]).to(self._device)
            for name in pictures[0].tensors
        }
        tensors = {name: tensor[None] for name, tensor in tensors.items()} if self._is_batched else tensors
        made = self._model.get_image_features(**tensors, return_dict=True)
        levels = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
        return [torch.cat([part.flatten(0, -2) for part in level]) for level in levels]

    def _place(self, module: nn.Module, arguments: Any, embeddings: Tensor) -> Tensor:
        """A hook behind the embedding."""
        if self._features is None or self._numbers is None:
            return embeddings
        features = self._features[self._numbers.clamp(min=0)].to(embeddings.dtype)
        return torch.where((self._numbers >= 0).unsqueeze(-1), features, embeddings)
