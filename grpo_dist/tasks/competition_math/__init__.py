"""Competition mathematics: rows and scorer in task.py, comparing answers in equality.py."""

from grpo_dist.tasks.competition_math.task import compute_score, compute_score_dapo

__all__ = ["compute_score", "compute_score_dapo"]
