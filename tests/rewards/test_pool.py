"""Processes that score: order, limits, recovery, and what counts as a score (REW-01 … REW-11)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from miniverl.rewards.pool import Call, CannotStart, Function, RewardPool
from miniverl.rewards.sample import Sample

HERE = "tests/rewards/functions.py"
NAMES = ("length", "told", "obey", "alarm", "alarm_in_thread", "extract", "spoil", "count", "process")


@pytest.fixture(scope="module")
def pool():
    functions = {name: Function(f"{HERE}:{name}", {}) for name in NAMES}
    with RewardPool({**functions, "set": Function(f"{HERE}:told", {"bonus": 0.5})}, 2, 1.0) as opened:
        yield opened


def calls(name, *responses, **fields):
    return [Call(name, Sample(f"s{i}", "", response, **fields)) for i, response in enumerate(responses)]


def scores(pool, name, *responses):
    return [v.score for v in pool.score(calls(name, *responses))]


def sleepers():
    """Living processes that a hang of *this* process's pools started; a zombie's info is None."""
    found = psutil.process_iter(["pid", "cmdline"])
    return [p.info["pid"] for p in found if f"600.{os.getpid():07d}" in (p.info["cmdline"] or ())]


def failure(pool, name, response):
    (verdict,) = pool.score(calls(name, response))
    assert verdict.failed and verdict.score is None
    return verdict.failure


# REW-02: hangs


@pytest.mark.parametrize("how", ["loop", "regex", "sleep", "child"])
def test_rew_02_a_hang_is_killed_named_and_its_slot_recovered(pool, how):
    before = time.monotonic()
    verdicts = pool.score(calls("obey", "fine", how, "fine", how, "fine"))
    assert time.monotonic() - before < 5
    assert [v.score for v in verdicts] == [1.0, None, 1.0, None, 1.0]
    assert verdicts[1].failure == "timeout: no verdict within 1 s (reward.timeout_s)"
    assert scores(pool, "obey", *["fine"] * 4) == [1.0] * 4


def test_rew_02_two_hundred_thousand_digits_are_a_failure_not_a_zero(pool):
    assert failure(pool, "obey", "digits").startswith("exception: ValueError")


def test_a_hang_leaves_no_process_behind(pool):
    assert "timeout" in failure(pool, "obey", "child")
    deadline = time.monotonic() + 5
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers()


def test_calls_run_at_the_same_time(pool):
    before = time.monotonic()
    assert scores(pool, "obey", *["wait"] * 4) == [1.0] * 4
    assert time.monotonic() - before < 1.0, "4 × 0.3 s on two processes"


# REW-01: signals and threads


def test_rew_01_an_alarm_works_because_functions_run_on_the_main_thread(pool):
    assert scores(pool, "alarm", "a", "b") == [1.0, 1.0]


def test_rew_01_an_alarm_in_a_thread_surfaces_as_what_it_is(pool):
    assert failure(pool, "alarm_in_thread", "x").startswith(
        "exception: ValueError: signal only works in main"
    )


def test_an_alarm_left_running_does_not_strike_the_next_call(pool):
    assert scores(pool, "obey", "late alarm", "late alarm", "wait", "wait") == [1.0] * 4


# REW-04: order and number


def test_rew_04_as_many_scores_as_samples_in_their_order(pool):
    found = pool.score(calls("extract", "=1", "=2", "nothing", "=4", extra={"scores": []}))
    assert [v.score for v in found] == [1.0, 2.0, None, 4.0]
    assert found[2].failure == "exception: IndexError: list index out of range"


def test_order_does_not_depend_on_who_is_ready_first(pool):
    told = [str(20 - i) for i in range(20)]
    assert scores(pool, "count", *told) == list(range(20, 0, -1))


# REW-05: what is a score


@pytest.mark.parametrize(
    ("value", "score"),
    [("bool", 1.0), ("int", 3.0), ("decimal", 0.5), ("float32", 0.25), ("int64", 7.0), ("0-dim array", 0.5),
     ("zero", 0.0), ("dict", 0.5)],
)  # fmt: skip
def test_rew_05_numbers_are_scores(pool, value, score):
    (verdict,) = pool.score(calls("told", value))
    assert (verdict.score, verdict.failed) == (score, False)
    assert verdict.parts == ({"format": 1.0} if value == "dict" else {})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("text", "type: the result is a str of length 3, no number"),
        ("list", "type: the result is a list of length 1, no number"),
        ("1-dim array", "type: the result is a ndarray of length 1, no number"),
        ("None", "none: the result is None"),
        ("nan", "not finite: the result is nan"),
        ("inf", "not finite: the result is inf"),
        ("dict without score", "type: the result is a dict without the key score: ['reward']"),
        ("dict with text", "type: part 'why' is a str of length 7, no number"),
        ("dict with none", "none: the score is None"),
    ],
)
def test_rew_05_all_else_is_a_failure(pool, value, why):
    assert failure(pool, "told", value) == why


def test_rew_05_tensors_without_dimensions_are_scores():
    with RewardPool({"tensor": Function(f"{HERE}:tensor", {})}, 1, 60.0) as opened:
        assert scores(opened, "tensor", "0") == [0.5]
        assert failure(opened, "tensor", "1") == "type: the result is a Tensor of length 1, no number"


def test_settings_reach_the_function(pool):
    (verdict,) = pool.score(calls("set", "kwargs"))
    assert verdict.parts == {"bonus": 0.5}


# REW-07: nothing is shared


def test_rew_07_what_a_function_does_to_a_sample_is_seen_by_no_other(pool):
    extra = {"seen": [], "count": np.int64(0)}
    found = pool.score(calls("spoil", *"abcd", extra=extra))
    assert [v.score for v in found] == [1.1] * 4
    assert extra == {"seen": [], "count": 0}


# REW-10: any text


@pytest.mark.parametrize(
    "text", ["e\u0301", "\u200fשלום\u202e", "\ud800 lone", "a\x00b", "\u2028\r\n\x85", "🙂"]
)
def test_rew_10_every_text_arrives_as_it_is(pool, text):
    assert scores(pool, "length", text) == [len(text)]


def test_rew_10_numpy_in_extra_is_plain_and_what_json_cannot_hold_is_a_failure(pool):
    (verdict,) = pool.score(calls("length", "abc", extra={"n": np.int64(3), "v": np.ones(2)}))
    assert verdict.score == 3
    (verdict,) = pool.score(calls("length", "abc", extra={"n": object()}))
    assert verdict.failure == "input: the sample cannot be sent: a value of type object is no JSON"


# REW-11: 32 at a time


def test_rew_11_32_concurrent_calls_to_a_counting_scorer_are_deterministic():
    numbers = [str(i % 9) for i in range(96)]
    with RewardPool({"count": Function(f"{HERE}:count", {})}, 32, 30.0) as opened:
        found = [scores(opened, "count", *numbers) for _ in range(2)]
    assert found[0] == found[1] == [float(n) for n in numbers]


# Deaths


@pytest.mark.parametrize(("how", "why"), [("die", "exit status 0"), ("kill", "signal SIGKILL")])
def test_a_death_is_the_calls_failure_and_its_slot_recovers(pool, how, why):
    assert failure(pool, "obey", how) == f"died: its process ended with {why}"
    assert scores(pool, "obey", "fine", "fine", "fine") == [1.0] * 3


def test_an_exception_and_an_exit_are_told(pool):
    assert failure(pool, "obey", "raise") == "exception: LookupError: no such thing"
    assert failure(pool, "obey", "exit") == "exception: SystemExit: 0"


def test_a_process_that_dies_between_calls_is_replaced_and_no_calls_fault(pool):
    (first,) = scores(pool, "process", "x")
    os.kill(int(first), signal.SIGKILL)
    psutil.wait_procs([p for p in psutil.Process().children() if p.pid == first], timeout=5)
    assert scores(pool, "obey", *["fine"] * 4) == [1.0] * 4


def test_prints_and_forks_do_not_corrupt_the_answers(pool):
    assert scores(pool, "obey", "print", "fork", "print", "fork", "fine", "fine") == [1.0] * 6


def test_the_process_is_light_and_runs_functions_on_its_main_thread(pool):
    (verdict,) = pool.score(calls("process", "x"))
    assert verdict.parts == {"torch": 0.0, "main thread": 1.0, "leader": 1.0}
    assert verdict.score != os.getpid()


def test_busy_processes_die_with_the_driver():
    script = f"""
import os, signal, threading, time
from miniverl.rewards.pool import Call, Function, RewardPool
from miniverl.rewards.sample import Sample
functions = {{name: Function({HERE!r} + ":" + name, {{}}) for name in ("process", "obey")}}
pool = RewardPool(functions, 1, 60.0)
print(int(pool.score([Call("process", Sample("s", "", ""))])[0].score), flush=True)
busy = [Call("obey", Sample("s", "", "loop"))]
threading.Thread(target=pool.score, args=(busy,), daemon=True).start()
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    pid, deadline = int(done.stdout), time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


# Loading


@pytest.mark.parametrize(
    ("function", "kwargs", "why"),
    [
        (f"{HERE}:lenght", {}, "AttributeError.*functions.py has no function lenght"),
        (f"{HERE}:NOT_A_FUNCTION", {}, "AttributeError.*has no function NOT_A_FUNCTION"),
        (f"{HERE}:length", {"weight": 1}, "TypeError.*weight"),
        ("tests/rewards/none.py:length", {}, "FileNotFoundError.*none.py does not exist"),
        ("no_such_package.module:length", {}, "ModuleNotFoundError.*no_such_package"),
        ("overlong", {}, "TypeError.*buffer"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_once(function, kwargs, why):
    before = psutil.Process().children()
    with pytest.raises(CannotStart, match=f"^f .*: {why}"):
        RewardPool({"f": Function(function, kwargs)}, 2, 1.0)
    assert psutil.Process().children() == before


def test_an_import_path_is_seen_from_where_the_driver_sees_it(tmp_path: Path, monkeypatch):
    (tmp_path / "mine.py").write_text("def half(sample):\n    return 0.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RewardPool({"f": Function("mine:half", {})}, 1, 5.0) as opened:
        assert scores(opened, "f", "x") == [0.5]
