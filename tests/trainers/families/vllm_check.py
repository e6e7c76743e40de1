"""Compares the log-probs of the engine `vllm` with those of the trainer whose model it serves."""

from __future__ import annotations

import asyncio

from headrace.tests.actors.engines.vllm.builder import build
from headrace.tests.trainers.backends.backend_ranks import logprobs_of, micro_batch
from headrace.tests.trainers.families.checks import LOGPROBS, Outcome, outcome_of, quiet, samples_of, settings, step
from headrace.tests.trainers.families.plain import rows_of, trained
from headrace.tests.trainers.families.tiny_models import CONTEXT, save_family
from headrace.trainers.backends.fsdp.backend import FsdpBackend

SERVED = frozenset("llama mistral qwen2 qwen3 qwen3_moe gemma3_text phi3 mixtral granite olmo2".split())
"""Families whose models are served with vLLM, too."""
SIZES = {"hidden_size": 128, "head_dim": 32}
"""Sizes for which vLLM has attention kernels on a CPU."""


def run_vllm_check(folder: str, name: str) -> Outcome:
    """Train a model one step, export it, serve it with vLLM, and return the largest error of a log-prob."""
    quiet()

    def error() -> float:
        save_family(folder, name, **SIZES)
        trainer = FsdpBackend(settings(folder, packing="none"), 0, 1)
        step(trainer, [micro_batch(rows_of(name))])
        trainer.export_model(f"{folder}/exported")
        engine = build(f"{folder}/exported")
        with asyncio.Runner() as runner:
            try:
                rows, logprobs, _ = runner.run(samples_of(engine, CONTEXT))
            finally:
                runner.run(engine.close())
        return float((trained(logprobs_of(trainer, micro_batch(rows)), rows) - logprobs).abs().max())

    return outcome_of(error, LOGPROBS)
