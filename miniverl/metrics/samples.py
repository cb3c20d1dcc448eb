"""What the student wrote, kept per step as run_dir/samples/step_000010.parquet.

It stores any text a model can produce. Which rows are worth keeping is the trainer's business, showing
them the report's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

COLUMNS = {
    "step": "int64",
    "uid": "string",
    "sample": "int32",
    "source": "string",
    "prompt": "string",
    "response": "string",
    "answer": "string",
    "score": "float64",
    "finish": "string",
    "response_tokens": "int32",
}


def write_samples(run_dir: Path, step: int, rows: Sequence[Mapping[str, object]]) -> Path | None:
    """Write all samples of a step at once, over those of an earlier attempt; None if there are no rows.

    rows: the columns above except `step`; a missing one (answer, score) is stored as null. `source` says who
    wrote the response: student, dataset, or held-out for an evaluation's.
    Half a surrogate pair, which UTF-8 cannot hold, is stored as its escape (`\\ud800`); all other text, NUL
    included, comes back as it was.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not rows:
        return None
    unknown = sorted({key for row in rows for key in row} - set(COLUMNS))
    if unknown:
        raise ValueError(f"samples have no column {unknown[0]!r}; the columns are {', '.join(COLUMNS)}")
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    cleaned = [{key: _storable(value) for key, value in row.items()} | {"step": step} for row in rows]
    path = run_dir / "samples" / f"step_{step:06}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(pa.Table.from_pylist(cleaned, schema=schema), temporary)
    os.replace(temporary, path)
    return path


def sample_steps(run_dir: Path) -> list[int]:
    """The steps that have samples, in order."""
    names = [path.name for path in (run_dir / "samples").glob("*.parquet")]
    found = [re.fullmatch(r"step_(\d+)\.parquet", name) for name in names]
    return sorted(int(match[1]) for match in found if match)


def read_samples(run_dir: Path, steps: Collection[int] | None = None) -> list[dict[str, object]]:
    """Rows of the given steps (None = all), in the order of the steps; [] where none were written."""
    import pyarrow.parquet as pq

    wanted = sample_steps(run_dir) if steps is None else sorted(steps)
    tables = (pq.read_table(run_dir / "samples" / f"step_{step:06}.parquet") for step in wanted)
    return [row for table in tables for row in table.to_pylist()]


def _storable(value: object) -> object:
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
