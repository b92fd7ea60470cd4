"""What crosses a boundary: the batch, its column contract, and metrics that merge."""

from grpo_dist.protocol.data_proto import DataProto
from grpo_dist.protocol.metrics import Max, Mean, Metric, Sum, merge_metrics, metric_values
from grpo_dist.protocol.ragged import Ragged

__all__ = ["DataProto", "Max", "Mean", "Metric", "Ragged", "Sum", "merge_metrics", "metric_values"]
