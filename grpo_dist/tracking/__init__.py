"""Where metrics go: a progress bar, `metrics.jsonl`, TensorBoard, W&B, MLflow, trackio, and the summary at the end.

Metrics are `{name: number}` with verl's names. `base.build_trackers` starts the trackers in `trainer.logger`.
Adding a tracker: one file with a class like those here, and one row in `base.TRACKERS`.
"""
