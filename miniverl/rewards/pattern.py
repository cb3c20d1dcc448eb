"""Does the response have a form?"""

from __future__ import annotations

import re
from typing import Literal

from miniverl.rewards.sample import Sample


def regex(
    sample: Sample,
    pattern: str,
    where: Literal["all", "anywhere"] = "all",
    flags: str = "s",
    score: float = 1.0,
    otherwise: float = 0.0,
) -> float:
    """`score` where the pattern matches the response, else `otherwise`.

    where: `all` = the response as a whole, white space around it aside; `anywhere` in it. flags: letters of
    Python's inline flags (`s`: a dot also stands for a line break). Raises re.error for a bad pattern.
    """
    compiled = re.compile(f"(?{flags}:{pattern})" if flags else pattern)
    if where == "all":
        found = compiled.fullmatch(sample.response.strip())
    elif where == "anywhere":
        found = compiled.search(sample.response)
    else:
        raise ValueError(f"where={where!r} must be 'all' or 'anywhere'")
    return score if found else otherwise
