"""A small random model with images, and images."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_dist.assets import resolve_model_path

# Parts of a message: images as their token, texts as they are.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def picture_model(folder: Path, family: str = "Idefics3") -> str:
    """A random Idefics3, or SmolVLM, with the processor of the first: 4 tokens for each image, of 28 pixels a side."""
    import transformers as hf

    tokenizer = hf.AutoTokenizer.from_pretrained(resolve_model_path("builtin:tiny-qwen3"))
    names = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = TEMPLATE
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": False}
    processor = hf.Idefics3Processor(hf.Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4)
    text: dict[str, Any] = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 7}
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    config = getattr(hf, f"{family}Config")(
        text_config=text, vision_config=vision, image_token_id=image_token, scale_factor=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForConditionalGeneration")(config)
    for parameter in model.parameters():  # else pictures change next to nothing
        parameter.data.mul_(3.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def image(seed: int = 0, width: int = 28, height: int = 28) -> bytes:
    """The file of a random image."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(noise).save(file, format="PNG")
        return file.getvalue()


# Models with M-RoPE: their text config, vision config and what the folder's config has besides.
_TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
_VISION |= {"patch_size": 14, "spatial_merge_size": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_LINEAR |= {"linear_value_head_dim": 8, "num_hidden_layers": 4, "head_dim": 32}
MROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VL": ({}, {"fullatt_block_indexes": [0], "window_size": 56}),
    "Qwen3VL": ({}, {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
    "Qwen3_5": (
        _LINEAR | {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}},
        {"num_position_embeddings": 16},
    ),
}
IMAGE_TOKEN = 5


def mrope_model(family: str, folder: Path) -> str:
    """A random model with M-RoPE, without a processor."""
    import transformers as hf

    text, vision = MROPE[family]
    parts = {"text_config": {"rope_parameters": _ROPE} | _TEXT | text, "vision_config": _VISION | vision}
    config = getattr(hf, f"{family}Config")(**parts, image_token_id=IMAGE_TOKEN, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = getattr(hf, f"{family}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    model.save_pretrained(folder)
    return str(folder)


class MropeProcessor:
    """What their processors do, which need torchvision: a token for each 28 x 28 pixels."""

    image_token, image_token_id = "<|image_pad|>", IMAGE_TOKEN

    def __init__(self) -> None:
        import transformers as hf

        size = {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
        self.image_processor = hf.Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=size)

    def __call__(self, text: Any, images: Any, **options: Any) -> dict[str, Any]:
        made = self.image_processor(images=images[0], return_tensors="np")
        return {"input_ids": [[IMAGE_TOKEN] * int(made["image_grid_thw"].prod() // 4)], **made}
