"""A worker of vLLM that generates given tokens; tests have engines start it in place of Headrace's own."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch

from headrace.actors.engines.vllm.worker import WeightWorker


class ForcingWorker(WeightWorker):
    """Replaces sampled tokens by given ones before their log-probs are taken. It stands in for vLLM's
    `trace_decode_token_ids`, which needs Triton, on CPUs."""

    model_runner: Any

    def force(self, traces: dict[str, list[int]]) -> None:
        """From now on, generate the tokens of `traces` (id with which a request is submitted -> token ids). Requests
        must have a temperature, since vLLM's sampler is not asked for greedy ones."""
        runner, sampler = self.model_runner, self.model_runner.sampler.topk_topp_sampler
        inner = sampler.forward

        def forced(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, logprobs = inner(*args, **options)
            for row, request in enumerate(runner.input_batch.req_ids[: len(tokens)]):
                trace = traces.get(request.rpartition("-")[0], [])
                done = len(runner.requests[request].output_token_ids)
                if done < len(trace):
                    tokens[row] = trace[done]
            return tokens, logprobs

        sampler.forward = forced
