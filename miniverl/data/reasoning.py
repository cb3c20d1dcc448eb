"""Problems of reasoning-gym as prompts: fresh ones for ever, each a function of one seed.

Training draws its seeds below 2^31 and the held-out problems have those from 2^31 on; a training problem that
reads like a held-out one is drawn again. How a response is scored is `rewards.reasoning`'s, which makes the
problem anew from the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from miniverl.config import Config, ConfigError, RunError
from miniverl.data.files import fit_length
from miniverl.data.template import render_prompt
from miniverl.extras import missing
from miniverl.types import Prompt

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedTokenizerBase

HELD_OUT = 1 << 31
"""The first seed of the held-out problems."""
_TRIES = 1000


class ReasoningPrompts:
    """The stream of a task, and its held-out prompts.

    Raises ConfigError for a task or option that reasoning-gym does not have, for an objective that needs
    responses to imitate, and if a held-out prompt does not fit.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config, self._task, self._tokenizer = config, config.data.reasoning_gym, tokenizer
        if config.algo.rows != "prompts":
            why = f"algo.name={config.algo.name}" if config.algo.supervised else f"algo.lam={config.algo.lam}"
            raise ConfigError(f"{why} trains on the dataset's responses, and data.source=reasoning_gym has "
                              "none; use data.source=files or addition.")  # fmt: skip
        _check_task(self._task.task, dict(self._task.options))
        self._held_out_texts: frozenset[str] = frozenset()
        self.held_out = tuple(self._held_out(i) for i in range(config.eval.size))
        self._held_out_texts = frozenset(p.text for p in self.held_out)
        identity = [self._task.task, self._task.options, self._task.instruction, config.trainer.seed,
                    [p.token_ids for p in self.held_out[:8]]]  # fmt: skip
        self.fingerprint = sha256(json.dumps(["reasoning/1", identity]).encode()).hexdigest()

    def at(self, position: int) -> Prompt:
        """Raises RunError for a prompt over data.max_prompt_length under data.overlong_prompts=error, and if
        nothing fits for many draws."""
        for attempt in range(_TRIES):
            digest = sha256(f"{self._config.trainer.seed}/{position}/{attempt}".encode()).digest()
            prompt = self._prompt(f"train/{position}#0", int.from_bytes(digest[:8]) % HELD_OUT)
            if prompt is not None and prompt.text not in self._held_out_texts:
                return prompt
        raise RunError(
            f"data.reasoning_gym.task={self._task.task}: {_TRIES} draws in a row were held-out problems or "
            f"over data.max_prompt_length={self._config.data.max_prompt_length}; raise the limit, or let the "
            "task's options give more different problems."
        )

    def among(self, positions: int) -> Iterable[Prompt]:
        """Those at the first so many positions: nearly every one is another problem."""
        return (self.at(position) for position in range(positions))

    def _held_out(self, index: int) -> Prompt:
        try:
            prompt = self._prompt(f"test/{index}#0", HELD_OUT + index)
        except RunError as error:
            raise ConfigError(str(error)) from None
        if prompt is None:
            raise ConfigError(f"data.overlong_prompts=filter: the held-out problem {index} of "
                              f"{self._task.task} is over data.max_prompt_length="
                              f"{self._config.data.max_prompt_length} tokens; raise the limit.")  # fmt: skip
        return prompt

    def _prompt(self, uid: str, seed: int) -> Prompt | None:
        """The problem of a seed; None where it is to be left out for its length."""
        data, options = self._config.data, dict(self._task.options)
        entry: dict[str, Any] = _gym().create_dataset(self._task.task, seed=seed, size=1, **options)[0]
        text = f"{entry['question']}\n\n{self._task.instruction}".strip()
        ids = render_prompt(self._tokenizer, text, template_kwargs=data.chat_template_kwargs)
        fitting = fit_length(ids, data.max_prompt_length, data.overlong_prompts)
        if fitting is None and data.overlong_prompts == "error":
            raise RunError(f"data.max_prompt_length={data.max_prompt_length}: problem {uid} of "
                           f"{self._task.task} (seed {seed}) measures {len(ids)} tokens after templating. "
                           "Raise the limit, or set data.overlong_prompts=filter to draw another."
                           )  # fmt: skip
        if fitting is None:
            return None
        extra = {"task": self._task.task, "options": options, "seed": seed}
        return Prompt(uid, fitting, text, str(entry["answer"]), extra=extra)


def _check_task(task: str, options: dict[str, object]) -> None:
    gym = _gym()
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ConfigError(f"data.reasoning_gym.task={task or 'null'} is not a task of reasoning-gym; it has "
                          f"{', '.join(sorted(DATASETS))}.")  # fmt: skip
    try:
        gym.create_dataset(task, seed=0, size=1, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.reasoning_gym.options={json.dumps(options)} does not suit the task {task}: "
                          f"{error}.") from None  # fmt: skip


@cache
def _gym() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(f"data.source=reasoning_gym: {missing('it', 'reasoning-gym')}.") from error
    return reasoning_gym
