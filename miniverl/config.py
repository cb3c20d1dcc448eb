"""The one frozen tree that describes an experiment, and every check that needs more than one field of it.

Defaults live here and nowhere else (`conf/` lists only what an experiment changes). The meaning, unit and
reason of a field stand under it. Whoever reads a config past `main.py` reads attributes of these classes.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from miniverl.config_algo import AlgoConfig
from miniverl.config_data import DataConfig
from miniverl.config_policy import check_policy
from miniverl.config_reward import RewardConfig, scheme
from miniverl.config_tasks import AdditionConfig as AdditionConfig
from miniverl.errors import ConfigError
from miniverl.errors import RunError as RunError

Dtype = Literal["float32", "bfloat16", "float16", "float64"]

_strict = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=_strict)
class LoraConfig:
    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """0 by default: a dropout mask would make the student that writes differ from the student that learns."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names as PEFT takes them; `all-linear` = every linear layer but the head."""


@dataclass(frozen=True, config=_strict)
class ModelConfig:
    """One model of a role: where it lies and how it is held."""

    path: str = ""
    """A directory with config.json, safetensors and tokenizer files, `embedded:NAME` for a model that ships
    with miniverl, or a name on the model hub (downloaded by transformers)."""
    dtype: Dtype = "float32"
    init: Literal["pretrained", "random"] = "pretrained"
    """`random`: the directory holds config and tokenizer only; weights are drawn from `trainer.seed`."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4`: 4-bit weights through bitsandbytes (`requirements/nf4.txt`), for a frozen model only."""
    lora: LoraConfig | None = None
    """None = all weights are trained."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    trust_remote_code: bool = False
    """Run Python that comes with the model. Off unless you say so."""


@dataclass(frozen=True, config=_strict)
class ModelsConfig:
    student: ModelConfig = field(default_factory=ModelConfig)
    teacher: ModelConfig | None = None
    critic: ModelConfig | None = None
    """What the critic starts from, below its value head; None = as the student."""
    tokenizer_mismatch: Literal["refuse", "allow"] = "refuse"
    """Teacher and student must render a prompt to the same ids and stop at the same ids. `allow` waives the
    template and stop check (never the token → id map)."""
    requires_cuda: bool = False
    """These models are too heavy for a CPU: refuse a machine without a CUDA GPU before anything loads."""

    def given(self) -> dict[str, ModelConfig]:
        """The models that the config names, by role."""
        named = {"student": self.student, "teacher": self.teacher, "critic": self.critic}
        return {role: model for role, model in named.items() if model is not None}


@dataclass(frozen=True, config=_strict)
class RolloutConfig:
    engine: Literal["hf_cached", "hf_reference"] = "hf_cached"
    n: PositiveInt = 1
    """Responses per prompt."""
    temperature: float = 1.0
    """The run's one temperature: responses are sampled at it and both sides of the loss are divided by it."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Sample in the smallest set of tokens with this mass; 1 = all."""
    max_response_length: PositiveInt = 256
    """Tokens, the stop id included."""
    stop_ids: tuple[int, ...] = ()
    """Stop ids besides the model's own end-of-text ids."""
    ignore_eos: bool = False
    """Never stop before max_response_length (benchmarks)."""
    max_batch_rows: PositiveInt = 256
    """Sequences generated at once: bounds the KV cache."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """`auto`: on CUDA, decode through a static cache and captured graphs."""


@dataclass(frozen=True, config=_strict)
class OptimConfig:
    lr: PositiveFloat = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up; `linear` and `cosine` fall to `min_lr_ratio` of lr at the last step."""
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    """Largest gradient norm; 0 = no clipping."""
    max_skipped: PositiveInt = 3
    """A gradient that is not finite takes no step and is counted; this many in a row end the run."""


@dataclass(frozen=True, config=_strict)
class EvalConfig:
    every: int = 10
    """Steps between held-out evaluations; 0 = only before the first and after the last step."""
    size: PositiveInt = 200
    """Held-out prompts, the same ones each time."""
    temperature: float = 0.0
    """0 = greedy."""
    max_response_length: PositiveInt | None = None
    """None = rollout.max_response_length."""
    scorer: str | None = None
    """What held-out responses are scored by: a name of `reward.functions`, a built-in (docs/rewards.md) or an
    import path. None = reward.accuracy, or without reward functions the data's own: `exact_match` (what
    follows the last </think>, or the whole response, stripped, equals the answer), `reasoning_gym`."""


@dataclass(frozen=True, config=_strict)
class TrainerConfig:
    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 16
    """Prompts, not sequences: a step trains prompts_per_step × rollout.n sequences."""
    micro_batch_tokens: PositiveInt = 8192
    """Padded tokens in one forward/backward: bounds activation memory, never changes the gradient."""
    seed: int = 0
    deterministic: bool = True
    """Refuse settings and engines that would make two runs of the same config differ. (CUDA kernels may still
    round differently from run to run.)"""
    run_dir: str | None = None
    """None = runs/<experiment>/<time>."""
    resume: str = "auto"
    """`auto`: go on from the newest checkpoint of run_dir (or of the newest unfinished run of the same
    config) · `never` · or the path of a checkpoint or run directory."""
    save_every: int = 50
    """Steps between checkpoints; 0 = only the last."""
    keep_last: PositiveInt = 2
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out accuracy."""
    export: bool = True
    """Write the final student as a Hugging Face (or PEFT) directory, RUN_DIR/export."""
    sinks: tuple[Literal["console", "jsonl", "tensorboard"], ...] = ("console", "jsonl", "tensorboard")
    samples_per_step: int = 8
    """Rollouts written per step to RUN_DIR/samples as parquet; 0 = none."""
    report: bool = True
    """Write RUN_DIR/report.html and PNG curves at the end."""


@dataclass(frozen=True, config=_strict)
class PlacementConfig:
    kind: Literal["local", "one_gpu"] = "local"
    """`local`: all roles in this process, no Ray · `one_gpu`: one Ray host, roles take turns on the
    device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    memory_gib: PositiveFloat | None = None
    """Memory budget of the device; the plan is refused above it. None = what a GPU has, and no limit on
    a CPU."""
    threads: PositiveInt = 1
    """torch threads per process on CPU."""
    num_cpus: PositiveInt = 1
    """CPUs that the Ray host asks for."""
    wait_s: PositiveFloat = 60.0
    """Longest wait for Ray to start, and for a host to be placed."""
    call_timeout_s: PositiveFloat = 3600.0
    """Longest wait for one remote call."""
    dashboard: bool = False
    """Start Ray's dashboard and print its address."""


@dataclass(frozen=True, config=_strict)
class Config:
    experiment: str = ""
    summary: str = ""
    """One line for the list of experiments."""
    hardware: str = ""
    """What it wants to run on, for the list of experiments."""
    model: ModelsConfig = field(default_factory=ModelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    plan_only: bool = False
    """Print placement and memory table, load nothing, exit 0."""
    extra: dict[str, object] = field(default_factory=dict)
    """Your own keys (`+extra.note=…`): kept with the run, read by nothing."""

    def __post_init__(self) -> None:
        for check in CHECKS:
            check(self)


def _in_range(key: str, value: float, low: float, high: float, hint: str = "") -> None:
    if not low <= value <= high:
        raise ConfigError(f"{key}={value} must lie between {low} and {high}.{' ' + hint if hint else ''}")


def _ranges(c: Config) -> None:
    _in_range("algo.beta", c.algo.beta, 0, 1)
    _in_range("algo.alpha", c.algo.alpha, 0, 1)
    _in_range("algo.lam", c.algo.lam, 0, 1)
    _in_range("rollout.top_p", c.rollout.top_p, 1e-6, 1, "1 means no filter.")
    _in_range("rollout.top_k", c.rollout.top_k, 0, 2**31, "0 means no filter.")
    _in_range("optim.warmup_steps", c.optim.warmup_steps, 0, c.trainer.steps, "trainer.steps is the end.")
    _in_range("optim.min_lr_ratio", c.optim.min_lr_ratio, 0, 1)
    _in_range("optim.weight_decay", c.optim.weight_decay, 0, 1e6)
    for i, beta in enumerate(c.optim.betas):
        _in_range(f"optim.betas[{i}]", beta, 0, 0.999999)
    if c.model.student.lora:
        _in_range("model.student.lora.dropout", c.model.student.lora.dropout, 0, 0.999999)
    for i, stop in enumerate(c.rollout.stop_ids):
        _in_range(f"rollout.stop_ids[{i}]", stop, 0, 2**31)
    _in_range("optim.grad_clip", c.optim.grad_clip, 0, 1e9, "0 means no clipping.")
    _in_range("eval.temperature", c.eval.temperature, 0, 100, "0 means greedy.")
    _in_range("data.addition.forget_carry", c.data.addition.forget_carry, 0, 1)
    for key, value in (("eval.every", c.eval.every), ("trainer.save_every", c.trainer.save_every),
                       ("trainer.samples_per_step", c.trainer.samples_per_step)):
        _in_range(key, value, 0, 2**31)
    low, high = c.data.addition.digits
    if not low <= high <= 9:
        raise ConfigError(f"data.addition.digits=[{low}, {high}] must be [fewest, most] with most at most 9.")


def _temperature(c: Config) -> None:
    if c.algo.tempered and c.rollout.temperature <= 0:
        raise ConfigError(
            f"rollout.temperature={c.rollout.temperature}: training responses are sampled and both sides of "
            "the loss are divided by it, so it must be above 0 (1.0 is usual). Greedy is for "
            "eval.temperature=0."
        )
    _in_range("rollout.temperature", c.rollout.temperature, 0, 100)


def _on_policy(c: Config) -> None:
    filtered = c.rollout.top_k != 0 or c.rollout.top_p != 1.0
    if not c.algo.supervised and c.algo.strict_on_policy and filtered:
        raise ConfigError(
            f"rollout.top_k={c.rollout.top_k}, rollout.top_p={c.rollout.top_p}: responses would come from a "
            "filtered distribution while the loss takes the full one. Use top_k=0 and top_p=1, or accept it "
            "with algo.strict_on_policy=false."
        )


def _roles(c: Config) -> None:
    if c.algo.needs_teacher and c.model.teacher is None:
        key = f"algo.name={c.algo.name}" if c.algo.name != "policy_gradient" else (
            f"algo.policy.teacher_coef={c.algo.policy.teacher_coef:g}")
        raise ConfigError(f"{key} needs a teacher: set model.teacher.path, or choose a model group "
                          "with one (model=demo). algo.name=sft trains without a teacher.")
    if c.algo.name == "kd" and c.algo.teacher_top_k is None:
        raise ConfigError("algo.name=kd keeps the teacher's targets on disk, where full distributions "
                          "would not fit: set algo.teacher_top_k (algo=kd sets 32).")
    for role, m in c.model.given().items():
        if role != "teacher" and m.quantization != "none" and m.lora is None:
            raise ConfigError(f"model.{role}.quantization={m.quantization} freezes the weights: add "
                              f"model.{role}.lora.rank=16, or use quantization=none.")
        if role == "teacher" and m.lora is not None:
            raise ConfigError("model.teacher.lora is set, but a teacher is never trained: remove it.")
        if role == "teacher" and m.init == "random":
            raise ConfigError("model.teacher.init=random: a teacher with random weights has nothing to "
                              "teach; use init=pretrained.")
        if m.quantization == "nf4" and m.dtype == "float64":
            raise ConfigError(f"model.{role}.dtype=float64 cannot go with quantization=nf4; use bfloat16 or "
                              "float32.")


def _precision(c: Config) -> None:
    for role, m in c.model.given().items():
        if role != "teacher" and m.lora is None and m.dtype in ("bfloat16", "float16"):
            raise ConfigError(
                f"model.{role}.dtype={m.dtype} with all weights trained: an update of usual size is below "
                "what such a weight can hold, so it would be lost. Use dtype=float32, or train an adapter "
                f"(model.{role}.lora.rank=16)."
            )


def _lora(c: Config) -> None:
    if c.model.student.lora and c.trainer.deterministic and c.model.student.lora.dropout:
        raise ConfigError(
            f"model.student.lora.dropout={c.model.student.lora.dropout} makes the student that learns differ "
            "from the one that writes; use dropout=0, or accept it with trainer.deterministic=false."
        )


def _data(c: Config) -> None:
    if c.data.source == "files":
        if not c.data.train_files:
            raise ConfigError("data.source=files needs data.train_files=[…] (parquet or jsonl).")
        if c.algo.rows in ("responses", "labels") and c.data.response_key is None:
            why = f"algo.name={c.algo.name}" if c.algo.supervised else f"algo.lam={c.algo.lam}"
            raise ConfigError(f"{why} trains on the dataset's responses: name their column with "
                              "data.response_key=….")
        if c.data.eval_files and c.data.answer_key is None:
            raise ConfigError("data.eval_files are scored against an answer: name its column with "
                              "data.answer_key=….")


def _sizes(c: Config) -> None:
    rows = c.trainer.prompts_per_step * c.rollout.n
    if c.rollout.n > c.rollout.max_batch_rows:
        raise ConfigError(f"rollout.n={c.rollout.n} responses of one prompt are generated together, but "
                          f"rollout.max_batch_rows={c.rollout.max_batch_rows}; raise it to at least that.")
    longest = c.data.max_prompt_length + c.rollout.max_response_length
    if c.trainer.micro_batch_tokens < longest:
        raise ConfigError(
            f"trainer.micro_batch_tokens={c.trainer.micro_batch_tokens} cannot hold one sequence of "
            f"data.max_prompt_length + rollout.max_response_length = {longest} tokens; raise it to at least "
            f"{longest}."
        )
    if c.algo.supervised and c.rollout.n != 1:
        raise ConfigError(f"algo.name={c.algo.name} trains on the dataset's own responses, one row per "
                          f"prompt ({rows} asked for): use rollout.n=1, not {c.rollout.n}.")


def _preference(c: Config) -> None:
    p = c.algo.preference
    if c.algo.name != "preference":
        return
    _in_range("algo.preference.label_smoothing", p.label_smoothing, 0, 0.499999, "0.5 would say nothing.")
    for key, value, losses in (
        ("label_smoothing", p.label_smoothing, ("dpo",)),
        ("margin", p.margin, ("simpo",)),
        ("length_normalised", p.length_normalised, ("dpo", "ipo", "kto")),
    ):
        if value and p.loss not in losses:
            raise ConfigError(f"algo.preference.{key}={value} has no part in algo.preference.loss={p.loss}, "
                              f"only in {', '.join(losses)}: leave it at its default.")
    if p.loss == "kto" and c.trainer.prompts_per_step < 2:
        raise ConfigError("trainer.prompts_per_step=1: algo.preference.loss=kto estimates its KL term from "
                          "the responses of a step's other prompts; use 2 or more (16 for a steady one).")
    longest = c.data.max_prompt_length + c.rollout.max_response_length
    if p.loss != "kto" and c.trainer.micro_batch_tokens < 2 * longest:
        raise ConfigError(f"trainer.micro_batch_tokens={c.trainer.micro_batch_tokens} cannot hold one pair "
                          f"of 2 × (data.max_prompt_length + rollout.max_response_length) = {2 * longest} "
                          f"tokens; raise it to at least {2 * longest}.")


def _pretrain(c: Config) -> None:
    if c.algo.name != "pretrain":
        return
    _in_range("data.row_tokens", c.data.row_tokens, 2, 2**31, "A row of one token has nothing to predict.")
    if c.trainer.micro_batch_tokens < c.data.row_tokens:
        raise ConfigError(f"trainer.micro_batch_tokens={c.trainer.micro_batch_tokens} cannot hold one row of "
                          f"data.row_tokens={c.data.row_tokens}; raise it to at least that.")


def _reward(c: Config) -> None:
    try:
        scheme(c.reward, c.eval.scorer, c.data.source, c.rollout.max_response_length)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _device(c: Config) -> None:
    if c.model.requires_cuda and c.placement.device == "cpu":
        raise ConfigError("placement.device=cpu contradicts model.requires_cuda=true: choose a model that "
                          "runs on a CPU (model=demo), or accept the wait with model.requires_cuda=false.")


CHECKS = (_ranges, _temperature, _on_policy, _roles, _precision, _lora, _data, _sizes, check_policy,
          _preference, _pretrain, _reward, _device)
