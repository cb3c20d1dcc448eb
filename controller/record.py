"""What a run leaves behind and goes on from: metrics, samples, checkpoints, held-out history, the final
result.

The loops say what happened; when something is due, where it is written and how a run resumes is decided here.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from miniverl.checkpoint import Checkpoint, prune, write_checkpoint, write_json
from miniverl.config import Config
from miniverl.config_io import config_to_dict
from miniverl.controller.group import WorkerGroup
from miniverl.data.prompts import PromptStream
from miniverl.metrics import Timers, open_sinks, write_samples


class Learner(Protocol):
    """A worker with weights that change: what a checkpoint asks of it."""

    def save(self, directory: str) -> None: ...
    def load(self, directory: str) -> None: ...


class Record:
    """Counters and files of one run. `step` counts finished optimizer steps, over all its resumed parts."""

    def __init__(self, config: Config, run_dir: Path, resume_from: Checkpoint | None, started: float) -> None:
        self.config, self.run_dir, self._started = config, run_dir, started
        self.state: dict[str, Any] = (
            resume_from.state()
            if resume_from
            else {"step": 0, "seconds": 0.0, "tokens": 0, "history": []}
        )
        self.resume_from = resume_from
        self.step: int = self.state["step"]
        self.history: list[list[float]] = self.state["history"]
        """[step, held-out accuracy], oldest first."""
        self.timers = Timers()
        self.stop_signal: str | None = None
        self._samples: list[Mapping[str, object]] = []
        if resume_from is None:  # a run of this directory that never got to a checkpoint
            shutil.rmtree(run_dir / "samples", ignore_errors=True)
        write_json(run_dir / "config.json", config_to_dict(config))
        self.sinks = open_sinks(
            config.trainer.sinks, run_dir, self.step + 1 if resume_from else 0, config.trainer.steps
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.sinks.close()

    # When things are due.

    @property
    def running(self) -> bool:
        return self.step < self.config.trainer.steps and self.stop_signal is None

    @property
    def evaluation_due(self) -> bool:
        """Before the first step, every `eval.every`, and after the last; never twice for one step."""
        if self.history and self.history[-1][0] == self.step:
            return False
        every = self.config.eval.every
        return self.step in (0, self.config.trainer.steps) or (every > 0 and self.step % every == 0)

    @property
    def checkpoint_due(self) -> bool:
        every = self.config.trainer.save_every
        return not self.running or (every > 0 and self.step % every == 0)

    # What happened.

    def finish_step(self, metrics: Mapping[str, float], samples: Sequence[Mapping[str, object]]) -> None:
        """Count the step and log it."""
        self.step += 1
        timing = self.timers.pop()
        tokens = metrics.get("perf/total_num_tokens", 0.0)
        self.state["tokens"] += tokens
        seconds = timing.get("timing_s/step", 0.0)
        derived = {
            "training/global_step": float(self.step),
            "perf/time_per_step": seconds,
            "perf/throughput": tokens / seconds if seconds else 0.0,
        }
        self.sinks.log(self.step, {**metrics, **timing, **derived})
        self._samples = list(samples)
        write_samples(self.run_dir, self.step, self._samples)

    def finish_evaluation(
        self, metrics: Mapping[str, float], samples: Sequence[Mapping[str, object]]
    ) -> None:
        if not metrics:
            return
        self.history.append([self.step, metrics["val/accuracy"]])
        self.sinks.log(self.step, {**metrics, **self.timers.pop()})
        self._samples += samples
        write_samples(self.run_dir, self.step, self._samples)

    def save(self, learners: Sequence[WorkerGroup], stream: PromptStream) -> None:
        """A checkpoint of this step with all that learns; older ones are pruned."""
        state = {
            **self.state,
            "step": self.step,
            "history": self.history,
            "seconds": self.seconds,
            "position": stream.position,
            "data": stream.fingerprint,
            "weight_version": self.step,
            "config": config_to_dict(self.config),
        }
        directory = self.run_dir / "checkpoints"
        # Every worker of a group holds the same weights, so one of them writes them.
        writers = [partial(group.first, Learner.save) for group in learners]
        write_checkpoint(directory, self.step, state, writers)
        scores = {int(step): score for step, score in self.history} if self.config.trainer.keep_best else {}
        prune(directory, self.step, self.config.trainer.keep_last, scores)

    def restore(self, learners: Sequence[WorkerGroup], stream: PromptStream) -> None:
        """Bring workers and data to where the checkpoint stood; a fresh run has nothing to restore."""
        if self.resume_from is None:
            return
        for group in learners:
            group.all(Learner.load, str(self.resume_from.path))
        stream.seek(self.state["position"])

    # The end.

    @property
    def seconds(self) -> float:
        """Wall seconds from the start of the program, earlier parts of a resumed run included."""
        return self.state["seconds"] + time.time() - self._started

    def result(self) -> dict[str, Any]:
        """What RESULT prints."""
        return {
            "experiment": self.config.experiment,
            "accuracy_before": self.history[0][1] if self.history else None,
            "accuracy_after": self.history[-1][1] if self.history else None,
            "steps": self.step,
            "finished": self.step >= self.config.trainer.steps,
            "seconds": round(self.seconds, 1),
            "tokens": int(self.state["tokens"]),
            "run_dir": str(self.run_dir),
        }

    def stop_on(self, *signals: signal.Signals) -> None:
        """Let these signals end the run after the current step, with a checkpoint. Only the main thread may
        ask."""
        if threading.current_thread() is not threading.main_thread():
            return

        def stop(number: int, frame: object) -> None:
            self.stop_signal = signal.Signals(number).name

        for number in signals:
            signal.signal(number, stop)
