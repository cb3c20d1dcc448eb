"""What a run tells about itself: values that merge exactly, timers, sinks and samples.

Whoever computes a number leaves its name and denominator here; what is computed, and when it is logged,
is the trainer's business. Nothing here knows of models or workers.
"""

from miniverl.metrics.console import ConsoleSink
from miniverl.metrics.samples import read_samples, sample_steps, write_samples
from miniverl.metrics.sinks import JsonlSink, Sink, Sinks, TensorBoardSink, open_sinks, read_metrics, sanitize
from miniverl.metrics.timers import Timers
from miniverl.metrics.values import Max, Mean, Metric, Min, Sum, finalize, length_metrics, merge

__all__ = [
    "ConsoleSink", "JsonlSink", "Max", "Mean", "Metric", "Min", "Sink", "Sinks", "Sum", "TensorBoardSink",
    "Timers", "finalize", "length_metrics", "merge", "open_sinks", "read_metrics", "read_samples",
    "sample_steps", "sanitize", "write_samples",
]
