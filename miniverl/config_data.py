"""The `data` section of the config: where prompts come from, which columns hold what, and length limits."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from miniverl.config_tasks import AdditionConfig, ReasoningConfig

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=_strict)
class DataConfig:
    source: Literal["addition", "files", "reasoning_gym"] = "addition"
    addition: AdditionConfig = field(default_factory=AdditionConfig)
    reasoning_gym: ReasoningConfig = field(default_factory=ReasoningConfig)
    train_files: tuple[str, ...] = ()
    """Parquet or JSONL: files, directories or globs, expanded in sorted order (source=files)."""
    eval_files: tuple[str, ...] = ()
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    response_key: str | None = None
    """Column with a reference response (needed by SFT, KTO and by algo.lam < 1)."""
    chosen_key: str = "chosen"
    """Column with the preferred response of a pair (read by algo=dpo, ipo, simpo, orpo)."""
    rejected_key: str = "rejected"
    """Column with the other one."""
    label_key: str = "label"
    """Column with the verdict on the response: true or false, 1 or 0 (read by algo=kto)."""
    answer_key: str | None = None
    """Column with the ground truth that a response is scored against; dots reach into a struct
    (`reward_model.ground_truth`)."""
    extra_keys: tuple[str, ...] = ()
    """Further columns that reward functions are given, as `sample.extra[KEY]`."""
    text_key: str = "text"
    """Column with a raw text (read by algo=pretrain)."""
    row_tokens: PositiveInt = 512
    """`pretrain`: tokens of a row that documents are packed into; a longer document is cut into several."""
    tools_key: str | None = None
    """Column with tool schemas for the chat template."""
    chat_template_kwargs: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Passed to the template in every rendering, e.g. {enable_thinking: false}."""
    max_prompt_length: PositiveInt = 512
    """Tokens, measured after templating."""
    overlong_prompts: Literal["error", "left", "right", "middle", "filter"] = "error"
    """`left` drops tokens from the left (keeps the last ones), `filter` drops the row and reports how
    many."""
    malformed_rows: Literal["error", "quarantine"] = "error"
    """`quarantine` lists the bad rows in RUN_DIR/quarantine.jsonl and goes on without them."""
    shuffle: bool = True
    """Each epoch in an order that is a function of (trainer.seed, epoch)."""
