from __future__ import annotations

from pathlib import Path

from grpo_dist.tracking.step_trace import Span, step_trace, write_trace
from scripts import plot_calls


def test_a_step_is_drawn(tmp_path: Path) -> None:
    calls = [Span("generate", 1, 2, "rollout", 0, "generate", (f"g{i}",)) for i in range(8)]
    calls.append(Span("update", 3, 4, "actor", 0, "update", ("g0", "g7")))
    stages = [Span("rollout", 1, 2)]
    trace = step_trace(3, 1, 5, stages=stages, calls=calls, base_ns=0, dropped=0)
    write_trace(tmp_path / "driver.json.gz", trace)
    plot_calls.main([str(tmp_path / "calls.png"), str(tmp_path / "driver.json.gz")])
    assert (tmp_path / "calls.png").read_bytes().startswith(b"\x89PNG")
    heights = plot_calls.rows(trace["traceEvents"])
    names = ["driver, stages", *("rollout, rank 0" + (f" (+{i})" if i else "") for i in range(6)), "actor, rank 0"]
    assert [name for _, name in heights.values()] == names, "two more lanes of the engine are left out"
