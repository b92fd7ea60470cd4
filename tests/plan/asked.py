"""Runs in short, and tables of what they are refused with.

Loaded without pytest, which environments of faked_gpu.py lack.
"""

import re
from typing import Any

from grpo_dist.config.schema import RunConfig
from grpo_dist.plan.commands import load_config

# How a key begins -> its section; a word -> the overrides that it stands for.
SECTIONS = {f"{name}.": f"actor_rollout_ref.{name}." for name in ("actor", "rollout", "model", "ref")} | {
    "correction.": "algorithm.rollout_correction.",
    "endpoint.": "actor_rollout_ref.ref.model.endpoint.",
    "loop=": "actor_rollout_ref.rollout.agent.default_agent_loop=",
    "adv=": "algorithm.adv_estimator=",
    "loss=": "actor_rollout_ref.actor.policy_loss.loss_mode=",
    "TP=": "actor_rollout_ref.rollout.tensor_model_parallel_size=",
    "nodes=": "trainer.nnodes=",
    "gpus=": "trainer.n_gpus_per_node=",
    "actors=": "cluster.actor_world_size=",
    "engines=": "cluster.rollout_world_size=",
    "refs=": "cluster.ref_world_size=",
    "ulysses=": "actor_rollout_ref.actor.ulysses_sequence_parallel_size=",
    "fsdp_size=": "actor_rollout_ref.actor.fsdp_config.fsdp_size=",
    "sync.": "actor_rollout_ref.rollout.checkpoint_engine.",
    "gdpo_": "algorithm.gdpo_",
    "vllm.": "actor_rollout_ref.rollout.engine_kwargs.vllm.",
}
KEY = re.compile(rf"^(\+?)({'|'.join(map(re.escape, SECTIONS))})")
WORDS = {
    "GPU8": "cluster=node8  data.train_batch_size=64  actor.ppo_mini_batch_size=64",
    "TOOLS": "loop=tool_agent  rollout.agent.agent_kwargs={tools: [math:sqrt]}",
    "SCORER": "reward_model.enable=true  reward_model.model.path=builtin:tiny-qwen3",
    "TEACHER": "ref.model.path=builtin:tiny-qwen3",
    "TAUGHT": "recipe=distill  endpoint.base_url=http://teacher:8000/v1  endpoint.model=big",
    "RETRAINED": "recipe=deepseekmath_iterative  reward_model.model.path=builtin:tiny-qwen3",
}


def overrides(*runs: str) -> list[str]:
    """The parts of runs, which stand two spaces apart, with whole keys."""
    found: list[str] = []
    for part in re.split(r"  +", "  ".join(runs).strip()):
        if part in WORDS:
            found += overrides(WORDS[part])
        elif part:
            found.append(KEY.sub(lambda key: key[1] + SECTIONS[key[2]], part))
    return found


def load(*runs: str) -> RunConfig:
    return load_config(overrides(*runs))[0]


def notes(*runs: str) -> list[str]:
    return load_config(overrides(*runs))[1]


def refused(*runs: str) -> str:
    """The only problem of a run."""
    from tests.config import refusals

    return refusals.refused(*overrides(*runs))


def rows(table: str) -> list[Any]:
    """A run and what it is refused with, of each line: overrides that are named | what else is | others, unnamed."""
    import pytest

    found = []
    for line in filter(None, (re.sub(r"#.*", "", line).strip() for line in table.splitlines())):
        named, also, beside = (overrides(cell) for cell in (*line.split("|"), "", "")[:3])
        found.append(pytest.param([*beside, *named], [*named, *also], id=re.sub(r"\s+", " ", line)))
    return found
