"""Tests when the evaluations of a run start, when the run waits for them, and what they tell about their versions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.actors.rollout.results import EvaluationReport
from headrace.trainers.cluster.calls import ActorFailed
from headrace.trainers.cluster.rollout_specs import EvaluationDefaults, EvaluationPlan, evaluation_plans
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import ConfigError
from headrace.trainers.grpo import evaluation
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.evaluation import Evaluations
from headrace.trainers.grpo.stages import Stages
from headrace.trainers.observe.trace import Tracer
from headrace.trainers.supervision.heartbeat import Heartbeat


def plans_of(config: Config) -> tuple[EvaluationPlan, ...]:
    training = EvaluationDefaults(config.rollout, config.data, config.reward, config.run.seed)
    return evaluation_plans(training, config.validation, config.evaluation)


def rollouts_of(actors: Sequence[Any], **more: Any) -> Any:
    """Return a pool of rollout actors, none of which ever hangs."""
    looks: Any = {"begin_watch": lambda: None, "look": lambda version: False, "still_s": lambda actor: 0.0}
    return SimpleNamespace(active=actors, stages=Stages(Tracer(0), Heartbeat()), timeout_s=300.0, **looks, **more)


@dataclass(eq=False)
class Call:
    """A call to an actor, which ends when the test or a wait for it says so."""

    actor: Actor
    name: str
    part: int
    pid: int = 1
    outcome: EvaluationReport | ActorFailed | None = None

    def again(self, actor: Actor) -> Call:
        return actor.evaluate(self.name, self.part, 2, None, 0)

    def end(self, first: int = 0, last: int = 0, correct: float = 1.0) -> None:
        sums = {"eval/hard/avg@1": 4 * correct}
        self.outcome = EvaluationReport(4, 0, "", first, last, sums, dict.fromkeys(sums, 4))


@dataclass(eq=False)
class Actor:
    """A rollout actor that notes its calls."""

    calls: list[Call]
    info: Any = field(default_factory=lambda: SimpleNamespace(pid=1))

    def evaluate(self, name: str, part: int, parts: int, params: Any, in_flight: int) -> Call:
        self.calls.append(Call(self, name, part))
        return self.calls[-1]


class World:
    """A run with two rollout actors whose evaluations end when the test says so; a wait ends them all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **hard: Any) -> None:
        section = {"data": {"source": "task:reverse"}, "num_prompts": 8, "every": 2, **hard}
        config = build_config({"validation": {"every": 0}, "evaluation": {"hard": section}})
        self.calls: list[Call] = []
        actors = [Actor(self.calls), Actor(self.calls)]
        self.replaced: list[tuple[Actor, int]] = []
        rollouts = rollouts_of(
            actors,
            ahead_of=lambda version: False,
            replace=lambda actor, pid, failure, version: self.replaced.append((actor, version)),
        )
        monkeypatch.setattr(evaluation, "ended", self._ended)
        self.told: list[tuple[int, Any]] = []
        on_end = [lambda step, metrics: self.told.append((step, metrics))]
        self.evaluations = Evaluations(plans_of(config), rollouts, None, None, on_end)  # pyright: ignore[reportArgumentType]

    def _ended(self, calls: list[Call], stage: str, timeout_s: float) -> list[tuple[Call, Any]]:
        for call in calls:
            if timeout_s and call.outcome is None:
                call.end(7, 7)
        return [(call, call.outcome) for call in calls if call.outcome is not None]

    def after(self, step: int, last: bool = False) -> dict[str, float]:
        return self.evaluations.after_step(State(step, step), last=last)


def test_training_does_not_wait_for_an_evaluation_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert world.evaluations.before_first_step(State()) == {} and len(world.calls) == 2
    assert world.evaluations.before_update(State()) == {} and world.after(1) == {}
    world.calls[0].end(0, 0, correct=1.0)
    assert world.after(1) == {}, "the other actor's part has not ended"
    world.calls[1].end(0, 1, correct=0.5)
    assert world.told == []
    figures = world.after(1)
    assert figures["eval/hard/avg@1"] == 0.75 and figures["eval/hard/step"] == 0
    assert world.told == [(0, figures)], "it is told at its end, with the step that it measured"
    assert (figures["eval/hard/version_first"], figures["eval/hard/version_last"]) == (0, 1)
    assert len(world.calls) == 2 and world.after(2) == {} and len(world.calls) == 4


def test_an_evaluation_that_is_not_over_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(monkeypatch)
    world.evaluations.before_first_step(State())
    with caplog.at_level(logging.WARNING):
        assert world.after(2) == {} and len(world.calls) == 2
    assert "the evaluation of step 0 has not ended, so there is none of step 2" in caplog.text


def test_the_last_step_waits_for_what_is_still_going_on_and_for_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(monkeypatch)
    world.after(2)
    with caplog.at_level(logging.WARNING):
        figures = world.after(3, last=True)
    assert len(world.calls) == 4 and figures["eval/hard/step"] == 3
    assert "that of an earlier step ended with the last one: eval/hard/avg@1 1" in caplog.text


def test_an_evaluation_in_the_foreground_is_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, background=False)
    figures = world.after(2)
    assert figures["eval/hard/step"] == 2 and figures["eval/hard/version_last"] == 7 and world.after(3) == {}


def test_the_part_of_an_actor_that_died_is_evaluated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.after(2)
    world.calls[0].end(2, 2)
    world.calls[1].outcome = ActorFailed("it died", died=True)
    assert world.after(3) == {} and world.replaced == [(world.calls[1].actor, 3)]
    assert [call.part for call in world.calls] == [0, 1, 1]
    world.calls[2].end(3, 3)
    figures = world.evaluations.after_step(State(3, 3), last=False)
    assert (figures["eval/hard/version_first"], figures["eval/hard/version_last"]) == (2, 3)


def test_the_part_of_an_actor_that_leaves_is_evaluated_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.after(2)
    leaving: Any = world.calls[1].actor
    world.evaluations.withdraw(leaving)
    assert [call.part for call in world.calls] == [0, 1, 1] and world.calls[2].actor is not leaving
    world.calls[0].end(2, 2)
    world.calls[2].end(2, 2)
    assert world.evaluations.after_step(State(3, 3), last=False) and not world.replaced


@pytest.mark.parametrize(
    ("hard", "sections", "sentence"),
    [
        ({"correct": "judge"}, {}, "evaluation.hard.correct: got 'judge', expected one of its rewards, exact_match"),
        ({"num_prompts": None}, {}, "evaluation.hard.num_prompts: not set, expected a number"),
        ({"n": 2}, {}, "evaluation.hard.n: got 2 with evaluation.hard.temperature=0, expected 1"),
        ({"top_k": 5}, {}, "evaluation.hard.top_k: got 5 with evaluation.hard.temperature=0, expected 0"),
        ({}, {"run": {"deterministic": True}}, "evaluation.hard.background: got true with run.deterministic=true"),
        ({}, {"resources": {"switch_roles": "always"}}, "evaluation.hard.background=true, expected false"),
        ({"data": {"source": "no.jsonl"}}, {}, "evaluation.hard.data.source: got 'no.jsonl', expected an existing"),
        ({"evry": 1}, {}, "evaluation.hard.evry: unknown key; did you mean evaluation.hard.every?"),
    ],
)
def test_a_set_that_cannot_be_is_refused(hard: Any, sections: Any, sentence: str) -> None:
    section = {"data": {"source": "task:reverse"}, "num_prompts": 8, **hard}
    with pytest.raises(ConfigError) as refusal:
        build_config({**sections, "evaluation": {"hard": section}})
    assert sentence in str(refusal.value)


def test_a_set_has_the_keys_of_the_run_s_data_unless_it_says_otherwise() -> None:
    config = build_config(
        {
            "data": {"train": "a/b", "validation": "a/c", "template": "Q: {prompt}", "answer_pattern": "#### (.+)"},
            "rollout": {"max_new_tokens": 30},
            "evaluation": {
                "aime": {
                    "data": {"source": "a/d", "split": "dev", "answer_pattern": "", "max_prompt_tokens": 900},
                    "reward": {"functions": [{"kind": "boxed"}, {"kind": "exact_match"}]},
                    "n": 4,
                    "temperature": 0.6,
                    "max_new_tokens": 100,
                },
                "off": {"data": {"source": "a/e"}, "every": 0},
            },
        }
    )
    validation, aime = plans_of(config)
    assert (validation.name, aime.name, aime.setup.prefix) == ("validation", "evaluation.aime", "eval/aime")
    data = aime.setup.data
    assert (data.source(validation=True), data.validation_split, data.template) == ("a/d", "dev", "Q: {prompt}")
    assert data.answer_pattern is None and (aime.setup.correct, aime.sampling.n) == ("boxed", 4)
    assert config.longest_sequence == 1000 and config.data.answer_pattern == "#### (.+)"
