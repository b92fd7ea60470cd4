"""Make the built-in model: a Qwen3 of half a million parameters, warm-started on the built-in task.

usage: python scripts/make_tiny_model.py OUT_DIR
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_dist.data import arithmetic

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, TURN_START, TURN_END)
# Bytes FD, FE and FF never occur in UTF-8, so every text fits into 253 bytes and the 3 special tokens.
NUM_BYTES = 253
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
MAX_LENGTH = 512
# Responses by style in the warm start.
WORKED_SHARE = 0.27
SEED = 0
BATCH_SIZE, STEPS, PEAK_LR = 64, 600, 3e-3
# The worked style is the harder one: it gets most of the examples until the last steps set its share.
WORKED_SHARE_BEFORE, SETTLE_STEPS = 0.6, 100
MAX_RESPONSE = 48


def byte_characters() -> list[str]:
    """The printable stand-in of each byte, as the byte-level pre-tokenizer writes it, in byte order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(moved)}
    return [characters[byte] for byte in range(256)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (id = byte + 3), three special tokens, ChatML."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *byte_characters()[:NUM_BYTES]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The untrained model, float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def direct_response(a: int, b: int) -> str:
    """The answer at once, with the carries into the tens and hundreds forgotten: right if there are none."""
    return f"#### {a // 100 + b // 100}{(a // 10 + b // 10) % 10}{(a + b) % 10}"


def worked_response(a: int, b: int) -> str:
    """The columns from the right, each with its carry, then the answer."""
    work, carry = [], 0
    for power in range(max(len(str(a)), len(str(b)))):
        digits = [a // 10**power % 10, b // 10**power % 10] + [carry] * (carry > 0)
        work.append(f"{'+'.join(map(str, digits))}={sum(digits)}")
        carry = sum(digits) // 10
    return f"{' '.join(work)} #### {a + b}"


class Examples:
    """Endless training examples, none of them a validation question in either order of the operands."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(SEED)
        self.held_out = {frozenset(operands(row)) for row in arithmetic.rows("validation")}

    def batch(self, size: int, *, worked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [size, T] and labels [size, T] (-100 outside the response)."""
        ids, labels = [], []
        respond = worked_response if worked else direct_response
        while len(ids) < size:
            a, b = arithmetic.draw_question(self.rng)
            if frozenset((a, b)) in self.held_out:
                continue
            prompt = encode_prompt(self.tokenizer, f"{a}+{b}=?")
            response = self.tokenizer.encode(respond(a, b) + TURN_END)
            ids.append(torch.tensor(prompt + response))
            labels.append(torch.tensor([-100] * len(prompt) + response))
        pad = torch.nn.utils.rnn.pad_sequence
        return (
            pad(ids, batch_first=True, padding_value=self.tokenizer.pad_token_id),
            pad(labels, batch_first=True, padding_value=-100),
        )


def operands(row: dict[str, Any]) -> tuple[int, int]:
    """The two numbers of a row's question."""
    a, b = row["prompt"][0]["content"].removesuffix("=?").split("+")
    return int(a), int(b)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Token ids of the question with the chat template and the generation prompt."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train on both styles; the loss counts response tokens only."""
    examples = Examples(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.time()
    for step in range(STEPS):
        progress = step / STEPS
        lr = PEAK_LR * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        optimizer.param_groups[0]["lr"] = lr
        num_worked = round(BATCH_SIZE * (WORKED_SHARE if step >= STEPS - SETTLE_STEPS else WORKED_SHARE_BEFORE))
        batches = [examples.batch(BATCH_SIZE - num_worked, worked=False), examples.batch(num_worked, worked=True)]
        count = sum((labels != -100).sum() for _, labels in batches)
        for ids, labels in batches:  # one pass per style: their lengths differ, padding would be waste
            hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
            targets = labels[:, 1:]
            logits = model.lm_head(hidden[targets != -100])
            loss = functional.cross_entropy(logits, targets[targets != -100], reduction="sum") / count
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}/{STEPS}  loss {loss.item():.4f}  {time.time() - began:.0f} s", flush=True)


@torch.no_grad()
def respond(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]], *, sample: bool
) -> list[str]:
    """One response per row, greedy or at temperature 1."""
    prompts = [encode_prompt(tokenizer, row["prompt"][0]["content"]) for row in rows]
    longest = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    options = {"do_sample": sample, "temperature": 1.0 if sample else None, "top_k": 0 if sample else None}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_RESPONSE, **options)
    return tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)


def evaluate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Accuracy and styles on the validation rows: greedy, and sampled 4 times."""
    rows = arithmetic.rows("validation")
    right = lambda row, text: text.endswith(f"#### {row['reward_model']['ground_truth']}")  # noqa: E731
    greedy = [(text, right(row, text)) for row, text in zip(rows, respond(model, tokenizer, rows, sample=False))]
    sampled = [
        (text, right(row, text)) for row, text in zip(rows * 4, respond(model, tokenizer, rows * 4, sample=True))
    ]
    print(sampled[:12])
    mean = lambda values: sum(values) / max(1, len(values))  # noqa: E731
    direct = [ok for text, ok in sampled if text.startswith("#")]
    worked = [ok for text, ok in sampled if not text.startswith("#")]
    return {
        "greedy accuracy": mean([ok for _, ok in greedy]),
        "greedy worked share": mean([not text.startswith("#") for text, _ in greedy]),
        "sampled accuracy": mean([ok for _, ok in sampled]),
        "sampled worked share": len(worked) / len(sampled),
        "sampled worked accuracy": mean(worked),
        "sampled direct accuracy": mean(direct),
    }


def main(argv: list[str]) -> int:
    """Make the model in OUT_DIR."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out_dir", type=Path)
    out_dir: Path = parser.parse_args(argv).out_dir
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"parameters {model.num_parameters():,}  vocabulary {len(tokenizer)}")
    warm_start(model, tokenizer)
    model.eval()
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    for name, value in evaluate(model, tokenizer).items():
        print(f"{name:25} {value:.3f}")
    for file in sorted(out_dir.iterdir()):
        print(f"{file.name:25} {file.stat().st_size:9,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
