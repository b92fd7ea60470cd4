"""What becomes of the record of an earlier run in a folder."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.tracking.record import drop_rollouts_after, set_aside
from grpo_dist.tracking.rollouts import recorded_steps


def write(run_dir: Path, *names: str) -> None:
    for name in names:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text(name)


def files(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())


def test_a_run_that_starts_anew_has_none_of_the_steps_of_the_one_before(tmp_path: Path) -> None:
    """Nor its tokenizer. They are kept, under one number."""
    set_aside(tmp_path)
    assert files(tmp_path) == []
    write(tmp_path, "metrics.jsonl", "rollouts/3.jsonl", "rollouts/3.parquet", "validation/0.jsonl", "tokenizer/t.json")
    set_aside(tmp_path)
    assert recorded_steps(tmp_path) == []
    old = ["metrics.old-1.jsonl", "rollouts.old-1/3.jsonl", "rollouts.old-1/3.parquet", "tokenizer.old-1/t.json"]
    assert files(tmp_path) == [*old, "validation.old-1/0.jsonl"]
    write(tmp_path, "rollouts/1.jsonl")  # one that was killed in its first step
    set_aside(tmp_path)
    write(tmp_path, "metrics.jsonl")
    set_aside(tmp_path)
    assert (tmp_path / "rollouts.old-2/1.jsonl").is_file()
    assert (tmp_path / "metrics.old-2.jsonl").is_file()


def test_a_run_that_goes_back_drops_the_steps_after(tmp_path: Path) -> None:
    write(tmp_path, *(f"rollouts/{step}.{end}" for step in (9, 10, 11) for end in ("jsonl", "parquet")))
    write(tmp_path, "validation/11.jsonl", "rollouts/notes.txt")
    drop_rollouts_after(tmp_path, 9)
    assert files(tmp_path) == ["rollouts/9.jsonl", "rollouts/9.parquet", "rollouts/notes.txt"]
