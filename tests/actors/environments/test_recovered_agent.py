"""An agent that speaks to the policy over the endpoint goes on after the death of its rollout actor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("renderers")

from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.testing import TalkingEngine
from headrace.tests.actors.environments.endpoint_world import CALL
from headrace.tests.actors.environments.test_endpoint import use_tools
from headrace.tests.actors.rollout.turn_lives import TOKENIZER, Killed, Life


def test_an_agent_at_the_endpoint_goes_on(tmp_path: Path) -> None:
    """Its calls of tools get other ids in each life, which are not among the tokens."""

    class Talking(TalkingEngine):
        async def generate(
            self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams
        ) -> list[Completion]:
            if len(self.seen) == (2 if self.version == 1 else 9):
                raise Killed
            return await super().generate(request_id, prompt_ids, params)

    first, second = (
        Life(tmp_path, Talking(TOKENIZER, CALL, CALL, "it is 3", version=life), use_tools, n=1, endpoint=True)
        for life in (1, 2)
    )
    assert first.samples is None and second.samples is not None and second.policy.unmatched == 0
    [sample] = second.samples
    assert (sample.rewards, len(sample.rows), len(sample.turns)) == ({"reward": 1.0}, 1, 3) and not sample.error
    assert len(second.engine.seen) == 1
    for turn, (_, prompt, answer) in zip(sample.turns, first.engine.seen + second.engine.seen, strict=True):
        ids = sample.input_ids.tolist()
        assert ids[: turn.start] == prompt and ids[turn.start : turn.start + turn.num_tokens] == answer
    assert np.unique(sample.versions[sample.response_mask == 1]).tolist() == [1, 2]
