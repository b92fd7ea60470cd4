"""GRPO steps of TRL's GRPOTrainer, timed; runs in TRL's own environment (see against_trl.py), not in ours.

python benchmarks/trl_steps.py WORK.json        prints one JSON line: seconds of each step, and accuracy by step
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
import trl_reward


class Clock(TrainerCallback):
    """Seconds from the begin of a step (generation included) to its end; validation after a step is not in them.

    Args:
        validation: rows with `prompt` and `answer`, whose share of right greedy answers is measured; none: never.
        every: steps between two validations, the first of which is before the first step.
    """

    def __init__(self, validation: list[dict[str, Any]], every: int) -> None:
        self.seconds: list[float] = []
        self.accuracy: dict[int, float] = {}
        self.validation, self.every = validation, every
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Validate the model as it is."""
        self._validate(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop it."""
        self.seconds.append(time.perf_counter() - self.started)
        if state.global_step % self.every == 0:
            self._validate(state.global_step)

    def _validate(self, step: int) -> None:
        if not self.validation:
            return
        model, tokenizer = self.trainer.model, self.trainer.processing_class
        texts = [
            tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            for row in self.validation
        ]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        with torch.no_grad():
            found = model.generate(
                **inputs, max_new_tokens=self.trainer.max_completion_length, do_sample=False, disable_compile=True
            )
        answers = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        completions = [[{"content": text}] for text in answers]
        right = trl_reward.right_sum(completions, [row["answer"] for row in self.validation])
        self.accuracy[step] = sum(right) / len(right)


def main() -> None:
    """Train and print."""
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    clock = Clock(work["validation"], work["validate_every"])
    lengths = {"generation_kwargs": {"min_new_tokens": work["response_tokens"]}} if work["full_length"] else {}
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=work["micro_batch"],
        gradient_accumulation_steps=work["prompts"] * work["n"] // work["micro_batch"],
        num_generations=work["n"],
        max_completion_length=work["response_tokens"],
        temperature=work["temperature"],
        beta=work["kl_loss_coef"],
        loss_type="bnpo",  # verl's token-mean
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        weight_decay=work["weight_decay"],
        max_grad_norm=work["max_grad_norm"],
        seed=work["seed"],
        max_steps=work["steps"],
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=work["bf16"],
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        disable_tqdm=True,
        **lengths,
    )
    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=getattr(trl_reward, work["reward"]),
        args=config,
        train_dataset=Dataset.from_list(work["train"]),
        callbacks=[clock],
    )
    clock.trainer = trainer
    trainer.train()
    sys.stdout.write("\n" + json.dumps({"seconds": clock.seconds, "accuracy": clock.accuracy}) + "\n")


if __name__ == "__main__":
    main()
