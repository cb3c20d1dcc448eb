"""Reward functions: a Sample (text, answer, lengths) → a score. They know neither models nor tokens' ids.

`worker` is the process they run in, `pool` drives several, `registry` lists what is built in.
"""
