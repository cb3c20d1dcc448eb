"""A dataset's own response as a Rollout: what SFT trains on, and the share 1 − λ of GKD."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from miniverl.types import Prompt, Rollout


def dataset_rollouts(prompt: Prompt, version: int, max_response_length: int) -> list[Rollout]:
    """All that the dataset answers to a prompt: its response; a pair's preferred one, then the other; or the
    documents of a row, each a continuation of its own first token."""
    if prompt.documents:
        return [_document(prompt, i, version) for i in range(len(prompt.documents))]
    chosen = dataset_rollout(prompt, 0, version, max_response_length)
    if prompt.rejected_ids is None:
        return [chosen]
    other = replace(prompt, reference_ids=prompt.rejected_ids, reference_mask=prompt.rejected_mask)
    return [chosen, dataset_rollout(other, 1, version, max_response_length)]


def dataset_rollout(prompt: Prompt, sample: int, version: int, max_response_length: int) -> Rollout:
    """The prompt's reference response, cut to `max_response_length` tokens with all its per-token arrays.

    No engine drew these tokens, so their behaviour log-probs do not exist: they are NaN, since any number
    would pass for one.
    """
    if prompt.reference_ids is None:
        raise ValueError(f"prompt {prompt.uid} has no dataset response (data.response_key)")
    ids = np.asarray(prompt.reference_ids, np.int32)
    mask = (
        np.ones(len(ids), np.int8)
        if prompt.reference_mask is None
        else np.asarray(prompt.reference_mask, np.int8)
    )
    return Rollout(
        uid=prompt.uid,
        sample=sample,
        prompt_ids=np.asarray(prompt.token_ids, np.int32),
        response_ids=ids,
        mask=mask,
        log_probs=np.full(len(ids), np.nan, np.float32),
        version=(version, version),
        finish="stop",
        source="dataset",
    ).truncated(max_response_length)


def _document(prompt: Prompt, sample: int, version: int) -> Rollout:
    ids = prompt.documents[sample]
    whole = replace(prompt, token_ids=ids[:1], reference_ids=ids[1:])
    # What ends a document is part of it, or was cut off: `length` says that no stop id is to be left out.
    return replace(dataset_rollout(whole, sample, version, len(ids)), finish="length")
