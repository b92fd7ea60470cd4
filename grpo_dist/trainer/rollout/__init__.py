"""Sampling a batch: which prompts, how groups flow through engines and reward processes, when a batch is full."""
