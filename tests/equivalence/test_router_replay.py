"""With the sampler's experts the trainer computes what the sampler did, but for rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grpo_dist.engines.settings import PassLimits
from grpo_dist.engines.train.fsdp_engine import FSDPEngine
from grpo_dist.protocol import DataProto
from grpo_dist.protocol.sequences import PROMPT_ROUTES, ROUTES
from grpo_dist.workers.rollout import RolloutWorker
from tests.engines.vllm.test_engine import PROMPTS, generate, sampling
from tests.processes import spawned
from tests.ranks import run_ranks
from tests.worker_settings import engine_settings, model_settings

pytestmark = [pytest.mark.ray, pytest.mark.deep]

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def differences(rank: int, path: str, dtype: str, data: DataProto) -> dict[str, Any]:
    """Of the trainer's log-probs to the sampler's, with the recorded experts and without."""
    settings = model_settings(path, compute_dtype=dtype, replays_routes=True)
    engine = FSDPEngine(settings, device="cpu", temperature=0.7)
    free = DataProto({name: column for name, column in data.batch.items() if name not in (PROMPT_ROUTES, ROUTES)})
    columns = {name: engine.compute_log_probs(rows, PassLimits("", 32)) for name, rows in (("R3", data), ("", free))}
    before = data["rollout_log_probs"].values
    return {name: (column.values - before).double().numpy() for name, column in columns.items()}


@pytest.fixture(scope="module")
def found(local_ray: None, random_models: dict[str, str]) -> dict[str, Any]:
    path = random_models["experts"]
    with spawned("rollout", RolloutWorker, [(), ()], env={"OMP_NUM_THREADS": "1"}) as group:
        each = [engine_settings(path, dtype=dtype, records_routes=True) for dtype in DTYPES.values()]
        group.gather([group.submit(rank, "start", "start", settings) for rank, settings in enumerate(each)])
        asked = sampling(n=32, max_tokens=40, ignore_eos=True)
        batches = [generate(group, rank, PROMPTS, asked) for rank in range(2)]
        group.call_all("shutdown", "shutdown")
    return {dtype: run_ranks(1, differences, path, dtype, data)[0] for dtype, data in zip(DTYPES, batches, strict=True)}


def test_in_fp32_both_agree(found: dict[str, Any]) -> None:
    assert abs(found["fp32"]["R3"]).max() < 1e-5


def test_in_bf16_what_is_left_is_rounding(found: dict[str, Any]) -> None:
    """The mean of k3, e^x - x - 1, an estimate of the KL that is not negative."""
    kl = {name: (np.expm1(difference) - difference).mean() for name, difference in found["bf16"].items()}
    assert kl["R3"] * 5 < kl[""]
