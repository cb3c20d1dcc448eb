"""Built-in reward functions by name, as the module that holds each: a process imports only those it runs."""

from __future__ import annotations

BUILT_INS: dict[str, str] = {
    "exact_match": "miniverl.rewards.exact_match",
    "math": "miniverl.rewards.math_answer",
    "multiple_choice": "miniverl.rewards.multiple_choice",
    "regex": "miniverl.rewards.pattern",
    "overlong": "miniverl.rewards.overlong",
    "code_tests": "miniverl.rewards.code_tests",
    "reasoning_gym": "miniverl.rewards.reasoning",
}
