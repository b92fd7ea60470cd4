"""Where metrics go: a progress bar, `metrics.jsonl`, TensorBoard, W&B, MLflow, trackio, and the summary at the end."""
