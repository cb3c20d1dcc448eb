"""Raw texts into rows of bounded length: which documents share a row, and where a long one is cut.

That documents of a row do not see each other is `miniverl.models.packed`'s business.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from miniverl.types import Prompt


def windows(token_ids: tuple[int, ...], row_tokens: int) -> list[tuple[int, ...]]:
    """Pieces of at most `row_tokens` ids. A piece begins with the last id of the one before it, so that every
    id but a document's first is predicted exactly once.

    >>> windows((1, 2, 3, 4, 5), 3)
    [(1, 2, 3), (3, 4, 5)]
    """
    step = max(1, row_tokens - 1)
    return [token_ids[at : at + row_tokens] for at in range(0, max(1, len(token_ids) - 1), step)]


def fill_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Which documents go into which row: best fit, the longest first; rows in the order of their first
    document, documents of a row in their own order.

    Raises ValueError for a length above `row_tokens`.

    >>> fill_rows([3, 5, 2, 4, 1], 6)
    [[0, 2], [1, 4], [3]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > row_tokens:
            raise ValueError(f"a document of {lengths[i]} tokens does not fit a row of {row_tokens}")
        at = bisect_left(room, (lengths[i], 0))
        if at == len(room):
            left, row = row_tokens, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(i)
        insort(room, (left - lengths[i], row))
    return sorted(sorted(row) for row in rows)


def pack_texts(texts: Sequence[Prompt], row_tokens: int) -> list[Prompt]:
    """Prompts that hold one document each → prompts that hold a row of them each."""
    documents = [piece for text in texts for whole in text.documents for piece in windows(whole, row_tokens)]
    rows = fill_rows([len(document) for document in documents], row_tokens)
    return [
        Prompt(f"train/row{n}", (), "", documents=tuple(documents[i] for i in row))
        for n, row in enumerate(rows)
    ]
