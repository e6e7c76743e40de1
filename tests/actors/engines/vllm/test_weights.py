"""Tests of weight updates of the vllm engine: log-probs equal the new model's, and every token has its version."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.actors.engines.protocol import EngineBroken, KeysAndValues, SamplingParams
from headrace.actors.weight_sync.transports.protocol import WeightUpdate
from headrace.codecs.weights.parameter_digests import DigestTaker
from headrace.tests.actors.engines.engine_subjects import mixed_logprobs
from headrace.tests.actors.engines.vllm.builder import EOS, VOCAB_SIZE
from headrace.tests.actors.engines.vllm.conftest import Subject

pytestmark = pytest.mark.vllm
PROMPTS = [[5, 6, 7, 13], [9, 9, 3, 3, 8, 13], [5 + i % 30 for i in range(150)]]
FIRST_TOKEN = 3


def every(subjects: list[tuple[str, int]]) -> list[object]:
    return [pytest.param(one, id=f"{one[0]}-tp{one[1]}") for one in subjects]


@pytest.mark.parametrize(
    "subject",
    [
        *every([("tied", 1), ("moe", 2)]),
        *(
            pytest.param(one, id=f"{one[0]}-tp{one[1]}", marks=pytest.mark.slow)
            for one in (("moe", 1), ("untied", 2), ("tied", 2))
        ),
    ],
    indirect=True,
    scope="module",
)
class TestUpdates:
    def test_logprobs_equal_the_new_model_after_every_update(self, subject: Subject) -> None:
        async def main() -> None:
            engine = subject.engine
            for update in range(4):
                if update:
                    await engine.prepare_weights(subject.update())
                    report = await engine.commit_weights(engine.version + 1)
                    assert (report.version, report.kept, report.aborted) == (engine.version, 0, 0)
                    assert engine.load_way.startswith("layerwise: ")
                for index, prompt in enumerate(PROMPTS):
                    completions = await engine.generate(f"{index}", prompt, SamplingParams(n=2, max_new_tokens=16))
                    subject.expect_logprobs(prompt, completions)
                    assert all((one.versions == engine.version).all() for one in completions)

        subject.run(main())

    def test_weights_that_differ_from_the_trainers_are_not_served(self, subject: Subject) -> None:
        async def main() -> None:
            engine, version = subject.engine, subject.engine.version + 1
            await engine.prepare_weights(subject.update())
            await engine.commit_weights(version)
            weights = subject.weights()
            taker = DigestTaker(version, list(weights))
            for name, tensor in weights.items():
                taker.take(name, tensor)
            digests = taker.result()
            count = await engine.verify_weights(digests)
            assert count == sum("norm" in name for name in weights), "kernels of CPUs repack the others"
            wrong = [replace(one, digest=one.digest ^ (one.name == "model.norm.weight")) for one in digests.weights]
            with pytest.raises(EngineBroken, match=f"weights of version {version}: 'model.norm.weight' has digest"):
                await engine.verify_weights(replace(digests, weights=tuple(wrong)))
            waiting = asyncio.create_task(engine.generate("waits", PROMPTS[0], SamplingParams(max_new_tokens=8)))
            await engine.resume()
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await engine.prepare_weights(subject.publisher.publish(version, weights))
            await engine.commit_weights(version)
            assert await engine.verify_weights(digests) == count
            subject.expect_logprobs(PROMPTS[0], await waiting)

        subject.run(main())

    def test_weights_that_do_not_fit_leave_the_old_ones_served(self, subject: Subject) -> None:
        async def main() -> None:
            engine, weights = subject.engine, subject.weights()
            version, norm = engine.version + 1, "model.norm.weight"
            for named, message in (
                ({n: t for n, t in weights.items() if n != norm}, "'model.norm.weight' was not sent"),
                ({**weights, "model.nrom.weight": weights[norm]}, "no parameter 'model.nrom.weight'; the nearest"),
                ({**weights, norm: weights[norm][1:].clone()}, r"has shape \(63,\), expected \(64,\)"),
            ):
                with pytest.raises(ValueError, match=message):
                    await engine.prepare_weights(subject.publisher.publish(version, named))
            completions = await engine.generate("still", PROMPTS[0], SamplingParams(n=2, max_new_tokens=16))
            subject.expect_logprobs(PROMPTS[0], completions)
            assert engine.version == version - 1

        subject.run(main())

    @pytest.mark.parametrize("kv", ["keep", "recompute"])
    def test_requests_that_go_on_read_old_keys_and_values_only_if_asked_to(
        self, subject: Subject, kv: KeysAndValues
    ) -> None:
        """Neither requests that begin after the commit nor samples that wait for room in the batch do. That includes
        the keys and values of their prompt, which others have left in the prefix cache."""
        prompt = [5 + i % 30 for i in range(300)]  # three cache blocks of 128 tokens, two of them full

        async def main() -> None:
            engine, attempts = subject.engine, 0
            while True:
                version, old = engine.version + 1, copy.deepcopy(subject.model)
                await engine.prepare_weights(subject.update(0.2))
                attempts += 1
                running = asyncio.create_task(
                    engine.generate(f"{kv} {attempts}", prompt, SamplingParams(n=90, max_new_tokens=40))
                )
                while sum(one >= 0 for one, _ in engine.tokens_of_newest()) < 32 and not running.done():
                    await asyncio.sleep(0.002)
                report = await engine.commit_weights(version, "keep", kv)
                late = await engine.generate(f"late {kv} {attempts}", prompt, SamplingParams(n=2, max_new_tokens=8))
                done = await running
                fresh = [one for one in done if (one.versions == version).all()]
                mixed = [one for one in done if 0 < np.count_nonzero(one.versions == version) < len(one.versions)]
                if (report.kept and fresh and mixed) or attempts == 3:
                    break  # else a busy machine let the samples end, or all of them begin, before the commit
            assert (report.kept, report.aborted) == (1, 0)
            assert fresh and mixed and len(done) == 90
            subject.expect_logprobs(prompt, late)
            subject.expect_logprobs(prompt, fresh[:3])
            distance = 0.0
            for one in mixed[:3]:
                change_at = int(np.count_nonzero(one.versions < version))
                response = one.token_ids.tolist()
                expected = mixed_logprobs([old, subject.model], prompt, response, change_at, kept=kv == "keep")
                np.testing.assert_allclose(one.logprobs, expected, atol=3e-3)
                other = mixed_logprobs([old, subject.model], prompt, response, change_at, kept=kv != "keep")
                distance = max(distance, float(np.abs(np.subtract(expected, other)).max()))
            assert distance > 0.03, "the two ways could not be told apart"

        subject.run(main())

    def test_every_token_carries_the_version_that_made_it(self, subject: Subject) -> None:
        """Weights of version v give token 3 + v and no other."""

        async def main() -> None:
            engine, first = subject.engine, subject.engine.version
            token = {first + step: FIRST_TOKEN + step for step in range(1, 7)}
            await engine.prepare_weights(telling(subject, first + 1, token[first + 1]))
            await engine.commit_weights(first + 1)
            params = SamplingParams(n=3, max_new_tokens=150)
            requests = [asyncio.create_task(engine.generate(f"a{i}", [5, 6], params)) for i in range(4)]
            for version in range(first + 2, first + 7):
                await engine.prepare_weights(telling(subject, version, token[version]))
                requests.append(asyncio.create_task(engine.generate(f"b{version}", [7] * version, params)))
                await asyncio.sleep(0.03)
                await engine.commit_weights(version, "keep", "keep" if version % 2 else "recompute")
            mixed = 0
            for completions in await asyncio.gather(*requests):
                for one in completions:
                    assert len(one.token_ids) == 150
                    assert one.token_ids.tolist() == [token[version] for version in one.versions.tolist()]
                    assert np.abs(one.logprobs).max() < 1e-3
                    mixed += len(set(one.versions.tolist())) > 1
            assert mixed, "no request saw two versions"

        subject.run(main())


def telling(subject: Subject, version: int, token: int) -> WeightUpdate:
    """Weights under which every next token is `token`. All positions have the same hidden state, and one row of the
    head points along it."""
    named = {name: torch.zeros_like(weight) for name, weight in subject.weights().items()}
    for name, weight in named.items():
        if "norm" in name:
            weight.fill_(1.0)
    embedding = named["model.embed_tokens.weight"]
    if "lm_head.weight" in named:
        embedding.fill_(1.0)
        named["lm_head.weight"][token] = 1.0
    else:
        # Tied: the row of the token that comes next must win against the row of the one that was read.
        embedding[:, : VOCAB_SIZE // 4] = 1.0
        embedding[token, : VOCAB_SIZE // 4] = 40.0
    assert token != EOS
    return subject.publisher.publish(version, named)
