"""Hydra groups and experiments. Only what an experiment changes stands here; every default is in
miniverl/config.py."""
