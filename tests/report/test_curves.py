"""The arithmetic behind the curves."""

import json

import pytest

from miniverl.report.curves import curves, smooth, thin
from miniverl.report.run import load_run


def run_of(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(tmp_path)


def test_smoothing_by_hand():
    assert smooth([3, 0, 6, 3], 1) == [3, 0, 6, 3]
    assert smooth([3, 0, 6, 3], 3) == [1.5, 3, 3, 4.5]
    assert smooth([3, 0, 6, 3], 99) == [3, 3, 3, 3]


@pytest.mark.parametrize("count", [1, 299, 300, 301, 1000, 12_345])
def test_thinning_keeps_the_mean_and_the_order(count):
    steps, values = thin(range(count), [float(i % 11) for i in range(count)], most=300)
    assert len(steps) == len(values) == min(count, 300)
    assert steps == sorted(set(steps)) and steps[0] >= 0 and steps[-1] <= count - 1
    assert sum(values) / len(values) == pytest.approx(sum(i % 11 for i in range(count)) / count, rel=0.02)


def test_of_two_values_for_a_step_the_later_counts(tmp_path):
    values = ((2, 1), (1, 5), (2, 3), (3, "inf"))
    series = run_of(tmp_path, [{"step": step, "x": x} for step, x in values]).series("x")
    assert (series.steps, series.values, series.broken) == ([1, 2], [5, 3], [3])


def test_timing_shares_are_of_all_time_and_gaps_are_zero(tmp_path):
    first = {"step": 1, "timing_s/gen": 3, "timing_s/testing": 4}
    lines = [first, {"step": 2, "timing_s/gen": 1, "timing_s/score": 2}]
    timing = {curve.key: curve for curve in curves(run_of(tmp_path, lines))}["timing"]
    drawn = {line.label: line.values for line in timing.lines}
    assert drawn == {"generation 40%": [3, 1], "teacher scoring 20%": [0, 2]}
    assert timing.aside == "Not drawn: evaluation 40% of the time"


def test_noisy_loss_gets_a_smoothed_line_and_a_wide_one_a_log_scale(tmp_path):
    lines = [{"step": s, "actor/distillation_loss": 10.0 ** (-s / 10)} for s in range(60)]
    loss = curves(run_of(tmp_path, lines))[1]
    assert [(line.faint, len(line.steps)) for line in loss.lines] == [(True, 60), (False, 60)]
    assert loss.log and loss.lines[1].label == "mean of 3 steps"
