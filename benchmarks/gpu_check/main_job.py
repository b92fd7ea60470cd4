"""The main job as a user starts it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

from benchmarks.gpu_check.work import Work

# In six steps the built-in job's score goes from a third to more than four fifths.
LEAST_RISE = 0.2


def main_job(work: Work) -> None:
    """A few steps of the built-in job on this machine, from the command to its exit code."""
    from grpo_dist.tracking.jsonl import METRICS, read_metrics

    run_dir = work.folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    cluster = "single_gpu" if work.device == "cuda" else "cpu"
    command = [sys.executable, "-m", "grpo_dist.main", "algorithm.adv_estimator=grpo", f"cluster={cluster}"]
    command += [f"trainer.default_local_dir={run_dir}", "ray_kwargs.ray_init.address=local", *work.scale.job]
    started = time.perf_counter()
    code = subprocess.run(command, check=False).returncode
    work.found.right("exit code", abs(code), 0)
    work.found.note("from the command to its end", time.perf_counter() - started, "s")
    if code:
        return
    rows = [row for row in read_metrics(run_dir / METRICS) if "critic/score/mean" in row]
    first, last = (float(row["critic/score/mean"]) for row in (rows[0], rows[-1]))
    work.found.at_least(
        f"rise of the score in {len(rows)} steps", last - first, LEAST_RISE, note=f"{first:.3g} to {last:.3g}"
    )
    work.found.note("a step", float(rows[-1]["perf/time_per_step"]), "s")
    difference = float(rows[-1]["training/rollout_probs_diff_mean"])
    work.found.note("mean difference of token probability, trainer against vLLM", difference)
    shutil.rmtree(run_dir)
