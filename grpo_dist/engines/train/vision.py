"""The vision part of a model, beside the language part that trains.

Frozen it stands whole on every rank, outside of FSDP. One that trains is a part of the model's root unit, and each pass
touches all of its weights: ranks may have pictures in some passes and none in others.

A pass computes each different picture once, however many rows have it; where a prompt is there once for all its
responses, so are its pictures. Its outputs take the place of the embeddings of the picture's tokens, as in the model's
own class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_dist.engines.settings import ModelSettings
from grpo_dist.engines.train.model_loading import VISION, load_vision, vision_part
from grpo_dist.protocol.media import BATCHED, Picture


class VisionTower:
    """What a model folder has besides its language part; see above."""

    def __init__(self, settings: ModelSettings, language: Any, device: torch.device) -> None:
        self._device, self._trains = device, settings.trains_vision
        if settings.trains_vision:
            self._model = getattr(language, VISION)
        else:
            whole = vision_part(settings, language.base_model)
            self._model = load_vision(whole, settings, str(device)).requires_grad_(False)
        self._is_batched = BATCHED[self._model.config.model_type]
        self._pictures: Sequence[Picture] = ()
        self._numbers = torch.empty(0)
        self._deep: list[Tensor] = []
        language.get_input_embeddings().register_forward_hook(self._place)

    def show(self, pictures: Sequence[Picture], numbers: Tensor | None) -> dict[str, Any]:
        """Have the next pass of the language part see pictures.

        Args:
            numbers: of each of the pass's tokens, (B, L) int64; see `MicroBatch.features`.

        Returns:
            What its first layers take of them besides (DeepStack, arXiv 2406.04334): filled in the pass.
        """
        self._pictures, self._deep = pictures, []
        if not pictures or numbers is None:
            return {}
        self._numbers = numbers
        is_deep = hasattr(self._model.config.vision_config, "deepstack_visual_indexes")
        return {"visual_pos_masks": numbers >= 0, "deepstack_visual_embeds": self._deep} if is_deep else {}

    def _place(self, module: nn.Module, arguments: Any, embeddings: Tensor) -> Tensor:
        """A hook behind the embedding: within the pass, where FSDP has gathered the weights."""
        if self._trains and torch.is_grad_enabled():
            embeddings = embeddings + 0 * sum(weight.sum() for weight in self._model.parameters())
        if not self._pictures:
            return embeddings
        with torch.set_grad_enabled(self._trains and torch.is_grad_enabled()):
            features, *deep = self._features()
        seen = self._numbers >= 0
        self._deep += [level[self._numbers[seen]] for level in deep]
        return torch.where(seen.unsqueeze(-1), features[self._numbers.clamp(min=0)].to(embeddings.dtype), embeddings)

    def _features(self) -> list[Tensor]:
        """The outputs of all pictures one behind the other, (F, H), and what goes into the first layers."""
        parts: list[list[Tensor]] = [[]] * len(self._pictures)
        shapes = [sorted((name, array.shape[1:]) for name, array in p.tensors.items()) for p in self._pictures]
        for shape in [shape for i, shape in enumerate(shapes) if shape not in shapes[:i]]:
            alike = [i for i, other in enumerate(shapes) if other == shape]
            sizes = [int(self._pictures[i].embedded.sum()) for i in alike]
            split = [levels.split(sizes) for levels in self._compute([self._pictures[i] for i in alike])]
            for i, part in zip(alike, zip(*split, strict=True), strict=True):
                parts[i] = list(part)
        return [torch.cat(level) for level in zip(*parts, strict=True)]

    def _compute(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The outputs of pictures of one shape, likewise."""
        tensors = {
            name: torch.cat([torch.tensor(picture.tensors[name]) for picture in pictures]).to(self._device)
            for name in pictures[0].tensors
        }
        tensors = {name: tensor[None] for name, tensor in tensors.items()} if self._is_batched else tensors
        made = self._model.get_image_features(**tensors, return_dict=True)
        levels = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
        return [torch.cat([part.flatten(0, -2) for part in level]) for level in levels]
