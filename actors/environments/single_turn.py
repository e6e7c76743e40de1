"""The `single_turn` environment samples n answers to one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engines.continuation import generate_whole
from ..engines.protocol import Completion, Generator, SamplingParams
from ..engines.tokenizer import decode_responses, encode_prompts
from ..protocols import Prompt, Sample


class SingleTurn:
    """Plays episodes of one turn: a sample is the prompt followed by one completion."""

    async def run(self, prompt: Prompt, engine: Generator, tokenizer: Any, params: SamplingParams) -> list[Sample]:
        """Generate `params.n` completions of the prompt and return them as samples, in order. Raises what the engine
        raises."""
        (prompt_ids,) = encode_prompts(tokenizer, [prompt.text])
        completions = await generate_whole(engine, tokenizer, prompt.uid, prompt_ids.tolist(), params)
        texts = response_texts(tokenizer, completions, params)
        return [
            _sample(prompt, index, prompt_ids, completion, text)
            for index, (completion, text) in enumerate(zip(completions, texts, strict=True))
        ]


def response_texts(tokenizer: Any, completions: Sequence[Completion], params: SamplingParams) -> list[str]:
    """Return the text of each completion. A stop token is left out, but tokens that complete a stop text
    (`params.stop`) are part of the text."""
    texts = decode_responses(tokenizer, [_without_stop(completion) for completion in completions])
    if not params.stop:
        return texts
    whole = decode_responses(tokenizer, [completion.token_ids for completion in completions])
    return [
        long if completion.finish_reason == "stop" and any(stop in long for stop in params.stop) else short
        for completion, short, long in zip(completions, texts, whole, strict=True)
    ]


def _without_stop(completion: Completion) -> np.ndarray:
    """Return the response's token ids without the stop token. This is needed because decoding does not leave out a stop
    token that is an ordinary token."""
    return completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids


def _sample(prompt: Prompt, index: int, prompt_ids: np.ndarray, completion: Completion, text: str) -> Sample:
    num_prompt = len(prompt_ids)
    length = num_prompt + len(completion.token_ids)
    response_mask = np.zeros(length, dtype=np.uint8)
    response_mask[num_prompt:] = 1
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[num_prompt:] = completion.logprobs
    versions = np.full(length, -1, dtype=np.int32)
    versions[num_prompt:] = completion.versions
    return Sample(
        prompt=prompt,
        index=index,
        input_ids=np.concatenate([prompt_ids, completion.token_ids]).astype(np.int32),
        response_mask=response_mask,
        logprobs=logprobs,
        text=text,
        finish_reason=completion.finish_reason,
        versions=versions,
        routes=() if completion.routes is None else ((0, completion.routes),),
    )
