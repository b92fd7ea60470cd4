"""GRPO steps of TRL's GRPOTrainer, timed; runs in TRL's own environment (see against_trl.py), not in ours.

python benchmarks/trl_steps.py WORK.json        prints one JSON line: seconds of each step
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
from trl_reward import reward


class Clock(TrainerCallback):
    """Seconds from the begin of a step (generation included) to its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop it."""
        self.seconds.append(time.perf_counter() - self.started)


def main() -> None:
    """Train and print."""
    work = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(work["threads"])
    clock = Clock()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=work["micro_batch"],
        gradient_accumulation_steps=work["prompts"] * work["n"] // work["micro_batch"],
        num_generations=work["n"],
        max_completion_length=work["response_tokens"],
        generation_kwargs={"min_new_tokens": work["response_tokens"]},
        temperature=1.0,
        beta=0.001,
        learning_rate=1e-6,
        max_steps=work["steps"],
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=work["bf16"],
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=work["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work["messages"]]),
        callbacks=[clock],
    )
    trainer.train()
    sys.stdout.write("\n" + json.dumps({"seconds": clock.seconds, "threads": torch.get_num_threads()}) + "\n")


if __name__ == "__main__":
    main()
