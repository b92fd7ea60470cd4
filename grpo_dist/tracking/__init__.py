"""Where metrics go: a progress bar, `metrics.jsonl`, TensorBoard, W&B, MLflow, trackio, and the summary at the end.

Metrics are `{name: number}` with verl's names. `base.build_trackers` starts the trackers in `trainer.logger`.
The contract of a tracker is `base.Tracker`; a class of your own is `trainer.logger=path/to/file.py:Class`.
"""
