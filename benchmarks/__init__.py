"""Measurements, one command each: `python -m benchmarks.NAME` from the root, `make bench` for all of them."""
