"""Data exchanged between workers: the batch, the contract of its columns, and mergeable metrics."""

from grpo_dist.protocol.data_proto import DataProto
from grpo_dist.protocol.metrics import Max, Mean, Metric, Sum, merge_metrics, metric_values
from grpo_dist.protocol.ragged import Ragged

__all__ = ["DataProto", "Max", "Mean", "Metric", "Ragged", "Sum", "merge_metrics", "metric_values"]
