"""Compares an engine and a train backend on 64 tokens: log-probs and router choices, with and without router replay.

prompts -> engine samples 64 tokens, with log-probs and, for a model with experts, routes
        -> engine closes -> backend computes the log-probs of these tokens, without and with replay

A run applies the same measure to its first step, and warns if engine and trainer do not compute the same policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ....actors.engines.config import EngineKeys, ModelConfig, RouterReplayConfig, engine_dtype
from ....actors.engines.factory import EngineConfig, build_engine
from ....actors.engines.protocol import Completion
from ....actors.engines.tokenizer import encode_prompts, load_tokenizer
from ....actors.protocols import row_schema
from ....actors.rollout.config import RolloutConfig
from ....actors.train_backend import MicroBatch
from ....codecs.jagged import pack
from ....codecs.tokens.masks import MASKS, without_sets
from ....codecs.tokens.routes import ROUTES, RouteSpec, align_routes
from ...backends.config import BackendConfig, TrainerConfig
from ...backends.factory import build_backend
from ...backends.lora_config import LoraConfig
from ...cluster.gpu_memory import has_gpus
from ...cluster.rollout_specs import sampling
from ...errors import UserError
from ...losses.correction import MISMATCH_MAX, MISMATCH_SUMS, mismatch_of

if TYPE_CHECKING:
    from .rounding_by_kind import Rounding

SOUND_RATIO, SOUND_IN_HALF, SOUND_IN_8_BITS = 1.02, 1.06, 1.4
"""Largest acceptable mean factor between the trainer's and the engine's probability of a token (`logprob/ratio_error`),
first if both sides compute in float32, then if one of them computes in bfloat16, then if one of them does in 8 bits.

Above it, the probability ratio of a policy update reflects more than rounding. Two correct computations of
SmolLM2-135M in bfloat16 differ by a factor of 1.042, because its logits reach 40, where the values of bfloat16 are 0.25
apart. Rounding the logits alone makes a factor of 1.022; the rest comes from the layers. Models with random weights
have small logits, and a factor of 1.005 to 1.03. vLLM with 8-bit weights and activations of SmolLM2-135M makes a factor
of 1.27 with `fp8` and 1.36 with `int8`, while its weights are proved to be the trainer's.
"""


def sound_ratio(model: ModelConfig, trainer: TrainerConfig, rollout: EngineKeys, *, gpu: bool) -> float:
    """Return the largest acceptable mean factor between the trainer's and the engine's probability of a token.

    It is SOUND_IN_8_BITS if the engine has weights or keys and values in 8 bits, or the trainer computes in fp8,
    SOUND_IN_HALF if one of both computes in bfloat16, else SOUND_RATIO. gpu: whether they are on GPUs.
    """
    if rollout.scheme is not None or rollout.kv_cache_dtype != "auto" or trainer.fp8 != "none":
        return SOUND_IN_8_BITS
    half = trainer.mixed_precision or engine_dtype(model, gpu=gpu) == "bfloat16"
    return SOUND_IN_HALF if half else SOUND_RATIO


def distrust(
    model: ModelConfig,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    replay: RouterReplayConfig,
    metrics: Mapping[str, float],
    *,
    has_experts: bool,
) -> str | None:
    """Return a warning if the log-probs differ too much, else None. metrics: metrics of the first step of a run or of
    its continuation, in which both sides have the same weights. A continuation can train on rows of older versions
    first; such rows prove nothing. has_experts: whether the model has layers with experts.
    """
    ratio, most = metrics.get("logprob/ratio_error"), sound_ratio(model, trainer, rollout, gpu=has_gpus())
    if ratio is None or ratio <= most or metrics.get("staleness/max", 0.0) > 0:
        return None
    if rollout.cuts and not rollout.masked:
        why = (
            f"the engine's log-probs belong to a distribution that rollout.top_p={rollout.top_p:g}, "
            f"rollout.top_k={rollout.top_k} and rollout.min_p={rollout.min_p:g} truncate, the trainer's to the whole "
            "one; rollout.mask_limit above 0 makes both the same"
        )
    elif has_experts and not replay.enabled:
        why = "its routers may choose other experts, which router_replay.enabled=true would prevent"
    else:
        why = f"`headrace doctor --model {model.path}` compares both on 64 tokens"
    return (
        f"logprob/ratio_error is {ratio:.3f} in the first step, expected at most {most}: the trainer gives a "
        f"sampled token another probability than the engine, by this factor on average; {why}"
    )


PROMPTS = (
    "Compute 17 + 25.",
    "The capital of France is",
    "def add(a, b):",
    "Write one sentence about water.",
)
TOKENS = 64
"""Number of tokens that the engine samples, divided equally among the prompts."""
NATIVE = "routes/native_"
LONGEST = 16_384
"""Largest number of tokens of a prompt of the comparison."""
CPU_WORK = 2e12
"""Largest product of parameters and tokens of a prompt that a CPU computes in a minute or two."""


@dataclass(frozen=True, slots=True)
class TrustReport:
    """Result of the comparison of an engine with a train backend."""

    engine: str
    """Kind of the engine, and the number format of its computations."""
    backend: str
    """Kind of the train backend, and the number format of its computations."""
    tokens: int
    """Number of sampled tokens that were compared. Fewer than TOKENS if samples ended early."""
    native: dict[str, float]
    """Mismatch of the log-probs when the trainer's routers choose the experts: name of a metric of `losses.mismatch` ->
    value."""
    replayed: dict[str, float]
    """Mismatch of the log-probs when the trainer uses the engine's choice of experts, in the form of `native`; {} for a
    model without experts."""
    agreement: dict[int, float]
    """Decoder layer -> share of the tokens for which the trainer's router chooses the same experts as the engine; {}
    for a model without experts."""
    longest: int = 0
    """Number of tokens of the longest compared row."""
    beyond: tuple[int, ...] = ()
    """Numbers of tokens at which the model begins to compute something else, and which no compared row exceeds."""
    most: float = SOUND_RATIO
    """Largest acceptable mean factor: SOUND_RATIO, SOUND_IN_HALF or SOUND_IN_8_BITS."""
    kinds: Mapping[str, Rounding] = field(default_factory=dict)
    """Kind of layer -> effect of rounding its weights to 8 bits; {} for an engine that does not."""
    unequal: int | None = None
    """Number of tokens whose log-probs are not equal bit for bit; None if they need not be (`run.bitwise`)."""

    @property
    def sound(self) -> bool:
        """True if the mean factor is at most `most`, with router replay if the model has experts. With `run.bitwise`
        true if all log-probs are equal."""
        if self.unequal is not None:
            return not self.unequal and self.tokens > 0
        return (self.replayed or self.native)["ratio_error"] <= self.most

    @property
    def verdict(self) -> str:
        """The result of the comparison in one sentence."""
        if self.unequal is not None:
            if self.sound:
                return f"equal bit for bit: the trainer gives each of {self.tokens} tokens the log-prob of the engine"
            return (
                f"not equal bit for bit: {self.unequal} of {self.tokens} log-probs differ, the largest difference is "
                f"{self.native['mismatch_max']:.3g}, expected 0 with run.bitwise=true"
            )
        native, best = self.native["ratio_error"], (self.replayed or self.native)["ratio_error"]
        if not self.sound:
            return (
                f"engine and trainer do not compute the same policy: probabilities differ by a factor of {best:.3f} on "
                f"average, expected at most {self.most} (other weights, number format, temperature, top-p or top-k?)"
            )
        if native > self.most:
            return (
                f"sound with router_replay.enabled=true only: without it probabilities differ by a factor of "
                f"{native:.3f} on average, with it by {best:.4f}"
            )
        gain = self.native["mismatch_mean"] / max(self.replayed["mismatch_mean"], 1e-12) if self.replayed else 1.0
        how = f"; replay makes the mean difference of log-probs {gain:.3g} times smaller" if gain > 1 else ""
        return f"sound: probabilities differ by a factor of {native:.4f} on average{how}"


def probe_trust(
    model: ModelConfig,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
    *,
    longest: int,
    replay: bool,
    bitwise: bool = False,
) -> TrustReport:
    """Run the comparison with a model, an engine, its sampling and a backend, on one device in this process.

    seed: seed of the sampling. tell: callback that receives progress messages. longest: largest number of tokens of a
    prompt. One prompt is longer than every number of tokens up to it at which the model begins to compute something
    else, such as its window. replay: whether router replay is compared, too, if the model has experts. bitwise: whether
    both sides compute as with `run.bitwise`; torch then has one thread in this process from now on. Raises UserError
    when engine or backend is `scripted`, or when the model cannot be loaded or used.
    """
    for key, kind in (("rollout.engine", rollout.engine), ("trainer.backend", trainer.backend)):
        if kind == "scripted":
            raise UserError(f"{key}: got 'scripted' with --model, expected one that runs a model")
    try:
        config = read_config(model.path)
        spec, counts = RouteSpec.of(config) if replay else None, _counts(config)
        within = max((count for count in counts if count < longest), default=0)
        tell(f"sampling {TOKENS} tokens with the engine {rollout.engine}")
        if bitwise:
            torch.set_num_threads(1)
        rows = asyncio.run(_sample(rollout, model, seed, spec, within, bitwise=bitwise))
        tell(f"computing their log-probs with the backend {trainer.backend}")
        report = compare_rows(model, rollout, trainer, spec, rows, bitwise=bitwise)
        kinds: Mapping[str, Rounding] = {}
        if rollout.scheme is not None:
            tell(f"rounding each kind of layer to {rollout.scheme}")
            from .rounding_by_kind import rounding_by_kind  # Runs, which need only `distrust`, load no model code.

            whole = [np.concatenate([ids, answer.token_ids]) for ids, answer in rows]
            kinds = rounding_by_kind(model.path, rollout.scheme, whole, _device())
        return replace(report, beyond=tuple(count for count in counts if count >= longest), kinds=kinds)
    except ValueError as error:
        raise UserError(str(error)) from error


def longest_row(parameters: int) -> int:
    """Return the number of tokens of a prompt that this machine computes in a minute or two.

    parameters: number of parameters of the model.
    """
    return LONGEST if torch.cuda.is_available() else min(LONGEST, int(CPU_WORK / parameters))


def read_config(path: str) -> Any:
    """Return the HF config of the text part of the model at `path`, a folder or hub id. Raises ValueError if there is
    no such model."""
    # The import takes seconds, and `headrace doctor` without a model does not need it.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--model: got {path!r}, expected a model's folder or hub id ({reason})") from error


def _counts(config: Any) -> list[int]:
    """Return the numbers of tokens within the model's context at which it begins to compute something else."""
    from ...backends.fsdp.row_checks import token_counts

    context = getattr(config, "max_position_embeddings", None) or 0
    return sorted({count for count in token_counts(config.to_dict()) if count + 1 + TOKENS < context})


Rows = list[tuple[np.ndarray, Completion]]
"""Token ids of each prompt, int64 `[P]`, and the completion that the engine sampled."""


async def _sample(
    rollout: RolloutConfig, model: ModelConfig, seed: int, spec: RouteSpec | None, within: int, *, bitwise: bool
) -> Rows:
    """Return PROMPTS and their completions. The last prompt is repeated until it has more than `within` tokens."""
    tokenizer = load_tokenizer(model.path)
    prompts = encode_prompts(tokenizer, PROMPTS)
    prompts[-1] = np.resize(prompts[-1], max(len(prompts[-1]), within + 1))
    params = replace(sampling(rollout, n=1, seed=seed), max_new_tokens=TOKENS // len(PROMPTS))
    setup = EngineConfig(
        rollout,
        model,
        device=_device(),
        max_model_len=_context(prompts),
        seed=seed,
        routes=spec,
        bitwise=bitwise,
    )
    engine = await asyncio.to_thread(build_engine, setup)
    try:
        answers = await asyncio.gather(
            *(engine.generate(f"probe-{index}", ids.tolist(), params) for index, ids in enumerate(prompts))
        )
    finally:
        await engine.close()
    return [(ids, answer[0]) for ids, answer in zip(prompts, answers, strict=True)]


def _device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _context(prompts: Sequence[np.ndarray]) -> int:
    """Return the largest number of tokens of a prompt and its answer, by which both sides choose positions."""
    return max(map(len, prompts)) + TOKENS // len(PROMPTS)


def compare_rows(
    model: ModelConfig,
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    spec: RouteSpec | None,
    rows: Rows,
    *,
    bitwise: bool = False,
) -> TrustReport:
    """Compare the log-probs of the train backend with the log-probs of the engine that sampled `rows`. The backend runs
    on one device in this process, with the temperature of `rollout` and without an adapter. spec: shape of the
    completions' routes; None for a model without experts. bitwise: see `probe_trust`.
    """
    alone = {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "sequence_parallel": False, "offload": False}
    trainer = trainer.model_copy(update={**alone, "lora": LoraConfig()})
    replay = RouterReplayConfig(enabled=spec is not None, verify="values")
    context = _context([prompt for prompt, _ in rows])
    settings = BackendConfig(
        model.path, trainer, router_replay=replay, attention=model.attention, context=context, trains=False,
        bitwise=rollout.engine if bitwise and rollout.engine != "scripted" else None,
    )  # fmt: skip
    backend: Any = build_backend(settings, 0, 1)
    # Each row has a microbatch of its own, because one of them can be far longer than the others.
    micros = [_micro_batch(row, spec) for row in rows]
    temperature, count = rollout.temperature, len(micros)
    mask, sampled = (
        torch.cat([micro.batch.jagged(name).values for micro in micros])
        for name in ("response_mask", "rollout_logprobs")
    )
    try:
        values = torch.cat(list(backend.logprobs(micros, count, temperature=temperature)))
        sums, largest = mismatch_of(values[mask > 0], sampled[mask > 0])
        means = (sums / max(int(mask.sum()), 1)).tolist()
        found = {**dict(zip(MISMATCH_SUMS, means, strict=True)), MISMATCH_MAX: float(largest)}
        measured = {} if spec is None else backend.native_figures(micros, count, temperature=temperature)
    finally:
        backend.close()
    half = "bfloat16" if trainer.mixed_precision else "float32"
    return TrustReport(
        engine=f"{rollout.engine} ({engine_dtype(model, gpu=torch.cuda.is_available())})",
        backend=f"{trainer.backend} ({half})",
        tokens=int(mask.sum()),
        longest=max(int(micro.lengths[0]) for micro in micros),
        native={name: measured[NATIVE + name] for name in found} if measured else found,
        replayed=found if measured else {},
        agreement={} if spec is None else {n: measured[f"{NATIVE}agreement_layer_{n}"] for n in spec.layers},
        most=sound_ratio(model, trainer, rollout, gpu=torch.cuda.is_available()),
        unequal=int((values != sampled)[mask > 0].sum()) if bitwise else None,
    )


def _micro_batch(row: tuple[np.ndarray, Completion], spec: RouteSpec | None) -> MicroBatch:
    prompt, answer = row
    before, count = len(prompt), len(answer.token_ids)
    columns = {
        "input_ids": [np.concatenate([prompt, answer.token_ids]).astype(np.int32)],
        "response_mask": [np.repeat(np.array([0, 1], np.uint8), (before, count))],
        "rollout_logprobs": [np.concatenate([np.zeros(before, np.float32), answer.logprobs])],
    }
    if spec is not None:
        columns[ROUTES] = [align_routes(answer.routes, before + count, spec)]
    if answer.masks is not None:
        columns[MASKS] = [np.concatenate([without_sets(before), answer.masks])]
    batch = pack(row_schema(spec, masks=answer.masks is not None), columns)
    return MicroBatch(batch, batch.jagged("input_ids").lengths, np.ones(1, np.float32), np.zeros(1, np.int64), None)


LABELS = {
    "mismatch_mean": "mean difference of log-probs",
    "mismatch_max": "largest difference of log-probs",
    "mismatch_kl": "KL divergence (k3)",
    "ratio_error": "mean factor between probabilities",
}


def show_trust(console: Console, model: str, report: TrustReport) -> None:
    """Print a report as a table, with the agreement of the routers by layer and the verdict."""
    rows = f"{report.tokens} tokens in rows of up to {report.longest:,} tokens"
    title = f"{model}: {rows}, engine {report.engine}, trainer {report.backend}"
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("engine against trainer")
    table.add_column("without replay" if report.replayed else "found", justify="right")
    if report.replayed:
        table.add_column("with replay", justify="right")
    for name, label in LABELS.items():
        values = [side[name] for side in (report.native, report.replayed) if side]
        table.add_row(label, *(f"{value:.6f}" if name == "ratio_error" else f"{value:.3g}" for value in values))
    console.print(table)
    if report.agreement:
        layers = ", ".join(f"{layer}: {share:.1%}" for layer, share in report.agreement.items())
        console.print(
            f"routers that choose the engine's experts, by decoder layer: {layers}", highlight=False, soft_wrap=True
        )
    console.print(report.verdict, highlight=False, soft_wrap=True)
    if report.kinds:
        rounded = Table()
        for title in ("kind of layer", "layers", "error of the weights", "mean difference of log-probs"):
            rounded.add_column(title, justify="left" if title == "kind of layer" else "right")
        for kind, one in report.kinds.items():
            rounded.add_row(kind, f"{one.num_layers}", f"{one.weight_error:.2%}", f"{one.mismatch_mean:.3g}")
        console.print(rounded)
    if report.beyond:
        counts = ", ".join(f"{count:,}" for count in report.beyond)
        line = f"not compared: rows of more than {counts} tokens, beyond windows, chunks or scaling of the model"
        console.print(line, highlight=False, soft_wrap=True)
