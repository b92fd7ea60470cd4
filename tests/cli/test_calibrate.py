"""Calibration finds the rates behind measurements that were made up by known ones, and stores them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.cli import calibrate, probe
from grpo_dist.cli.calibrate import fitted, rates_of
from grpo_dist.cli.entry import main
from grpo_dist.config.step_estimate import OPTIMIZER_BYTES
from grpo_dist.config.step_rates import DecodeRates, PassRates, machine_rates
from grpo_dist.errors import GrpoDistError
from tests.messages import refuses, says

BANDWIDTH = 2e10
FORWARD = PassRates({64: 3e10, 256: 7e10, 768: 9e10}, 4e10, 0.003, 0.0004, 0.00005)
UPDATE = PassRates({64: 2e10, 256: 6e10, 768: 8e10}, 3e10, 0.01, 0.002, 0.00002)
DECODE = DecodeRates(0.001, 0.0005, 0.00006, 6e-9, 1.4, 2.0)


def measured() -> dict[str, Any]:
    """What a probe would find on a machine with these rates."""
    passes, decoding = [], []
    for hidden, layers, vocabulary in probe.TRAINED["cpu"]:
        key = max(hidden // 2, 64)  # of a hidden size of 64 there is one head, and one of keys
        matrices = layers * (2 * hidden * (max(hidden, 64) + key) + 9 * hidden**2)
        for groups, n, prompt, response in probe.PASSES:
            tokens, responses = groups * (prompt + n * response), groups * n * response
            products = 2.0 * (matrices * tokens + vocabulary * hidden * responses)
            pairs = groups * prompt**2 / 2 + responses * (prompt + response / 2)
            work = groups * n, products, 4.0 * layers * hidden * pairs
            sizes = {"hidden": hidden, "layers": layers, "vocabulary": vocabulary, "prompts": groups}
            sizes |= {"sequences": groups * n, "prompt": prompt, "response": response}
            update = UPDATE.seconds(hidden, layers, 1, work[0], 3 * work[1], 3 * work[2])
            update += OPTIMIZER_BYTES * (matrices + vocabulary * hidden) / BANDWIDTH
            passes.append(sizes | {"forward": FORWARD.seconds(hidden, layers, 1, *work), "update": update})
    for hidden, layers, vocabulary in probe.SAMPLED["cpu"]:
        key = max(hidden // 2, 64)
        weights = layers * (2 * hidden * (max(hidden, 64) + key) + 9 * hidden**2) + vocabulary * hidden
        for groups, n, prompt in probe.SAMPLES:
            running, context = groups * n, prompt + 14.0
            products = max(4 * weights / BANDWIDTH, running * 2 * weights / FORWARD.rate(hidden))
            step = DECODE.step_s + layers * DECODE.layer_s + running * (DECODE.sequence_s + vocabulary * DECODE.logit_s)
            step += DECODE.products * products + DECODE.cache * running * 2 * layers * key * 4 * context / BANDWIDTH
            sizes = {"hidden": hidden, "layers": layers, "vocabulary": vocabulary}
            decoding.append(sizes | {"sequences": running, "context": context, "step": step})
    line = [{"bytes": size, "seconds": 0.04 + size / 1e9} for size in (1e6, 1e8)]
    return {"bandwidth": BANDWIDTH, "passes": passes, "decoding": decoding, "syncs": line, "exchanges": line}


def test_the_rates_behind_measurements_are_found() -> None:
    found = rates_of(measured(), "cpu", "fp32")
    for rates, known in ((found.forward, FORWARD), (found.update, UPDATE)):
        assert dict(rates.flops) == pytest.approx(dict(known.flops))
        numbers = (rates.attention, rates.pass_s, rates.layer_s, rates.sequence_s)
        assert numbers == pytest.approx((known.attention, known.pass_s, known.layer_s, known.sequence_s))
    assert vars(found.decode) == pytest.approx(vars(DECODE))
    assert (found.sync["object_store"], found.sync_s) == pytest.approx((1e9, 0.04))
    assert (found.exchange, found.exchange_s) == pytest.approx((0.5e9, 0.04)), "half of the bytes come from elsewhere"


def test_without_vllm_decoding_is_left_out_and_on_gpus_so_are_transports() -> None:
    found = {name: points for name, points in measured().items() if name in ("bandwidth", "passes")}
    assert rates_of(found, "cpu", "fp32").decode == DecodeRates(0.0)
    assert rates_of(measured() | {"passes": found["passes"]}, "cuda", "bf16").sync["broadcast"] == 40e9


def test_no_cost_is_negative() -> None:
    """The best costs of a noisy measurement, 2 and -1, are no costs: one that explains it alone is."""
    rows = [[1.0, 0.0], [1.0, 1.0], [2.0, 1.0]]
    costs = fitted(rows, [2.0, 1.0, 3.0])
    assert costs[1] == 0
    assert costs[0] == pytest.approx((1 / 2 + 1 + 2 / 3) / (1 / 4 + 1 + 4 / 9)), "least squares of relative errors"
    assert fitted([[1.0, 0.0]], [3.0]) == pytest.approx([3.0, 0.0])


def test_what_is_measured_is_stored_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "physical_cores", lambda: 4)
    monkeypatch.setattr(calibrate, "has_bf16", lambda: True)
    asked: list[tuple[list[str], Any]] = []

    def run(command: list[str], env: Any = None) -> str:
        asked.append((command[2:], env))
        if command[2] == "grpo_dist.cli.probe":
            return "a warning\n" + json.dumps(measured())
        folder = Path(command[-1].partition("=")[2])
        times = [9.0, 9.0, 2.0, 4.0, 3.0]  # the first two are not counted
        rows = [{"timing_s/step": seconds, "response_length/mean": 12.4} for seconds in times]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in [{"val": 1}, *rows]))
        return ""

    monkeypatch.setattr(calibrate, "_run", run)
    assert main(["doctor", "--calibrate", "--device", "cpu"]) == 0
    assert asked[0] == (["grpo_dist.cli.probe", "cpu", "fp32"], {"OMP_NUM_THREADS": "1"})
    assert asked[1] == (["grpo_dist.cli.probe", "cpu", "bf16"], {"OMP_NUM_THREADS": "4"})
    stored = machine_rates("cpu")
    assert stored is not None
    assert set(stored.kinds) == {"1 fp32", "4 bf16"}
    assert 0 < stored.driver_s < 3 / 256, "what the step of 3 s takes besides its phases, for each of 256 sequences"
    says(capsys.readouterr().out, "1 thread", "bf16 with 4 threads", "GFLOP/s", "step_rates.json")


def test_a_measurement_that_fails_is_told() -> None:
    with refuses(GrpoDistError, "no-such-thing"):
        calibrate._run([sys.executable, "-c", "raise SystemExit('no-such-thing')"])
