"""Groups of rollouts → one list of rollouts with their rewards. Decodes each whole response once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from miniverl.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scorer = Callable[[str, str], float]


def score(
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Rollout]],
    tokenizer: PreTrainedTokenizerBase,
    scorer_name: str,
    scorer: Scorer,
) -> list[Rollout]:
    """The groups' rollouts in order, each with `rewards={scorer_name: …}` where its prompt has an answer."""
    scored = []
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            if rollout.uid != prompt.uid:
                raise ValueError(f"rollout {rollout.uid} was paired with prompt {prompt.uid}")
            if prompt.answer is not None:
                text = response_text(rollout, tokenizer)
                verdict = scorer(text, prompt.answer)
                rollout = replace(rollout, rewards={scorer_name: verdict}, reward=verdict)
            scored.append(rollout)
    return scored


def response_text(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> str:
    """The whole response without its stop token; decoded at once, so characters split over tokens stay
    whole."""
    ids = rollout.response_ids[:-1] if rollout.finish == "stop" else rollout.response_ids
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def sample_rows(
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    source: str | None = None,
) -> list[dict[str, object]]:
    """The first `count` rollouts as rows for the sample table."""
    by_uid = {p.uid: p for p in prompts}
    return [
        {
            "uid": r.uid,
            "sample": r.sample,
            "source": source or r.source,
            "prompt": by_uid[r.uid].text,
            "response": response_text(r, tokenizer),
            "answer": by_uid[r.uid].answer,
            "score": next(iter(r.rewards.values()), None),
            "finish": r.finish,
            "response_tokens": len(r.response_ids),
        }
        for r in rollouts[:count]
    ]
