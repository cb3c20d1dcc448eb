"""What every test runs under: one thread per process, no network, reproducible property tests."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from hypothesis import settings

# Examples are the same every time, so a red run can be run again; no deadline, because CI's cores are shared.
settings.register_profile("miniverl", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("miniverl")
