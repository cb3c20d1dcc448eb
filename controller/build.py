"""Config and plan → a running experiment → its result. Everything that is refused is refused before a model
loads."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from miniverl.checkpoint import locked, write_json
from miniverl.config import Config, ConfigError, RunError
from miniverl.controller import resume
from miniverl.controller.evaluate import Evaluator
from miniverl.controller.experience import Experience
from miniverl.controller.group import WorkerGroup
from miniverl.controller.offline import open_targets
from miniverl.controller.plan import GIB, Plan
from miniverl.controller.policy_signal import PolicyGradient
from miniverl.controller.pool import LocalPool, Pool, RayPool
from miniverl.controller.record import Record
from miniverl.controller.scoring import Scoring, accuracy_name, open_rewards
from miniverl.controller.signals import Distillation, Signal
from miniverl.controller.supervised import Lesson, Supervised
from miniverl.controller.supervised_signals import CachedTeacher, Imitation, PackedTexts, Preference
from miniverl.controller.trainer import Loop, Trainer, fit
from miniverl.data.preflight import check_tokenizers, check_vocabulary, stop_ids
from miniverl.data.prompts import Data, open_data
from miniverl.data.target_cache import TargetCache
from miniverl.models.load import eos_ids, load_tokenizer
from miniverl.report import describe_environment, write_report
from miniverl.workers.actor import Actor
from miniverl.workers.critic import Critic
from miniverl.workers.host import colocated
from miniverl.workers.process_reward import ProcessReward
from miniverl.workers.reference import Reference
from miniverl.workers.rollout.base import Sampling
from miniverl.workers.rollout.worker import RolloutWorker


def run(config: Config, plan: Plan) -> dict[str, Any]:
    """Carry out an experiment and return what RESULT prints.

    Raises:
        ConfigError: it cannot run as asked; nothing was started.
        RunError: it started and failed.
    """
    plan.refuse_if_infeasible()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tokenizer, stops = _tokenizer(config)
    run_dir, checkpoint = resume.choose(config)
    with _full_disk_told(run_dir), locked(run_dir):
        data = open_data(config, tokenizer, run_dir / "quarantine.jsonl", stops)
        if checkpoint is not None:
            resume.check_data(checkpoint, data.train.fingerprint)
        _announce(config, plan, run_dir, checkpoint.step if checkpoint else None, data, len(tokenizer))
        write_json(run_dir / "environment.json", describe_environment())
        with contextlib.ExitStack() as opened:
            rewards = opened.enter_context(open_rewards(config, tokenizer, run_dir))
            pool = _pool(config, plan)
            opened.callback(pool.close)
            with Record(config, run_dir, checkpoint, psutil.Process().create_time()) as record:
                roles, device = plan.roles, plan.device
                loop = assemble(config, roles, pool, tokenizer, stops, data, record, device, rewards)
                record.stop_on(signal.SIGTERM)
                told = loop.rollout.first(RolloutWorker.notes)
                for note in told:
                    say(note)
                (run_dir / resume.RESULT).unlink(missing_ok=True)
                fit(loop)
                for note in loop.rollout.first(RolloutWorker.notes):
                    if note not in told:
                        say(note)
                result = _finish(config, plan, pool, loop, record)
        return _report(config, run_dir, result)


def assemble(
    config: Config,
    roles: tuple[str, ...],
    pool: Pool,
    tokenizer: PreTrainedTokenizerBase,
    stops: tuple[int, ...],
    data: Data,
    record: Record,
    device: str,
    rewards: tuple[Scoring, Scoring],
) -> Loop:
    """Workers into the pool, and the page over them. rewards: the scoring of training and of held-out
    rollouts."""
    vocabulary = len(tokenizer)
    site = _Site(config, roles, pool, vocabulary, device)
    targets = _cached_targets(site, data)
    pool.build("actor", Actor, config, vocabulary, device)
    pool.build("rollout", RolloutWorker, config, colocated("actor"))
    actor, rollout = WorkerGroup(pool, "actor"), WorkerGroup(pool, "rollout")
    sampling = Sampling(
        config.rollout.temperature,
        config.rollout.top_k,
        config.rollout.top_p,
        config.rollout.max_response_length,
        stops,
        config.trainer.seed,
    )
    held_out = Sampling(
        config.eval.temperature,
        0,
        1.0,
        config.eval.max_response_length or sampling.max_new_tokens,
        stops,
        config.trainer.seed,
    )
    evaluate = Evaluator(rollout, data.held_out, held_out, rewards[1])
    if config.algo.supervised:
        lesson = _lesson(site, actor, targets)
        return Supervised(config, data, tokenizer, sampling, actor, rollout, lesson, evaluate, record)
    accuracy = accuracy_name(config)
    experience = Experience(config, data.train, sampling, rollout, rewards[0], accuracy, record.timers)
    signal = _signal(site, actor, accuracy)
    return Trainer(config, data, tokenizer, actor, rollout, experience, signal, evaluate, record)


@dataclass(frozen=True)
class _Site:
    """Where workers are built, and what all of them are told."""

    config: Config
    roles: tuple[str, ...]
    pool: Pool
    vocabulary: int
    device: str

    def group(self, role: str, worker: Callable[..., Any], *first: Any) -> WorkerGroup | None:
        """The workers of `role`, built; None where the plan has no such role."""
        if role not in self.roles:
            return None
        self.pool.build(role, worker, self.config, *first, self.vocabulary, self.device)
        return WorkerGroup(self.pool, role)

    def reference(self) -> WorkerGroup | None:
        """A frozen copy of the starting student; None also where the actor's own base takes its place."""
        return self.group("reference", partial(Reference, role="student"), self.config.model.student)


def _signal(site: _Site, actor: WorkerGroup, accuracy: str) -> Signal:
    """The workers that the objective asks, and the object that asks them."""
    teacher = site.group("teacher", Reference, site.config.model.teacher)
    if site.config.algo.name == "gkd" and teacher is not None:
        actor.all(Actor.attach_teacher, colocated("teacher", "head"))
        return Distillation(teacher)
    return PolicyGradient(
        site.config,
        accuracy,
        actor,
        site.reference(),
        site.group("critic", Critic),
        site.group("process_reward", ProcessReward),
        teacher,
    )


def _cached_targets(site: _Site, data: Data) -> TargetCache | None:
    """Before the student loads, so that it and the teacher never share the device."""
    teacher = site.config.model.teacher
    if site.config.algo.name != "kd" or teacher is None:
        return None
    return open_targets(site.config, teacher, data.train, site.pool, site.vocabulary, site.device, say)


def _lesson(site: _Site, actor: WorkerGroup, targets: TargetCache | None) -> Lesson:
    """The same for what is learned from dataset responses."""
    config = site.config
    if targets is not None:
        return CachedTeacher(targets)
    if config.algo.name == "preference":
        return Preference(config, actor, site.reference())
    return PackedTexts(config.data.row_tokens) if config.algo.name == "pretrain" else Imitation()


@contextlib.contextmanager
def _full_disk_told(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RunError(
            f"{run_dir} could not be written to: {error.strerror}. Earlier checkpoints are intact; free some "
            "space."
        ) from error


def say(text: str) -> None:
    print(text, flush=True)


def shorten(text: object, limit: int) -> str:
    """One line of at most `limit` characters."""
    line = str(text).replace("\n", "⏎")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _tokenizer(config: Config) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """The student's tokenizer and the ids that end a response, after comparing them with the teacher's."""
    student = config.model.student
    tokenizer = load_tokenizer("student", student)
    stops = stop_ids(tokenizer, eos_ids("student", student))
    if config.algo.needs_teacher and config.model.teacher is not None:
        teacher = load_tokenizer("teacher", config.model.teacher)
        for note in check_tokenizers(
            tokenizer,
            teacher,
            (*stops, *config.rollout.stop_ids),
            (*stop_ids(teacher, eos_ids("teacher", config.model.teacher)), *config.rollout.stop_ids),
            config.model.tokenizer_mismatch,
            config.data.chat_template_kwargs,
        ):
            say(note)
    if config.model.critic is not None:  # it reads the student's ids, whatever it starts from
        check_vocabulary("critic", tokenizer, load_tokenizer("critic", config.model.critic))
    k = config.algo.teacher_top_k
    if k is not None and k > len(tokenizer):
        raise ConfigError(
            f"algo.teacher_top_k={k}, but the vocabulary has {len(tokenizer)} tokens: use at most that, "
            "or null for the full distribution."
        )
    more = tuple(i for i in config.rollout.stop_ids if i not in stops)
    return tokenizer, () if config.rollout.ignore_eos else stops + more


def _pool(config: Config, plan: Plan) -> Pool:
    if config.placement.kind == "local":
        return LocalPool(config.placement, plan.device)
    say("starting Ray …")
    pool = RayPool(config.placement, plan.device, f"miniverl-{config.experiment}", plan.roles)
    if config.placement.dashboard:
        say(f"Ray dashboard: {pool.dashboard_url}")
    return pool


def _announce(
    config: Config, plan: Plan, run_dir: Path, step: int | None, data: Data, vocabulary: int
) -> None:
    """What is about to run, in the units that people mix up, and every setting a library would otherwise
    hide."""
    c = config
    unit, each = {"texts": ("rows", 1), "pairs": ("pairs", 2)}.get(c.algo.rows, ("prompts", c.rollout.n))
    sequences = c.trainer.prompts_per_step * each
    longest, limits = c.data.row_tokens, f"rows of {c.data.row_tokens}"
    if unit != "rows":
        longest = c.data.max_prompt_length + c.rollout.max_response_length
        limits = f"prompts to {c.data.max_prompt_length}, responses to {c.rollout.max_response_length}"
    say(
        f"{c.experiment or 'run'}: {c.trainer.steps} steps × {c.trainer.prompts_per_step} {unit}"
        f"{f' × {each} responses' if unit != 'rows' else ''} = {sequences} sequences a step, "
        f"up to {sequences * longest} tokens ({limits})"
    )
    say(
        f"sampling: {c.rollout.engine}, temperature {c.rollout.temperature:g}, "
        f"top_k {c.rollout.top_k or 'off'}, top_p {c.rollout.top_p:g}, no min_p, no repetition penalty, "
        f"seeded by (seed, prompt, sample, position); vocabulary {vocabulary}"
    )
    say(plan.table())
    for note in data.notes:
        say(note)
    if step is not None:
        say(f"going on after step {step} of {run_dir} (trainer.resume=never starts anew)")
    say(f"run directory: {run_dir}")


def _finish(config: Config, plan: Plan, pool: Pool, loop: Loop, record: Record) -> dict[str, Any]:
    """The export and the figures; printed result."""
    result = record.result()
    parts = {line.what: int(line.size) for line in plan.lines}
    result["memory"] = {
        "estimate": parts | {"total": int(plan.estimate)} if parts else {},
        "measured": {"total": max(pool.peak_memory_bytes())},
        "budget": plan.budget,
    }
    if record.stop_signal is not None and not result["finished"]:
        say(f"stopped by {record.stop_signal} after step {record.step}; the same command goes on from there")
        return result
    if config.trainer.export:
        directory = record.run_dir / "export"
        loop.actor.first(Actor.export, str(directory))
        loop.tokenizer.save_pretrained(directory)
        result["export"] = str(directory)
    return result


def _report(config: Config, run_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    if result["finished"]:
        write_json(run_dir / resume.RESULT, result)
    if config.trainer.report:
        result["report"] = str(write_report(run_dir))
    _show_outcome(run_dir, result)
    return {name: value for name, value in result.items() if name != "memory"}


def _show_outcome(run_dir: Path, result: dict[str, Any]) -> None:
    """For a person: before and after, a few held-out completions, and where everything is."""
    from miniverl.metrics import read_samples, sample_steps

    if result["accuracy_before"] is not None:
        say(
            f"\nheld-out accuracy {result['accuracy_before']:.1%} → {result['accuracy_after']:.1%} "
            f"in {result['steps']} steps, {result['seconds']:.0f} s"
        )
    steps = sample_steps(run_dir)
    rows = [row for row in read_samples(run_dir, steps[-1:]) if row["source"] == "held-out"]
    for row in rows[:4]:
        verdict = "right" if row["score"] else f"wrong, it is {row['answer']}"
        say(f"  {shorten(row['prompt'], 60)} {shorten(row['response'], 120)}  ({verdict})")
    memory = result["memory"]
    estimated = f"{memory['estimate']['total'] / GIB:.3f} GiB" if memory["estimate"] else "unknown"
    say(f"  peak memory {memory['measured']['total'] / GIB:.3f} GiB over the baseline, estimated {estimated}")
    for name, path in (
        ("report", result.get("report")),
        ("checkpoints", run_dir / "checkpoints"),
        ("model", result.get("export")),
    ):
        if path:
            say(f"  {name:12}{path}")
