"""The engines without a model do as they are told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_dist.engines.base import EngineLoad, Response
from grpo_dist.engines.fakes import LOG_PROB, TOKEN, FakeRolloutEngine, FakeTrainEngine
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.engines.weights.buckets import pack, unpack
from grpo_dist.errors import CheckpointError, EngineError, TrainingDiverged, WeightSyncError
from grpo_dist.protocol import metric_values
from tests.models import objective, random_batch

SAMPLING = SamplingSettings(3, 1.0, 1.0, -1, 9, 0)


def responses(engine: FakeRolloutEngine, uid: str = "a") -> list[Response] | None:
    return asyncio.run(engine.generate([1, 2], SAMPLING, uid))


def test_responses_grow_up_to_the_longest_length() -> None:
    engine = FakeRolloutEngine(length=8)
    found = responses(engine)
    assert found is not None
    assert [len(each.token_ids) for each in found] == [8, 9, 9]
    assert [each.truncated for each in found] == [False, True, True]
    assert (found[0].token_ids, found[0].log_probs) == ([TOKEN] * 8, [LOG_PROB] * 8)
    assert found[0].weight_versions == [-1] * 8


def test_new_weights_show_in_the_responses_and_old_ones_stay_after_a_failure() -> None:
    engine, buckets = FakeRolloutEngine(length=2, growth=0), list(pack([("w", torch.ones(2))], bucket_bytes=64))
    asyncio.run(engine.weights.load(buckets, 4))
    engine.weights.failure = WeightSyncError("damaged")
    with pytest.raises(WeightSyncError, match="damaged"):
        asyncio.run(engine.weights.receive(5))
    found = responses(engine)
    assert found is not None
    assert [each.weight_versions for each in found] == [[4, 4]] * 3


def test_a_failing_engine() -> None:
    engine = FakeRolloutEngine()
    engine.failure = EngineError("died")
    with pytest.raises(EngineError, match="died"):
        responses(engine)


def test_a_slow_engine_answers() -> None:
    engine = FakeRolloutEngine(length=1)
    engine.seconds = 0.01
    found = responses(engine)
    assert found is not None
    assert len(found) == 3
    assert not engine.running


def test_held_requests_are_released_or_aborted() -> None:
    async def run() -> tuple[EngineLoad, list[bool], EngineLoad]:
        engine = FakeRolloutEngine()
        engine.held = {"a", "b"}
        calls = [asyncio.ensure_future(engine.generate([1], SAMPLING, uid)) for uid in ("a", "b", "c")]
        while len(engine.running) < 2 or not calls[2].done():
            await asyncio.sleep(0)
        load = engine.load
        await engine.abort("a")
        await engine.abort("unknown")
        engine.release()
        found = await asyncio.gather(*calls)
        return load, [each is None for each in found], engine.load

    assert asyncio.run(run()) == (EngineLoad(running=2), [True, False, False], EngineLoad())


def test_a_pass_and_a_step() -> None:
    engine, data = FakeTrainEngine(), random_batch(num_groups=2, n=2)
    columns = engine.compute_columns(data, ("log_probs", "hidden_states", "values"), micro_batch_size=2)
    assert columns["log_probs"].lengths.tolist() == data["responses"].lengths.tolist()
    assert set(columns["log_probs"].values.tolist()) == {LOG_PROB}
    assert not columns["values"].values.any()
    assert columns["hidden_states"].values.shape == (int(data["responses"].lengths.sum()), 4)
    metrics, log_probs = engine.train_mini_batch(data, micro_batch_size=2, objective=objective(on_policy=True))
    assert (metric_values(metrics)["actor/loss"], engine.steps) == (4.0, [list(data["uid"])])
    assert log_probs is not None
    assert engine.train_mini_batch(data, micro_batch_size=2, objective=objective()).log_probs is None
    [(name, weights)] = engine.full_parameters("bfloat16")
    assert (name, weights.dtype, weights.tolist()) == ("weights", torch.bfloat16, [2.0] * 4)
    [(name, factor)] = engine.lora_factors("bfloat16")
    assert (name, factor.dtype, factor.tolist()) == ("factor", torch.bfloat16, [2.0])
    engine.failure = TrainingDiverged("no number")
    with pytest.raises(TrainingDiverged, match="no number"):
        engine.compute_columns(data, ("log_probs",), micro_batch_size=2)


def test_weights_move_and_are_saved_and_read(tmp_path: Path) -> None:
    engine, other = FakeTrainEngine(), FakeTrainEngine()
    other.weights += 8
    [bucket] = pack(other.full_parameters("float32"), bucket_bytes=64)
    engine.mix_parameters(unpack(bucket.data, bucket.entries), 0.25)
    assert (engine.weights.tolist(), engine.shares) == ([2.0] * 4, [0.25])
    assert engine.checkpoint_bytes() == 4 * 4
    engine.begin_save(tmp_path / "actor")
    files = engine.finished_save(wait=True)
    assert files is not None
    assert {path.name for path in (tmp_path / "actor").iterdir()} == files.keys()
    other.load_checkpoint(tmp_path / "actor")
    np.testing.assert_array_equal(other.weights, engine.weights)
    with pytest.raises(CheckpointError, match="nowhere"):
        other.load_checkpoint(tmp_path / "nowhere")
    other.export_hf_model(tmp_path / "huggingface", "bf16")
    assert (tmp_path / "huggingface" / "weights.json").is_file()
