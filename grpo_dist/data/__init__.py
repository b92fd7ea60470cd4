"""Prompts: rows in verl's schema, token ids, and a resumable sampler. Knows no Ray."""

from grpo_dist.assets.model_folder import load_tokenizer
from grpo_dist.data.files import read_rows
from grpo_dist.data.prompts import Prompt, load_prompts
from grpo_dist.data.sampler import PromptSampler
from grpo_dist.data.tokenize import TokenizedPrompt, tokenize_prompts

__all__ = [
    "Prompt",
    "PromptSampler",
    "TokenizedPrompt",
    "load_prompts",
    "load_tokenizer",
    "read_rows",
    "tokenize_prompts",
]
