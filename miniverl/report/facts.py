"""What a report says in words and tables: headline, configuration, environment, memory, samples.

Plain strings, not HTML: the page escapes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from miniverl.metrics.console import compact, duration
from miniverl.report.run import Run

LONGEST_TEXT = 4000
NONE = "—"


@dataclass(frozen=True)
class Headline:
    label: str
    value: str
    detail: str = ""
    better: bool | None = None
    """Colours the detail: it got better, or worse; None = neither."""


@dataclass(frozen=True)
class Section:
    name: str
    rows: list[tuple[str, str]]


def story(run: Run) -> list[str]:
    """Short phrases on what ran."""
    config, told = run.setting, []
    if config("algo.name") == "gkd":
        divergence = config("algo.divergence")
        knob = {"jsd": "beta", "skew_kl": "alpha", "skew_rkl": "alpha"}.get(str(divergence))
        shape = f" {knob}={config(f'algo.{knob}')}" if knob else ""
        told.append(f"on-policy distillation, {divergence}{shape}, lam={config('algo.lam')}")
    elif config("algo.name") == "policy_gradient":
        told.append(f"policy gradient, advantage {config('algo.policy.advantage')}, "
                    f"loss {config('algo.policy.loss')}, {config('algo.policy.aggregation')}")
    elif config("algo.name"):
        told.append(str(config("algo.name")))
    told += [f"{role} {_tilde(str(config(f'model.{role}.path')))}" for role in ("student", "teacher")
             if config(f"model.{role}.path")]
    if config("placement.kind"):
        told.append(f"placement {config('placement.kind')}")
    return told


def headlines(run: Run) -> list[Headline]:
    """Accuracy before → after, time, steps, tokens: from the result if there is one, else the metrics."""
    step_seconds = run.series("timing_s/step")
    seconds = run.result.get("seconds", sum(step_seconds.values) if len(step_seconds) else None)
    steps = [int(line["step"]) for line in run.metrics if any(name.startswith("actor/") for name in line)]
    asked = run.setting("trainer.steps")
    tokens = run.series("perf/total_num_tokens").values
    speed = run.series("perf/throughput").values
    return [
        _accuracy(run),
        Headline("Time", duration(float(str(seconds))) if seconds is not None else NONE,
                 "" if "seconds" in run.result else "training steps only: the run wrote no result"),
        Headline("Steps", f"{max(steps, default=0):,}", f"of {asked:,}" if isinstance(asked, int) else ""),
        Headline("Tokens", compact(sum(tokens)) if tokens else NONE,
                 f"{compact(sum(speed) / len(speed))} tokens/s" if speed else "no throughput recorded"),
    ]


def _accuracy(run: Run) -> Headline:
    values = run.series("val/accuracy").values
    before = run.result.get("accuracy_before", values[0] if values else None)
    after = run.result.get("accuracy_after", values[-1] if len(values) > 1 else None)
    size = run.setting("eval.size")
    problems = f" on {size} held-out problems" if size else ""
    if not isinstance(before, int | float):
        return Headline("Held-out accuracy", NONE, "no evaluation recorded")
    if not isinstance(after, int | float):
        return Headline("Held-out accuracy", f"{before:.1%}", f"before training{problems}")
    gain = 100 * (after - before)
    return Headline("Held-out accuracy", f"{before:.1%} → {after:.1%}", f"{gain:+.1f} points{problems}",
                    None if gain == 0 else gain > 0)


def sections(tree: Mapping[str, object]) -> list[Section]:
    """A nested mapping as one section per group, with dotted names; top-level values come first."""
    general = Section("general", [(key, _value(v)) for key, v in tree.items() if not isinstance(v, Mapping)])
    groups = [Section(key, list(_flat(v, f"{key}."))) for key, v in tree.items() if isinstance(v, Mapping)]
    return [section for section in (general, *groups) if section.rows]


def _flat(tree: Mapping[str, object], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _value(value)


def _value(value: object) -> str:
    return _tilde(value) if isinstance(value, str) else _tilde(json.dumps(value, ensure_ascii=False))


def _tilde(text: str) -> str:
    """A report is passed on: it need not tell where its writer's home lies."""
    return text.replace(str(Path.home()), "~") if str(Path.home()) != "/" else text


def environment_rows(environment: Mapping[str, object]) -> list[tuple[str, str]]:
    """`describe_environment`'s facts in words; keys that are not known here are kept as they are."""
    rest = dict(environment)
    rows = [(key.capitalize(), str(rest.pop(key))) for key in ("python", "platform") if key in rest]
    cpu = rest.pop("cpu", None)
    if isinstance(cpu, Mapping):
        cores = f"{cpu.get('usable_cores')} of {cpu.get('logical_cores')} logical cores usable"
        rows.append(("CPU", f"{cpu.get('model')}, {cores}, {cpu.get('torch_threads')} torch thread(s)"))
    memory = rest.pop("memory_bytes", None)
    if isinstance(memory, int):
        rows.append(("Memory", size(memory)))
    gpus, cuda = rest.pop("gpus", None), rest.pop("cuda", None)
    if isinstance(gpus, list):
        rows += [("GPU", f"{gpu['name']}, {size(gpu['memory_bytes'])}, CUDA {cuda}") for gpu in gpus]
        rows += [] if gpus else [("GPU", "none")]
    git = rest.pop("git", None)
    if isinstance(git, Mapping):
        changed = ", with uncommitted changes" if git.get("changed") else ""
        rows.append(("Commit", f"{git.get('commit')}{changed}"))
    packages = rest.pop("packages", None)
    if isinstance(packages, Mapping):
        rows += [(str(name), str(version)) for name, version in packages.items()]
    return rows + [(key, _value(value)) for key, value in rest.items()]


def memory_rows(run: Run) -> list[tuple[str, str, str]]:
    """Part, estimate, measured, from result.json's
    `"memory": {"estimate": {part: bytes}, "measured": {part: bytes}, "budget": bytes}`, each key optional."""
    memory = run.result.get("memory")
    if not isinstance(memory, Mapping):
        return []
    estimate, measured = (_parts(memory.get(key)) for key in ("estimate", "measured"))
    parts = [part for part in dict.fromkeys([*estimate, *measured]) if part != "total"]
    parts += ["total"] if "total" in estimate or "total" in measured else []
    rows = [(part, _size_of(estimate, part), _size_of(measured, part)) for part in parts]
    if estimate.get("total") and measured.get("total"):
        rows.append(("measured / estimate", "", f"{measured['total'] / estimate['total']:.2f}"))
    budget = memory.get("budget")
    return rows + ([("budget", size(budget), "")] if isinstance(budget, int | float) else [])


def _parts(value: object) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {str(part): number for part, number in value.items() if isinstance(number, int | float)}
    return {"total": value} if isinstance(value, int | float) else {}


def _size_of(parts: Mapping[str, float], part: str) -> str:
    return size(parts[part]) if part in parts else NONE


def size(number: float) -> str:
    """
    >>> size(512), size(3 * 2**20), size(1.5 * 2**30)
    ('512 B', '3.0 MiB', '1.50 GiB')
    """
    for unit, name, digits in ((2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1)):
        if number >= unit:
            return f"{number / unit:.{digits}f} {name}"
    return f"{number:.0f} B"


def sample_rows(run: Run) -> list[dict[str, str]]:
    """Samples, newest step first, with `right` = yes, no, or none where nothing scored it."""
    return [_sample(row) for row in sorted(run.samples, key=lambda row: -int(str(row["step"])))]


def _sample(row: Mapping[str, object]) -> dict[str, str]:
    score = row["score"]
    shown = {key: _cut(NONE if value is None else str(value)) for key, value in row.items()}
    shown["score"] = f"{score:g}" if isinstance(score, float) else NONE
    shown["right"] = ("yes" if score >= 1 else "no") if isinstance(score, float) else "none"
    return shown


def _cut(text: str) -> str:
    left = len(text) - LONGEST_TEXT
    return text if left <= 0 else f"{text[:LONGEST_TEXT]} … ({left} more characters)"


def metric_rows(run: Run) -> list[tuple[str, ...]]:
    """Every metric: name, first, last, least, greatest finite value."""
    rows = []
    for name in run.names():
        values = run.series(name).values
        if values:
            ends = (values[0], values[-1], min(values), max(values))
            rows.append((name, *(f"{value:.4g}" for value in ends)))
        else:
            rows.append((name, *["not finite"] * 4))
    return rows
