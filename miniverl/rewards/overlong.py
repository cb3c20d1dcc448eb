"""A soft limit of length: nothing up to a point, then a penalty that reaches -1 at the longest length.

Yu et al. 2025, DAPO, arXiv 2503.14476, equation 13 (which is floored at -1).
"""

from __future__ import annotations

from miniverl.rewards.sample import Sample


def overlong(sample: Sample, buffer: int, max_length: int | None = None, floor: float | None = None) -> float:
    """0 up to max_length - buffer tokens, then -(length - (max_length - buffer)) / buffer.

    buffer: tokens over which the penalty grows. max_length: tokens, None = the budget that the response was
    written under. floor: the lowest score, -1 as in the paper; None = lengths over max_length go below -1.
    """
    limit = sample.max_response_tokens if max_length is None else max_length
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer={buffer} must lie between 1 and max_length={limit} tokens")
    over = sample.response_tokens - (limit - buffer)
    score = -max(0, over) / buffer
    return score if floor is None else max(floor, score)
