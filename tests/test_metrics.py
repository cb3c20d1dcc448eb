"""Metric values, timers, sinks, samples: numbers by hand, and what a kill or a hostile text leaves behind."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miniverl.config import ConfigError
from miniverl.metrics import (
    ConsoleSink,
    JsonlSink,
    Max,
    Mean,
    Min,
    Sum,
    TensorBoardSink,
    Timers,
    finalize,
    length_metrics,
    merge,
    open_sinks,
    read_metrics,
    read_samples,
    sample_steps,
    sanitize,
    write_samples,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_uneven_shards_give_the_numbers_of_one_shard():
    losses, weights = [0.5, 0.75, 3.0, 8.0, 0.25, -2.0], [1, 4, 2, 2, 8, 1]

    def measure(rows):
        part = losses[rows]
        return {
            "loss": Mean.of(part),
            "token_loss": Mean(float(np.dot(part, weights[rows])), sum(weights[rows])),
            "tokens": Sum(sum(weights[rows])),
            "top": Max(max(part)),
            "low": Min(min(part)),
        }

    expected = {"loss": 10.5 / 6, "token_loss": 25.5 / 18, "tokens": 18, "top": 8.0, "low": -2.0}
    assert finalize(measure(slice(0, 6))) == expected
    assert finalize(merge([measure(slice(0, 1)), measure(slice(1, 4)), measure(slice(4, 6))])) == expected


def test_totals_do_not_depend_on_the_order_of_the_parts():
    parts = [{"x": Mean(total, 1)} for total in (0.25, 1e16, 0.5, -1e16)]
    assert finalize(merge(parts)) == finalize(merge(parts[::-1])) == {"x": 0.1875}


def test_mean_weights_by_its_count_and_is_left_out_when_empty():
    none = Mean(0.0, 0)
    merged = merge([{"a": Mean(6.0, 2), "b": none}, {"a": none, "b": none}, {"a": Mean(1.0, 5)}])
    assert finalize(merged) == {"a": 1.0}


def test_a_name_in_some_parts_only_is_merged_over_those():
    assert finalize(merge([{"a": Sum(2)}, {}, {"a": Sum(3), "b": Max(7)}])) == {"a": 5, "b": 7}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("kind", [Max, Min])
def test_nan_is_not_lost_whatever_the_order(kind, order):
    parts = [{"x": kind(math.nan)}, {"x": kind(1.0)}][::order]
    assert math.isnan(finalize(merge(parts))["x"])


def test_infinite_totals_do_not_raise():
    assert math.isnan(finalize(merge([{"x": Sum(math.inf)}, {"x": Sum(-math.inf)}]))["x"])


@pytest.mark.parametrize("other", [Sum(1.0), Max(1.0), Min(1.0)])
def test_one_name_of_two_kinds_is_refused(other):
    with pytest.raises(TypeError, match="loss"):
        merge([{"loss": Mean(1.0, 1)}, {"loss": other}])


def test_lengths_by_hand_and_sharded():
    names = ("mean", "max", "min", "clip_ratio")
    expected = {f"response_length/{n}": value for n, value in zip(names, (5.5, 8, 2, 0.5), strict=True)}
    assert finalize(length_metrics("response_length", [8, 2, 4, 8], limit=8)) == expected
    shards = [length_metrics("response_length", part, limit=8) for part in ([8], [], [2, 4, 8])]
    assert finalize(merge(shards)) == expected
    assert finalize(length_metrics("prompt_length", [], limit=8)) == {}


def test_timers_add_up_also_over_errors():
    clock = Clock()
    timers = Timers(clock)
    with timers("step"):
        for _ in range(2):
            with timers("gen"):
                clock.now += 3
        with pytest.raises(RuntimeError), timers("score"):
            clock.now += 5
            raise RuntimeError
    assert timers.pop() == {"timing_s/gen": 6, "timing_s/score": 5, "timing_s/step": 11}
    assert timers.pop() == {}


def test_jsonl_is_strict_json_and_comes_back(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    values = {"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": np.int64(3), "é/\ud800": 1}
    sink.log(1, values)
    raw = (tmp_path / "metrics.jsonl").read_text()  # flushed, though not closed
    sink.close()

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads(raw, parse_constant=refuse)
    assert line == {"step": 1, "a": "nan", "b": "-inf", "c": 0.5, "d": 3, "é/\ud800": 1}
    (back,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(back["a"]) and back["b"] == -math.inf and back["step"] == 1


def test_resume_drops_what_will_be_written_again_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 0, "x": 0}\n{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 2, "y": 2}\n'
    path.write_bytes(whole + b'{"step": 3, "x\xc3')
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 2]
    sink = JsonlSink(path, first_step=2)
    sink.log(2, {"x": 20})
    sink.close()
    assert path.read_text() == '{"step": 0, "x": 0}\n{"step": 1, "x": 1}\n{"step": 2, "x": 20}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_line_is_dropped_even_if_no_step_is_repeated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": 1}\n{"step": 2')
    JsonlSink(path, first_step=9).close()
    assert path.read_bytes() == b'{"step": 1, "x": 1}\n'


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": 1}')
    sink = JsonlSink(path, first_step=2)
    sink.log(2, {"x": 2})
    sink.close()
    assert [line["x"] for line in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("bad", ["{", "[1]", '{"x": 1}', '{"step": "two"}', '{"step": 1, "x": null}'])
def test_a_bad_line_in_the_middle_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2"):
        JsonlSink(path, first_step=1)
    assert bad in path.read_text()


def test_every_line_logged_before_a_sigkill_is_there(tmp_path):
    program = textwrap.dedent("""
        import pathlib, sys
        from miniverl.metrics import JsonlSink
        sink = JsonlSink(pathlib.Path(sys.argv[1]))
        for step in range(10**9):
            sink.log(step, {"x": step, "padding/" + "p" * 300: 0.5})
            print(step, flush=True)
    """)
    path = tmp_path / "metrics.jsonl"
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", program, path]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
    assert child.stdout is not None
    while int(child.stdout.readline()) < 50:
        pass
    os.kill(child.pid, signal.SIGKILL)
    confirmed = max([50, *map(int, child.communicate()[0].split("\n")[:-1])])
    steps = [line["step"] for line in read_metrics(path)]
    assert steps == list(range(len(steps))) and len(steps) > confirmed
    JsonlSink(path, first_step=40).close()
    assert [line["step"] for line in read_metrics(path)] == list(range(40))


def test_tensorboard_purges_on_resume(tmp_path):
    # The second attempt logs nothing at steps 1 and 2, so that no reader can guess that they are stale.
    for first_step, values in ((0, {0: 1.0, 1: 2.0, 2: 3.0}), (1, {3: 40.0})):
        sink = TensorBoardSink(tmp_path, first_step)
        for step, value in values.items():
            sink.log(step, {"val/pass@4": value})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = {event.step: event.value for event in events.Scalars("val/pass_at_4")}
    assert points == {0: 1.0, 3: 40.0}


def test_two_names_never_share_a_curve(tmp_path):
    sink = TensorBoardSink(tmp_path)
    with pytest.raises(ValueError, match="share"):
        sink.log(1, {"a b": 1.0, "a_b": 2.0})
    sink.close()


@pytest.mark.parametrize("name", ["actor/distillation_loss", "response_length/clip_ratio", "timing_s/gen"])
def test_names_that_suit_every_sink_stay(name):
    assert sanitize(name) == name


def console(stream, total=10):
    clock = Clock()
    return clock, ConsoleSink(total, stream, clock)


def test_plain_lines_are_few_but_tell_every_evaluation_and_the_end():
    stream = io.StringIO()
    clock, sink = console(stream, total=100)
    for step in range(101):
        sink.log(step, {"actor/distillation_loss": 0.5} | ({"val/accuracy": 0.5} if step == 55 else {}))
        clock.now += 0.125
    sink.close()
    steps = [int(line.split("/")[0].split()[1]) for line in stream.getvalue().splitlines()]
    assert steps == [0, 8, 16, 24, 32, 40, 48, 55, 63, 71, 79, 87, 95, 100]
    assert [("held-out" in line) for line in stream.getvalue().splitlines()] == [step == 55 for step in steps]


def test_plain_line_by_hand():
    stream = io.StringIO()
    clock, sink = console(stream, total=30)
    sink.log(0, {"val/accuracy": 0.25})
    clock.now += 10
    seconds = {"gen": 2.0, "score": 1.0, "update_actor": 0.5, "update_weights": 0.5}
    timings = {f"timing_s/{name}": value for name, value in seconds.items()}
    lengths = {"response_length/mean": 34.25, "perf/throughput": 8300.0}
    sink.log(2, {"actor/distillation_loss": 0.08125} | lengths | timings)
    sink.close()
    assert stream.getvalue() == (
        "step  0/30 | held-out 25.0%\n"
        "step  2/30 | loss 0.08125 | length 34.2 | 8.3k tok/s | gen 50% score 25% update 25% | ETA 2:20\n"
    )


def test_a_run_that_stops_early_shows_its_last_step():
    stream = io.StringIO()
    clock, sink = console(stream)
    sink.log(1, {"actor/nll_loss": 1.0})
    clock.now += 0.5
    sink.log(2, {"actor/nll_loss": 0.5})
    sink.close()
    assert stream.getvalue().splitlines() == ["step  1/10 | loss 1", "step  2/10 | loss 0.5 | ETA 0:04"]


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_terminal_gets_one_line_that_fits(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    clock, sink = console(stream)
    for step in range(11):
        sink.log(step, {"actor/nll_loss": 0.123, "val/accuracy": 0.9, "response_length/mean": 30.0,
                        "perf/throughput": 900.0, "timing_s/gen": 1.0, "timing_s/update_actor": 1.0})
        clock.now += 1
    sink.close()
    shown = stream.getvalue()
    assert "step 10/10" in shown
    assert shown.count("\n") <= 2  # rewritten in place, not scrolled
    assert ("gen 50%" in shown) == (columns == 200)
    assert ("loss" in shown) == (columns > 30)


def test_open_sinks_writes_where_it_says(tmp_path, capsys):
    with open_sinks(("console", "jsonl", "tensorboard"), tmp_path, first_step=0, total_steps=1) as sinks:
        sinks.log(1, {"actor/nll_loss": 0.5})
    assert capsys.readouterr().out == "step 1/1 | loss 0.5\n"
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "actor/nll_loss": 0.5}]
    assert list((tmp_path / "tensorboard").iterdir())


def test_an_unknown_sink_is_refused_before_any_is_opened(tmp_path):
    with pytest.raises(ConfigError, match=r"wand.*console, jsonl, tensorboard"):
        open_sinks(("jsonl", "wand"), tmp_path, first_step=0, total_steps=1)
    assert not list(tmp_path.iterdir())


def sample(**changes):
    text = {"prompt": "1+1=", "response": "2", "answer": "2"}
    origin = {"uid": "a#0", "sample": 0, "source": "student"}
    return text | origin | {"score": 1.0, "finish": "stop", "response_tokens": 2} | changes


NASTY = ["plain", "NUL \0 inside", "RTL \u202e mark", "e\u0301 is not é", "emoji 🙂", "", "\r\n\t", "</p>"]


def test_samples_come_back_as_they_were(tmp_path):
    path = write_samples(tmp_path, 10, [sample(response=text, score=np.float32(0.5)) for text in NASTY])
    assert path is not None
    assert path == tmp_path / "samples" / "step_000010.parquet"
    rows = read_samples(tmp_path)
    assert [row["response"] for row in rows] == NASTY
    assert rows[0] == sample(response="plain", score=0.5) | {"step": 10}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_lone_surrogates_are_kept_as_escapes(tmp_path):
    write_samples(tmp_path, 1, [sample(prompt="a\ud800b", uid="\udfff")])
    (row,) = read_samples(tmp_path)
    assert (row["prompt"], row["uid"]) == ("a\\ud800b", "\\udfff")


def test_samples_of_several_steps_and_of_a_second_attempt(tmp_path):
    assert write_samples(tmp_path, 5, []) is None
    for step, answer in ((100, "x"), (2, "y"), (100, "z")):
        write_samples(tmp_path, step, [sample(answer=answer), sample(answer=None, score=None)])
    (tmp_path / "samples" / "step_000007.parquet.tmp").write_bytes(b"half")
    assert sample_steps(tmp_path) == [2, 100]
    found = [(row["step"], row["answer"]) for row in read_samples(tmp_path)]
    assert found == [(2, "y"), (2, None), (100, "z"), (100, None)]
    assert {row["step"] for row in read_samples(tmp_path, [2])} == {2}
    assert read_samples(tmp_path / "nowhere") == []


def test_an_unknown_sample_column_is_refused(tmp_path):
    with pytest.raises(ValueError, match="reward"):
        write_samples(tmp_path, 1, [sample(reward=1.0)])


def test_importing_metrics_is_cheap():
    heavy = {"torch", "pyarrow", "rich", "tensorboard"}
    program = "import sys, miniverl.metrics; print(*sys.modules)"
    root = Path(__file__).parent.parent
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=root).split()
    assert not heavy & set(loaded)
