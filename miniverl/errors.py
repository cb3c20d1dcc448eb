"""The two ways in which a run is refused or ends badly; both texts are for a person."""

from __future__ import annotations


class ConfigError(Exception):
    """A setting that cannot be honoured. The text names the key, the value and what would work.

    Not a ValueError: pydantic would wrap one into a ValidationError of its own.
    """


class RunError(RuntimeError):
    """A run that started and failed. The text names the cause and what is left of the run."""
