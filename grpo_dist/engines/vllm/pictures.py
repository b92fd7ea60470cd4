"""Pictures that are finished, in the form of vLLM's own: nothing of an image is processed a second time."""

from __future__ import annotations

from typing import Any, cast

import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature
from vllm.inputs.engine import mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from grpo_dist.protocol.media import BATCHED, Media

IMAGE = "image"  # vLLM's modality


def picture_maker(model_config: Any) -> Any:
    """Return vLLM's processor of a model, which knows what its class takes, and how its tensors are cut."""
    tokenizer = cast("Any", AutoTokenizer.from_pretrained(model_config.tokenizer))
    return MULTIMODAL_REGISTRY.create_processor(model_config, tokenizer=tokenizer)


def with_pictures(maker: Any, prompt: list[int], media: Media) -> Any:
    """Return a request of vLLM's: a prompt with its pictures, their digests and places."""
    items, is_batched = [], BATCHED[maker.info.get_hf_config().model_type]
    for picture in media.pictures:
        tensors = {name: torch.tensor(array)[None if is_batched else ...] for name, array in picture.tensors.items()}
        like = {"images": [Image.new("RGB", picture.size)]}  # of which it takes the size alone
        made = maker._postprocess_hf_mm_data(like, {}, BatchFeature(tensors))
        of_one = MultiModalKwargsItems.from_hf_inputs(made, maker._get_mm_fields_config(made, {}))
        items += of_one[IMAGE]
    places = [
        PlaceholderRange(offset, len(picture.token_ids), torch.tensor(picture.embedded))
        for picture, offset in zip(media.pictures, media.offsets, strict=True)
    ]
    digests = [picture.digest for picture in media.pictures]
    return mm_input(prompt, MultiModalKwargsItems({IMAGE: items}), {IMAGE: digests}, {IMAGE: places})
