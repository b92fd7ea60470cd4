"""A small random model with images, and images."""

from __future__ import annotations

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


def picture_model(folder: Path) -> str:
    """A random Idefics3 (SmolVLM's architecture) with its processor: 4 tokens for each image, of 28 pixels a side."""
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
    config = hf.Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=image_token, scale_factor=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model = hf.Idefics3ForConditionalGeneration(config)
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
