"""Reward functions that misbehave, each in one way; tests load them by path."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal

import numpy as np

state = {"busy": 0, "count": 0}


def length(sample):
    return len(sample.response)


def told(sample, **kwargs):
    """What the response names."""
    return {
        "bool": True,
        "int": 3,
        "decimal": Decimal("0.5"),
        "float32": np.float32(0.25),
        "int64": np.int64(7),
        "0-dim array": np.array(0.5),
        "zero": 0.0,
        "text": "1.0",
        "list": [1.0],
        "1-dim array": np.array([1.0]),
        "None": None,
        "nan": float("nan"),
        "inf": np.float64("inf"),
        "dict": {"score": 0.5, "format": True},
        "dict without score": {"reward": 1.0},
        "dict with text": {"score": 1.0, "why": "because"},
        "dict with none": {"score": None},
        "kwargs": {"score": 1.0, **kwargs},
    }[sample.response]


def tensor(sample):
    import torch

    return {"0": torch.tensor(0.5), "1": torch.tensor([0.5])}[sample.response]


def obey(sample):
    """Carry out the response."""
    match sample.response:
        case "loop":
            while True:
                pass
        case "regex":
            return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))
        case "sleep":
            time.sleep(600)
        case "digits":
            return float(int("9" * 200_000) > 0)
        case "raise":
            raise LookupError("no such thing")
        case "exit":
            sys.exit(0)
        case "die":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "child":
            subprocess.Popen(["sleep", f"600.{os.getppid():07d}"])  # told apart by whose pool this is
            time.sleep(600)
        case "fork":
            if os.fork() == 0:
                return 0.25
            time.sleep(0.2)
        case "print":
            print('{"serial": 1, "score": 9}', flush=True)
            os.write(1, b'{"serial": 1, "score": 9}\n')
        case "late alarm":
            signal.signal(signal.SIGALRM, lambda *_: os._exit(3))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        case "wait":
            time.sleep(0.3)
    return 1.0


def alarm(sample):
    """A verifier with a limit of its own, as many are written."""

    def stop(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    return 1.0


def alarm_in_thread(sample):
    failure = []

    def verify():
        try:
            alarm(sample)
        except ValueError as error:
            failure.append(error)

    thread = threading.Thread(target=verify)
    thread.start()
    thread.join()
    raise failure[0]


def extract(sample):
    """Raises where there is nothing to extract, after it has begun."""
    sample.extra["scores"].append(1.0)
    return float(sample.response.split("=")[1])


def spoil(sample):
    sample.extra["seen"].append(sample.id)
    sample.extra["count"] += 1
    return len(sample.extra["seen"]) + sample.extra["count"] / 10


def count(sample):
    """Counts in shared state, slowly: any other call that runs in between would show."""
    state["count"] = 0
    for _ in range(int(sample.response)):
        seen = state["count"]
        time.sleep(0.002)
        state["count"] = seen + 1
    return state["count"]


def process(sample):
    """Which process this is, what it has loaded, and what it may reach."""
    return {
        "score": os.getpid(),
        "torch": "torch" in sys.modules,
        "main thread": threading.current_thread() is threading.main_thread(),
        "leader": os.getpgid(0) == os.getpid(),
    }


NOT_A_FUNCTION = 3
