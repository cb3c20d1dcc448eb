"""What a user is told in one paragraph instead of a traceback: a refused request, or a run that failed."""

from __future__ import annotations


class ConfigError(Exception):
    """A setting that cannot be honoured. The text names the key, the value and what would work.

    Not a ValueError: pydantic would wrap one into a ValidationError of its own.
    """


class RunError(RuntimeError):
    """A run that started and failed. The text names the cause and what is left of the run."""
