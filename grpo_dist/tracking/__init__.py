"""Where metrics go: a progress bar, `metrics.jsonl`, TensorBoard, W&B, and the summary at the end.

Metrics are `{name: number}` under verl's names. `base.build_trackers` starts what `trainer.logger` lists.
Adding a tracker: one file with a class like those here, and one row in `base.TRACKERS`.
"""
