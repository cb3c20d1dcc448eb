"""Writes report.html, one file that needs nothing else and fetches nothing, and plots/*.png.

The words come from `facts.py`, the curves from `curves.py` and `plots.py`; template, style and script lie
in page/.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from miniverl.report import facts
from miniverl.report.curves import Curve, curves
from miniverl.report.plots import draw_svg, save_png
from miniverl.report.run import Run, load_run

# What a browser would not show, or would obey: controls, halves of surrogate pairs, marks that reverse text.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]"
)


def write_report(run_dir: Path) -> Path:
    """Read what `run_dir` has (see `run.py`), write its report.html and plots/, give the page's path.

    Raises ConfigError where a file there is damaged; a missing file only leaves its part of the page empty.
    """
    run = load_run(run_dir)
    drawn = curves(run)
    for curve in drawn:
        if curve.lines:
            (run_dir / "plots").mkdir(exist_ok=True)
            save_png(curve, run_dir / "plots" / f"{curve.key}.png")
    page = run_dir / "report.html"
    temporary = page.with_name(page.name + ".tmp")
    temporary.write_text(render(run, drawn), encoding="utf-8")
    os.replace(temporary, page)
    return page


def render(run: Run, drawn: list[Curve]) -> str:
    """The page as a string. Everything is escaped by the template, whoever wrote it."""
    environment = Environment(
        loader=PackageLoader("miniverl.report", "page"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_visible,
    )
    samples = facts.sample_rows(run)
    result = {key: value for key, value in run.result.items() if key != "memory"}
    return environment.get_template("page.html.j2").render(
        title=run.setting("experiment") or run.name,
        run=run,
        story=facts.story(run),
        headlines=facts.headlines(run),
        charts=[_chart(curve) for curve in drawn],
        samples=samples,
        sample_steps=list(dict.fromkeys(row["step"] for row in samples)),
        sources=sorted({row["source"] for row in samples}),
        memory=facts.memory_rows(run),
        config=facts.sections(run.config),
        result=facts.sections({"result": result}),
        environment=facts.environment_rows(run.environment),
        metrics=facts.metric_rows(run),
        style=_asset("style.css"),
        script=_asset("script.js"),
    )


def _chart(curve: Curve) -> Mapping[str, object]:
    if not curve.lines:
        return {"curve": curve, "svg": "", "readout": ""}
    drawing = draw_svg(curve)
    readout = {
        "box": drawing.box,
        "limits": drawing.x_limits,
        "steps": curve.lines[0].steps,
        "lines": [{"label": line.label, "values": _numbers(curve.unit, line.values)} for line in curve.lines],
    }
    return {"curve": curve, "svg": drawing.svg, "readout": json.dumps(readout)}


def _numbers(unit: str, values: list[float]) -> list[str]:
    digits = ".1f" if unit == "%" else ".4g"
    return [f"{value:{digits}} {unit}".rstrip() for value in values]


def _visible(value: object) -> object:
    if type(value) is not str:  # markup that is already safe, and numbers
        return value
    return _INVISIBLE.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", value)


def _asset(name: str) -> str:
    return (resources.files("miniverl.report") / "page" / name).read_text(encoding="utf-8")
