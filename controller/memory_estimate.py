"""How much memory a plan will take, from the models' config.json alone: no weights are loaded.

Every line is (bytes, when): `always`, or in one of the phases generate → score → update that take turns. The
total is what lies there always plus the largest phase, or what is there before training (`prepare`), if that
is more. What the formulas assume stands beside them; `tests/test_plan.py` holds them against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from miniverl.config import AlgoConfig, Config, LoraConfig, ModelConfig
from miniverl.data.target_cache import PART

When = Literal["always", "prepare", "generate", "score", "update"]
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
COPIES = {"forward_kl": 5, "reverse_kl": 5, "jsd": 7, "skew_kl": 6, "skew_rkl": 6, "tvd": 7}
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Per weight: 4 bits, one 8-bit scale per block of 64, one float32 scale per 256 of those (double
quantisation)."""


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    size: float
    """Bytes."""
    when: When


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a decoder that memory depends on."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    normed_heads: bool
    """q and k have norms of their own."""
    parameters: int
    linear: tuple[tuple[int, int], ...]
    """(in, out) of one layer's linear maps."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        inner, layers = config["intermediate_size"], config["num_hidden_layers"]
        vocabulary = config["vocab_size"]
        tied = bool(config.get("tie_word_embeddings", False))
        q, kv = heads * head_dim, kv_heads * head_dim
        attention = ((hidden, q), (hidden, kv), (hidden, kv), (q, hidden))
        linear = (*attention, (hidden, inner), (hidden, inner), (inner, hidden))
        biases = q + 2 * kv if config["model_type"] == "qwen2" else 0
        normed_heads = config["model_type"] == "qwen3"
        norms = 2 * hidden + (2 * head_dim if normed_heads else 0)
        per_layer = sum(a * b for a, b in linear) + biases + norms
        parameters = layers * per_layer + hidden + vocabulary * hidden * (1 if tied else 2)
        return cls(
            layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, normed_heads, parameters, linear
        )

    @property
    def linear_parameters(self) -> int:
        return self.layers * sum(a * b for a, b in self.linear)

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """For `all-linear`; fewer target modules take less."""
        return self.layers * lora.rank * sum(a + b for a, b in self.linear)

    def weights(self, model: ModelConfig) -> float:
        width = BYTES[model.dtype]
        if model.quantization == "nf4":
            return self.linear_parameters * NF4_BYTES + (self.parameters - self.linear_parameters) * width
        return self.parameters * width

    def cache_per_token(self, model: ModelConfig) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[model.dtype]

    def forward_per_token(self, model: ModelConfig) -> float:
        """Live at once in one block without autograd: the residual, a norm's float32 pieces, the widest of
        MLP and attention."""
        width = BYTES[model.dtype]
        q = self.heads * self.head_dim
        return width * (2 * self.hidden + max(3 * self.inner, 4 * q)) + 8 * self.hidden

    def saved_per_token(self, model: ModelConfig) -> float:
        """What autograd keeps of one block. Per norm its input, its output and, if its weight is trained, the
        normed form; rotated q and k, v, and the attention's output; q and k before their own norms (Qwen3);
        four MLP tensors; the narrow tensors inside adapters."""
        width = BYTES[model.dtype]
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        # Half-precision norms compute, and keep what they need, in float32.
        norm = (max(4, width) + width) if model.lora else (2 * max(4, width) + width)
        own_norms = (q + kv) * (1 if model.lora else 2) if self.normed_heads else 0
        narrow = len(self.linear) * model.lora.rank if model.lora else 0
        return 2 * self.hidden * norm + width * (2 * q + 2 * kv + own_norms + 4 * self.inner + narrow)


def estimate(config: Config, student: Shape, teacher: Shape | None, device: str) -> list[Line]:
    """All lines of a run, student first."""
    graphs = device == "cuda" and config.rollout.cuda_graphs == "auto"
    lines = _student_lines(config, student, graphs)
    if teacher is not None and config.model.teacher is not None:
        if config.algo.name == "policy_gradient":
            return lines + frozen_lines("teacher", config, config.model.teacher, teacher)
        lines += teacher_lines(config, teacher, config.model.teacher)
    return lines


def teacher_lines(config: Config, teacher: Shape, model: ModelConfig) -> list[Line]:
    """A teacher that scores every step, or (`kd`) the dataset once, a part of the cache at a time, before the
    student is there."""
    offline = config.algo.name == "kd"
    always, score = ("prepare", "prepare") if offline else ("always", "score")
    k = config.algo.teacher_top_k
    per_token = teacher.hidden * BYTES[model.dtype] if k is None else k * 12
    rows, longest = config.trainer.prompts_per_step * config.rollout.n, config.rollout.max_response_length
    scored = (PART if offline else rows) * longest * per_token
    lines = [
        Line("teacher weights", teacher.weights(model), always),
        Line(
            "teacher activations", config.trainer.micro_batch_tokens * teacher.forward_per_token(model), score
        ),
        # The targets are kept from the score to the update; where they are joined, twice for a moment.
        Line("teacher targets", 2 * scored, score),
        Line("kept targets", rows * longest * per_token, "update"),
    ]
    return lines if k is None else [*lines, Line("teacher logits chunk", _chunk(config, teacher) * 2, score)]


def frozen_lines(what: str, config: Config, model: ModelConfig, shape: Shape) -> list[Line]:
    """A model that scores sampled tokens: it keeps one number of each."""
    tokens = config.trainer.micro_batch_tokens
    return [
        Line(f"{what} weights", shape.weights(model), "always"),
        Line(f"{what} activations", tokens * shape.forward_per_token(model), "score"),
    ]


def learner_lines(what: str, model: ModelConfig, shape: Shape) -> list[Line]:
    """A second model that learns; its activations are the student's size, and never live beside them."""
    width = BYTES[model.dtype]
    trained = shape.adapter_parameters(model.lora) if model.lora else shape.parameters
    trained_width = max(4, width) if model.lora else width
    return [
        Line(f"{what} weights", shape.weights(model), "always"),
        *([Line(f"{what} adapter", trained * trained_width, "always")] if model.lora else []),
        Line(f"{what} optimizer", 2 * trained * trained_width, "always"),
    ]


def total(lines: list[Line]) -> float:
    """Bytes at the worst moment."""
    always = sum(line.size for line in lines if line.when == "always")
    training = always + max(phase_total(lines, phase) for phase in ("generate", "score", "update"))
    return max(training, phase_total(lines, "prepare"))


def phase_total(lines: list[Line], phase: When) -> float:
    return sum(line.size for line in lines if line.when == phase)


def _student_lines(config: Config, shape: Shape, graphs: bool) -> list[Line]:
    model, trainer = config.model.student, config.trainer
    width = BYTES[model.dtype]
    trained = shape.adapter_parameters(model.lora) if model.lora else shape.parameters
    # An adapter is held in float32 on a half-precision base.
    trained_width = max(4, width) if model.lora else width
    rows = min(
        config.rollout.max_batch_rows, max(trainer.prompts_per_step * config.rollout.n, config.eval.size)
    )
    response = max(config.rollout.max_response_length, config.eval.max_response_length or 0)
    slots = config.data.max_prompt_length + response
    cache = rows * slots * shape.cache_per_token(model)
    tokens = trainer.micro_batch_tokens
    if model.gradient_checkpointing:
        saved = tokens * (shape.layers * shape.hidden * width + shape.saved_per_token(model))
    else:
        saved = tokens * shape.layers * shape.saved_per_token(model)
    head_gradient = 0 if model.lora else shape.vocabulary * shape.hidden * max(4, width)
    return [
        Line("student weights", shape.weights(model), "always"),
        *([Line("adapter", trained * trained_width, "always")] if model.lora else []),
        Line("optimizer", 2 * trained * trained_width, "always"),
        # The static cache behind captured graphs is filled from the one that the prefill wrote.
        Line("KV cache", cache * (2 if graphs else 1), "generate"),
        Line("prefill", rows * config.data.max_prompt_length * shape.forward_per_token(model), "generate"),
        Line("gradients", trained * trained_width, "update"),
        Line("activations", saved, "update"),
        Line("logits chunk", _chunk(config, shape) * chunk_copies(config.algo), "update"),
        Line("head gradient", head_gradient, "update"),
        *_document_mask(config),
    ]


def _document_mask(config: Config) -> list[Line]:
    """[rows, row, row] of a micro-batch: one number per pair of tokens, and at first two booleans."""
    if config.algo.name != "pretrain":
        return []
    per_pair = BYTES[config.model.student.dtype] + 2
    size = config.trainer.micro_batch_tokens * config.data.row_tokens * per_pair
    return [Line("document mask", size, "update")]


def chunk_copies(algo: AlgoConfig) -> int:
    """How many [chunk, vocabulary] exist at the worst moment of the loss (counted; see algos/)."""
    if algo.name in ("sft", "pretrain"):
        return 2
    if algo.name == "policy_gradient":
        return 4 if algo.policy.entropy_coef else 3
    if algo.name == "preference":
        return 3
    return 3 if algo.teacher_top_k is not None else COPIES[algo.divergence]


def _chunk(config: Config, shape: Shape) -> float:
    """One [chunk, vocabulary] in float32 (at least)."""
    return config.algo.loss_chunk_tokens * shape.vocabulary * 4
