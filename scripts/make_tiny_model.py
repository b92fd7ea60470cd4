"""Make the built-in model: a Qwen3 of half a million parameters, warm-started on the built-in task.

The warm start mixes two styles of response to the same questions:

- direct (about 3 of 4): the answer at once, with the carries into the tens and hundreds forgotten, so it is
  right only where there are none (about 3 of 10 questions);
- worked (the rest): column by column with carries, then the answer; nearly always right.

Greedy decoding therefore answers directly and is mostly wrong, while sampling shows the worked style now and
then: enough for GRPO to find out that showing the work pays. Takes a few minutes on one core; the same machine
and library versions give the same bytes.

usage: python scripts/make_tiny_model.py OUT_DIR
       python scripts/make_tiny_model.py OUT_DIR --layers 2 --hidden-size 64        a model of another size, likewise
       python scripts/make_tiny_model.py OUT_DIR --untrained

--untrained leaves the warm start out: random weights, the "base" of a run that begins with supervised fine-tuning.
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

from grpo_dist.algorithms.losses import supervised_loss
from grpo_dist.data.training_rows import Conversation
from grpo_dist.data.training_tokens import tokenize_chats
from grpo_dist.tasks import arithmetic

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, TURN_START, TURN_END)
# Bytes FD, FE and FF never occur in UTF-8, so every text fits into 253 bytes and the 3 special tokens.
NUM_BYTES = 253
# Tools in Hermes' form; a token is a byte, and so they are told by their names and their arguments' alone.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}
{{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '<tool_call>\\n' + said | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LAYERS, HIDDEN_SIZE = 3, 128
MAX_LENGTH = 512  # positions; a question with its worked answer takes 65
SEED = 0
BATCH_SIZE, STEPS, WARMUP_STEPS = 64, 700, 50
PEAK_LR, LAST_LR_RATIO = 3e-3, 0.02
# Share of worked examples in a batch. Both styles are learned from equal parts; the last steps only set how often
# the model chooses which.
LEARNING_SHARE, FINAL_SHARE, FINAL_STEPS = 0.5, 0.27, 100
IGNORED = -100  # label of tokens outside the response
MAX_RESPONSE = 48
SAMPLES_PER_ROW = 4


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


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, layers: int = LAYERS, hidden_size: int = HIDDEN_SIZE
) -> Qwen3ForCausalLM:
    """The untrained model, float32."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
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
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def direct_response(a: int, b: int) -> str:
    """The answer at once, with the carries into the tens and hundreds forgotten: right if there are none."""
    return f"#### {a // 100 + b // 100}{(a // 10 + b // 10) % 10}{(a + b) % 10}"


class Examples:
    """Endless training examples, none of them a validation question in either order of the operands."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.rng = tokenizer, random.Random(SEED)
        self.held_out = {frozenset(operands(row)) for row in arithmetic.rows("validation")}

    def batch(self, size: int, *, worked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [size, T] and labels [size, T] (IGNORED outside the response)."""
        chats: list[Conversation] = []
        respond = arithmetic.worked_answer if worked else direct_response
        while len(chats) < size:
            a, b = arithmetic.draw_question(self.rng)
            if frozenset((a, b)) in self.held_out:
                continue
            question, answer = arithmetic.question(a, b), respond(a, b)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            chats.append(Conversation(question, messages, trained=(1,)))
        options: Any = {"max_length": MAX_LENGTH, "apply_chat_template_kwargs": {}, "end_ids": ()}
        examples, _ = tokenize_chats(chats, self.tokenizer, **options)
        ids = [torch.tensor([*each.prompt, *each.responses[0]]) for each in examples]
        labels = [torch.tensor([*[IGNORED] * len(each.prompt), *each.responses[0]]) for each in examples]
        pad = torch.nn.utils.rnn.pad_sequence
        return (
            pad(ids, batch_first=True, padding_value=self.tokenizer.pad_token_id),
            pad(labels, batch_first=True, padding_value=IGNORED),
        )


def operands(row: dict[str, Any]) -> tuple[int, int]:
    """The two numbers of a row's question."""
    a, b = row["prompt"][0]["content"].removesuffix("=?").split("+")
    return int(a), int(b)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """Token ids of the question with the chat template and the generation prompt."""
    messages = [{"role": "user", "content": question}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def learning_rate(step: int) -> float:
    """Linear warm-up times a cosine from the peak to its last share."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (LAST_LR_RATIO + (1 - LAST_LR_RATIO) * cosine)


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train on both styles; the loss is the mean over response tokens."""
    examples = Examples(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        share = FINAL_SHARE if step >= STEPS - FINAL_STEPS else LEARNING_SHARE
        num_worked = round(BATCH_SIZE * share)
        # One pass per style: their lengths differ, and padding would be waste.
        batches = [
            examples.batch(BATCH_SIZE - num_worked, worked=False),
            examples.batch(num_worked, worked=True),
        ]
        num_tokens = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        losses = [backward(model, ids, labels, num_tokens) for ids, labels in batches]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step + 1}/{STEPS}  loss {sum(losses):.4f}  {seconds:.0f} s", flush=True)


def backward(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor, num_tokens: int) -> float:
    """Add the gradient of the batch's share of the loss; returns that share."""
    targets = labels[:, 1:]
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    logits = model.lm_head(hidden[targets != IGNORED])
    log_probs = -functional.cross_entropy(logits, targets[targets != IGNORED], reduction="none")
    loss = supervised_loss(log_probs, torch.ones_like(log_probs), global_tokens=num_tokens)
    loss.backward()
    return loss.item()


@torch.no_grad()
def respond(model: Any, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]], *, sample: bool) -> list[str]:
    """One response per row, greedy or at temperature 1. All prompts of the task are equally long."""
    ids = torch.tensor([encode_prompt(tokenizer, row["prompt"][0]["content"]) for row in rows])
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 0} if sample else {}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_RESPONSE,
        do_sample=sample,
        **options,
    )
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def evaluate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Accuracy and share of the worked style on the validation rows, greedy and sampled."""
    results = {}
    for name, sample, rows in (
        ("greedy", False, arithmetic.rows("validation")),
        ("sampled", True, arithmetic.rows("validation") * SAMPLES_PER_ROW),
    ):
        texts = respond(model, tokenizer, rows, sample=sample)
        right = [
            text.endswith(f"#### {row['reward_model']['ground_truth']}") for row, text in zip(rows, texts, strict=True)
        ]
        direct = [ok for text, ok in zip(texts, right, strict=True) if text.startswith("####")]
        worked = [ok for text, ok in zip(texts, right, strict=True) if not text.startswith("####")]
        results[f"{name} accuracy"] = mean(right)
        results[f"{name} worked share"] = len(worked) / len(texts)
        results[f"{name} direct accuracy"] = mean(direct)
        results[f"{name} worked accuracy"] = mean(worked)
    return results


def mean(values: list[bool]) -> float:
    """Share of true values; nan where there are none."""
    return sum(values) / len(values) if values else math.nan


def show_made(out_dir: Path, results: dict[str, float]) -> None:
    """Let everybody read the files of a model, and print what it can do and how large they are."""
    for name, value in results.items():
        print(f"{name:24} {value:.3f}")
    for file in sorted(out_dir.iterdir()):
        file.chmod(0o644)  # the weights are written for the owner only, and the folder becomes part of a package
        print(f"{file.name:24} {file.stat().st_size:9,} bytes")


def main(argv: list[str]) -> int:
    """Make the model in OUT_DIR and print what it can do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--untrained", action="store_true", help="random weights, without the warm start")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE)
    options = parser.parse_args(argv)
    out_dir: Path = options.out_dir
    torch.set_num_threads(1)  # sums in another order would give other bytes
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, layers=options.layers, hidden_size=options.hidden_size)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}")
    if not options.untrained:
        warm_start(model, tokenizer)
    model.eval()
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    show_made(out_dir, {} if options.untrained else evaluate(model, tokenizer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
