"""Make the built-in model with images: an Idefics3 of 0.6 million parameters, warm-started on pictures of squares.

As make_tiny_model.py it mixes two styles of response to the same questions:

- direct (about 3 of 4): the answer at once, with the lower half of the picture forgotten, so it is right only where
  that has no such square (about 3 of 10 pictures);
- worked (the rest): row by row, then the answer; nearly always right.

Before these, and beside them, it learns to write down the board cell by cell: what teaches it to see.

Its pictures are others than those of the task's rows. Takes some minutes on one core.

usage: python scripts/make_tiny_vlm.py OUT_DIR
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional

from grpo_dist.data.images import ImageProcessor
from grpo_dist.tasks import squares
from scripts.make_tiny_model import make_tokenizer, show_made

# Of the user's turn: images and texts as parts.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{{- '<image>' if part.type == 'image' else part.text }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
IMAGE_TOKENS = ["<fake_token_around_image>", "<image>", "<global-img>"]
PIXELS, PATCH, SCALE = squares.SIDE * squares.CELL, squares.CELL, 2
SEQUENCE = (PIXELS // PATCH // SCALE) ** 2  # tokens of a picture
HIDDEN_SIZE, LAYERS, VISION_SIZE, VISION_LAYERS = 128, 3, 64, 2
SEED, PICTURES, BATCH_SIZE, STEPS, WARMUP_STEPS, PEAK_LR = 1, 12_000, 64, 1600, 50, 2e-3
DESCRIBING_STEPS, DESCRIBE = 500, "Board?"
LEARNING_SHARE, FINAL_SHARE, FINAL_STEPS = 0.5, 0.27, 100


def make_model(folder: Path) -> Any:
    """Write the processor, and return the untrained model, float32."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *IMAGE_TOKENS]})
    edge = {"longest_edge": PIXELS}
    images = transformers.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=SEQUENCE)
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "hidden_size": VISION_SIZE, "intermediate_size": 2 * VISION_SIZE, "num_hidden_layers": VISION_LAYERS,
        "num_attention_heads": 2, "image_size": PIXELS, "patch_size": PATCH,
    }  # fmt: skip
    config = transformers.Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=SCALE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    processor.save_pretrained(folder)
    config.save_pretrained(folder)
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def description(board: squares.Board) -> str:
    """The board cell by cell, by the first letters of the colours."""
    return "/".join("".join(cell[:1] or "." for cell in row) for row in board)


def direct_response(board: squares.Board, colour: str) -> str:
    """The squares of the upper half."""
    return f"#### {sum(squares.counts(board, colour)[: squares.SIDE // 2])}"


class Examples:
    """Pictures that are processed once, and asked for again in other words."""

    def __init__(self, folder: Path, count: int) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.processor = ImageProcessor(str(folder), setting=str(folder), trust_remote_code=False)
        self.rng = random.Random(SEED)
        made = [squares.example(self.rng) for _ in range(count)]
        self.boards = [board for board, _, _ in made]
        self.pictures = [self.processor.picture(image, "") for _, _, image in made]

    def prompt(self, text: str, number: int) -> list[int]:
        """Token ids of a question about a picture."""
        parts = [{"type": "image"}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": parts}]
        ids: Any = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return self.processor.put_in(ids, [self.pictures[number]], "")

    def batch(self, size: int, respond: Any = None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The model's inputs, and labels [size, T] (-100 outside the response); without `respond` descriptions."""
        ids, labels = [], []
        chosen = [self.rng.randrange(len(self.boards)) for _ in range(size)]
        for number in chosen:
            colour = self.rng.choice(list(squares.COLOURS))
            board = self.boards[number]
            prompt = self.prompt(squares.question(colour) if respond else DESCRIBE, number)
            text = respond(board, colour) if respond else description(board)
            response = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
            ids.append(torch.tensor([*prompt, *response]))
            labels.append(torch.tensor([*[-100] * len(prompt), *response]))
        pad = torch.nn.utils.rnn.pad_sequence
        inputs = {"input_ids": pad(ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)}
        for name in self.pictures[0].tensors:
            inputs[name] = torch.from_numpy(np.stack([self.pictures[number].tensors[name] for number in chosen]))
        return inputs, pad(labels, batch_first=True, padding_value=-100)


def warm_start(model: Any, examples: Examples) -> None:
    """Train on both styles; the loss is the mean over response tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(STEPS):
        warm, cosine = min(1.0, (step + 1) / WARMUP_STEPS), 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = PEAK_LR * warm * (0.02 + 0.98 * cosine)
        num_worked = round(BATCH_SIZE * (FINAL_SHARE if step >= STEPS - FINAL_STEPS else LEARNING_SHARE))
        of_each = (BATCH_SIZE - num_worked, direct_response), (num_worked, squares.worked_answer)
        batches = [examples.batch(size, respond) for size, respond in of_each if step >= DESCRIBING_STEPS]
        batches += [examples.batch(BATCH_SIZE if step < DESCRIBING_STEPS else BATCH_SIZE // 4)]
        num_tokens, total = sum(int((labels != -100).sum()) for _, labels in batches), 0.0
        for inputs, labels in batches:
            logits = model(**inputs, use_cache=False).logits[:, :-1]
            loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / num_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{STEPS}  loss {total:.4f}  {time.perf_counter() - began:.0f} s", flush=True)


@torch.no_grad()
def evaluate(model: Any, examples: Examples) -> dict[str, float]:
    """Accuracy and share of the worked style on the validation rows, greedy and sampled."""
    rows, processor, results = squares.rows("validation"), examples.processor, {}
    pictures = [processor.picture(row["images"][0]["bytes"], "") for row in rows]
    for name, sample in (("greedy", False), ("sampled", True)):
        right, worked = [], []
        for row, picture in zip(rows, pictures, strict=True):
            text = row["prompt"][0]["content"].removeprefix("<image>")
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
            ids: Any = examples.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            whole = processor.put_in(ids, [picture], "")
            inputs = {name: torch.from_numpy(array)[None] for name, array in picture.tensors.items()}
            options: dict[str, Any] = {"temperature": 1.0, "top_k": 0} if sample else {}
            out = model.generate(torch.tensor([whole]), **inputs, max_new_tokens=20, do_sample=sample, **options)
            answer = examples.tokenizer.decode(out[0, len(whole) :], skip_special_tokens=True)
            right.append(answer.endswith(f"#### {row['reward_model']['ground_truth']}"))
            worked.append(not answer.startswith("####"))
        results[f"{name} accuracy"], results[f"{name} worked share"] = np.mean(right), np.mean(worked)
        for kind, chosen in (("worked", worked), ("direct", [not each for each in worked])):
            of_kind = [ok for ok, one in zip(right, chosen, strict=True) if one]
            results[f"{name} {kind} accuracy"] = np.mean(of_kind) if of_kind else math.nan
    return results


def main(argv: list[str]) -> int:
    """Make the model in OUT_DIR and print what it can do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    out_dir: Path = parser.parse_args(argv).out_dir
    torch.set_num_threads(1)  # sums in another order would give other bytes
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    transformers.set_seed(SEED)
    model = make_model(out_dir)
    print(f"{model.num_parameters():,} parameters")
    examples = Examples(out_dir, PICTURES)
    warm_start(model, examples)
    model.eval()
    model.save_pretrained(out_dir)
    show_made(out_dir, evaluate(model, examples))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
