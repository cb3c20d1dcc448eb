"""From a model's path in the config to a directory, or to one clear sentence about why it cannot be had.

Loading weights is `load`'s business; this only needs names, files and, for hub names, one bounded question.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from miniverl.config import ConfigError

EMBEDDED = Path(__file__).parent / "embedded"
PUBLISHED_CONFIGS = Path(__file__).parent.parent / "conf" / "model"
HUB_DEADLINE_S = 5.0


def locate(role: str, path: str) -> str:
    """The directory (or hub name already on disk or reachable) that `model.<role>.path` stands for.

    Raises:
        ConfigError: nothing there, within HUB_DEADLINE_S also for a hub that does not answer.
    """
    key = f"model.{role}.path={path!r}"
    if not path:
        raise ConfigError(
            f"model.{role}.path is empty: give a model directory, embedded:NAME or a hub name, or choose "
            "a model group (model=demo)."
        )
    if path.startswith("embedded:"):
        directory = EMBEDDED / path.removeprefix("embedded:")
        if not directory.is_dir():
            known = ", ".join(sorted(f"embedded:{d.name}" for d in EMBEDDED.iterdir() if d.is_dir()))
            raise ConfigError(f"{key}: no such embedded model. There are: {known}.")
        return str(directory)
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{key}: the directory holds no config.json, so it is not a model.")
        return str(directory)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(f"{key}: there is no such directory.")
    _ask_hub(key, path)
    return path


def read_config(path: str) -> dict[str, Any] | None:
    """The model's config.json without loading or downloading anything; None if it is not on this machine.

    The published configs of the recipes' models ship in `conf/model/`, so a plan needs no network.
    """
    if path.startswith("embedded:"):
        directory = EMBEDDED / path.removeprefix("embedded:")
    elif Path(path).expanduser().is_dir():
        directory = Path(path).expanduser()
    else:
        directory = PUBLISHED_CONFIGS / path.rsplit("/", 1)[-1].lower()
    file = directory / "config.json"
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}), so {path!r} is not a model.") from None


def _ask_hub(key: str, name: str) -> None:
    """Make sure that a hub model's config can be had: from the local cache, else from the hub, within the
    deadline."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its remarks on every retry would bury the one sentence that says it all
    try:
        hf_hub_download(name, "config.json", local_files_only=True)
        return
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        raise ConfigError(f"{key}: there is no such directory.") from None
    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            hf_hub_download(name, "config.json", etag_timeout=HUB_DEADLINE_S / 2)
            outcome.append(None)
        except (OSError, HfHubHTTPError, ValueError, RuntimeError) as error:
            outcome.append(error)

    # The hub's client retries for longer than anyone wants to wait, so the deadline is ours.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_DEADLINE_S)
    if outcome == [None]:
        return
    why = f"{type(outcome[0]).__name__}" if outcome else f"no answer within {HUB_DEADLINE_S:g} s"
    raise ConfigError(
        f"{key}: there is no directory of that name, it is not in the local model cache, and the model hub "
        f"could not give it ({why}). Download it on a machine with a network and set model.<role>.path to "
        "its directory, or run the same recipe on the embedded models with model=demo."
    )
