"""Answers under a JSON schema, and what their log-probs are those of."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.actors.engines.protocol import BadSchema, Completion, SamplingParams
from headrace.tests.actors.engines.vllm.builder import build
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.slow]
TOKENIZER = make_chat_tokenizer()
SCHEMA = json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                     "additionalProperties": False})  # fmt: skip
PATTERN = '{"type": "object", "patternProperties": {"(": {}}}'
"""A schema that vLLM takes, and whose request it ends with an error."""


def save(folder: Path) -> Qwen3ForCausalLM:
    end: Any = TOKENIZER.eos_token_id
    config = Qwen3Config(
        vocab_size=len(TOKENIZER), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=end, pad_token_id=end,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model


def test_answers_match_their_schema_and_their_log_probs_are_not_the_policys(tmp_path: Path) -> None:
    """Hence the endpoint trains on no such answer. Answers without a schema in the same batch keep the policy's."""
    model, prompt = save(tmp_path), TOKENIZER("hello", add_special_tokens=False)["input_ids"]
    engine = build(str(tmp_path), schemas=True, receiver=None)

    def difference(completion: Completion) -> float:
        ids = completion.token_ids.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
        return float(np.abs(own - completion.logprobs).max())

    async def main() -> None:
        free, bound = SamplingParams(n=2, max_new_tokens=30), SamplingParams(n=4, max_new_tokens=120, schema=SCHEMA)
        async with asyncio.timeout(100):
            under, without = await asyncio.gather(
                engine.generate("under", prompt, bound), engine.generate("without", prompt, free)
            )
            ended = [one for one in under if one.finish_reason == "stop"]
            assert ended, "blanks are free, so some answers are cut"
            for one in ended:
                assert json.loads(str(TOKENIZER.decode(one.token_ids, skip_special_tokens=True))).keys() == {"ok"}
            assert all(difference(one) > 1.0 for one in under) and all(difference(one) < 1e-3 for one in without)
            for name, schema in (("a", '{"type": "ghost"}'), ("b", PATTERN)):
                with pytest.raises(BadSchema, match="vLLM does not take the JSON schema"):
                    await engine.generate(name, prompt, SamplingParams(schema=schema))
            assert len(await engine.generate("after", prompt, free)) == 2
            await engine.close()

    asyncio.run(main())
