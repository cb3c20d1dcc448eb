"""The one sentence about libraries that only some reward functions and tasks need."""

from __future__ import annotations


def missing(what: str, library: str) -> ImportError:
    """The error to raise where `library` is not installed."""
    return ImportError(
        f"{what} needs {library}, which is not installed: pip install -r requirements/rewards.txt (from an "
        "installed miniverl, its extra `rewards`: pip install 'miniverl[rewards] @ git+URL' or '.[rewards]')"
    )
