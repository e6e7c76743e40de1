"""Trains a tiny model with GRPO in one process: rollout, put, claim, advantages, plan, train, sync, evaluate.

    python examples/grpo_in_one_file.py                # about a minute on two cores; no GPU, no download
    python examples/grpo_in_one_file.py --model DIR    # a model of yours: change the task below, too

Copy this file to try an algorithm of your own. It uses public names of Headrace alone, and it is short because each
part does one thing: the engine samples, the data plane keeps rows, the backend computes gradients. What makes the loop
GRPO are `advantages` and `clipped_loss`; change these, or the order in which `train` calls everything. The page
docs/training/own-algorithm.md says what `headrace train` does beyond this loop.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

import headrace
from headrace import Field, Kind, MicroBatch, SamplingParams, Schema

PROMPTS_PER_STEP, GROUP_SIZE = 16, 8
MAX_NEW_TOKENS = 10
EVALUATE_EVERY = 20


# ---------------- The task: the prompt "r48213=" asks for "31284".
#
# The base model knows how to copy, rotate and reverse digits, and answers the letter `r` with any of these. Rewards
# teach it which one is meant. For a task of yours, change these three functions and `--model`.


@dataclass(frozen=True)
class Question:
    """A prompt and its expected answer."""

    text: str
    answer: str


def questions(seed: int) -> Iterator[Question]:
    """Yield endless questions."""
    generator = random.Random(seed)
    while True:
        digits = "".join(generator.choices("0123456789", k=generator.randint(3, 8)))
        yield Question(f"r{digits}=", digits[::-1])


def reward(question: Question, response: str) -> float:
    """Return 1 for a right answer, and less than 1 for one that is right in some places.

    Without the partial credit, groups of only wrong answers would teach nothing.
    """
    in_place = sum(a == b for a, b in zip(response, question.answer, strict=False))
    return 0.7 * in_place / max(len(question.answer), len(response)) + 0.3 * (response == question.answer)


# ---------------- The algorithm: how good each answer was, and what the policy minimises.


def advantages(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the advantage of each answer, float32 `[N]`: its reward relative to the other answers to its question.

    This comparison is what GRPO has in the place of a value network. A group whose answers are all equally good gets
    zeros, since it does not show what to prefer.
    """
    result = np.zeros(len(rewards), np.float32)
    for group in np.unique(groups):
        members = groups == group
        centred = rewards[members] - rewards[members].mean()
        result[members] = centred / (rewards[members].std(ddof=1) + 1e-6)
    return result


def clipped_loss(inputs: headrace.LossInputs) -> torch.Tensor:
    """Return the loss at each of the T trained tokens, `[T]`: PPO's clipped objective.

    The backend masks, sums and divides by the number of tokens, so that the gradient does not depend on how rows were
    cut into microbatches. `loss.kind` can be this function in a run of `headrace train`, too.
    """
    ratio = torch.exp(inputs.logprobs - inputs.prev_logprobs)
    clipped = ratio.clamp(0.8, 1.28)
    return -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


# ---------------- The rows: what rollouts write and training reads.
#
# The backend reads these three columns. A schema says once what a column is, so that nothing has to be guessed or
# padded: rows of different lengths travel with exactly their own bytes.

SCHEMA = Schema(
    [
        Field("input_ids", Kind.PER_TOKEN, torch.int32),  # the prompt and the answer
        Field("response_mask", Kind.PER_TOKEN, torch.uint8),  # 1 at the tokens that the policy chose
        Field("rollout_logprobs", Kind.PER_TOKEN, torch.float32),  # their log-probs when they were sampled, else 0
    ]
)


class Loop:
    """The parts of the training, and the steps that it consists of."""

    def __init__(self, model: str, steps: int, seed: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        # Engine and backend each hold the model: the engine decodes with keys and values, the backend has gradients.
        self.engine = headrace.make_engine(model, {"engine": "hf", "max_batch": 256}, seed=seed)
        self.backend = headrace.make_backend(
            model,
            trainer={"lr": 1e-3, "betas": [0.9, 0.99], "warmup_steps": 5, "schedule": "linear"},
            loss={"kind": f"{Path(__file__).stem}:clipped_loss"},
            total_steps=steps,
        )
        self.sync = headrace.WeightSync(self.backend, self.engine)
        self.questions = questions(seed)

    async def roll_out(self, rows: headrace.AsyncDataPlaneClient, question: Question, uid: str) -> float:
        """Sample a group of answers to one question and put them into the data plane. Returns their mean reward.

        A group is put as soon as it is finished: a consumer does not have to wait for the slowest one of the step.
        """
        prompt = self.tokenizer.encode(question.text, add_special_tokens=False)
        sampling = SamplingParams(n=GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS)
        answers = await self.engine.generate(uid, prompt, sampling)
        rewards = [reward(question, self.text_of(answer)) for answer in answers]
        front = np.zeros(len(prompt))
        await rows.put(
            "train",
            [f"{uid}.{index}" for index in range(GROUP_SIZE)],  # what is before the last dot names the group
            {
                "input_ids": [np.append(prompt, a.token_ids).astype(np.int32) for a in answers],
                "response_mask": [np.append(front, np.ones(len(a.token_ids))).astype(np.uint8) for a in answers],
                "rollout_logprobs": [np.append(front, a.logprobs).astype(np.float32) for a in answers],
            },
            versions=self.engine.version,
            tags={"reward": np.array(rewards, np.float32)},  # tags travel with the metadata, which the claim returns
        )
        return float(np.mean(rewards))

    async def train_step(self, rows: headrace.AsyncDataPlaneClient) -> dict[str, float]:
        """Train once on as many rows as a step has. Returns the metrics of the step."""
        fields = tuple(SCHEMA)
        # A claim leases rows to this consumer. It returns a receipt: lengths, groups and tags, but no content yet.
        receipt = await rows.claim("train", "trainer", fields, PROMPTS_PER_STEP * GROUP_SIZE, timeout_s=60)
        advantage = advantages(receipt.tags["reward"], receipt.groups)
        # The plan cuts the rows into microbatches of at most so many tokens, from their lengths alone.
        plan = headrace.plan_shards(
            receipt.lengths, headrace.Topology(dp=1), headrace.Budget(2560, packing="dynamic"), receipt.groups
        )
        order, sizes = plan.shard(0)
        micros = []
        for index in np.split(order, np.cumsum(sizes)[:-1]):
            part = receipt.select(index)
            batch = await rows.get(part)
            micros.append(MicroBatch(batch, part.lengths, advantage[index], part.groups))
        self.backend.begin_step()
        try:
            self.backend.accumulate(micros, len(micros))
            metrics = self.backend.finish_step()
        except BaseException:
            self.backend.abort_step()  # A step that failed half-way leaves no gradient behind.
            raise
        await rows.clear("train", receipt.keys)  # Rows stay until someone clears them, for other consumers.
        return metrics

    async def evaluate(self, number: int = 128) -> float:
        """Return the share of right answers, decoded greedily, to questions of another seed."""
        stream, sampling = questions(-1), SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0)
        asked = [next(stream) for _ in range(number)]
        prompts = [self.tokenizer.encode(question.text, add_special_tokens=False) for question in asked]
        requests = [self.engine.generate(f"eval-{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
        answers = [one for (one,) in await asyncio.gather(*requests)]  # the engine batches concurrent requests
        right = [self.text_of(one) == question.answer for one, question in zip(answers, asked, strict=True)]
        return float(np.mean(right))

    def text_of(self, answer: headrace.Completion) -> str:
        """Return the text of an answer without its end token."""
        return self.tokenizer.decode(answer.token_ids.tolist(), skip_special_tokens=True)

    async def close(self) -> None:
        """Release what the parts hold."""
        self.sync.close()
        self.backend.close()
        await self.engine.close()


async def train(model: str, steps: int, seed: int, out: Path | None) -> list[float]:
    """Run the loop, write the trained model to `out`, and return the held-out scores: the first before training."""
    loop, start = Loop(model, steps, seed), time.perf_counter()
    try:
        # In this process the data plane is a thread. With process=True, other processes could put and claim rows, too.
        with headrace.open_data_plane(in_process=True) as plane:
            async with headrace.connect_async(plane.handle) as rows:
                await rows.register("train", SCHEMA, tasks=["trainer"])
                scores = [await loop.evaluate()]
                print(f"[{time.perf_counter() - start:3.0f} s] step 0/{steps}  right {scores[0]:.3f}")
                for step in range(1, steps + 1):
                    asked = [(next(loop.questions), f"{step}-{number}") for number in range(PROMPTS_PER_STEP)]
                    means = await asyncio.gather(*(loop.roll_out(rows, question, uid) for question, uid in asked))
                    metrics = await loop.train_step(rows)
                    # From here on the engine samples with the new weights, so the next rows are on-policy. An
                    # asynchronous algorithm would start the next rollouts earlier, and read `receipt.versions`.
                    await loop.sync.send(step)
                    if step % EVALUATE_EVERY == 0 or step == steps:
                        scores.append(await loop.evaluate())
                        print(
                            f"[{time.perf_counter() - start:3.0f} s] step {step}/{steps}  reward {np.mean(means):.3f}  "
                            f"right {scores[-1]:.3f}  gradient norm {metrics['train/grad_norm']:.2f}"
                        )
        if out is not None:
            loop.backend.export_model(str(out))
            print(f"model: {out}")
        return scores
    finally:
        await loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="folder of the model to start from; default: a tiny one, made in half a minute")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="new folder for the trained model; default: it is not kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # More threads slow such small matrices down.
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            print("making a model that knows some skills with digits")
        model = arguments.model or headrace.make_tiny_model(f"{folder}/base", seed=arguments.seed)
        asyncio.run(train(model, arguments.steps, arguments.seed, arguments.out))


if __name__ == "__main__":
    main()
