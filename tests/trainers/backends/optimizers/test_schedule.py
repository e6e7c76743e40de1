"""The learning rate of each update is that of the schedule of the same name in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.backends.optimizers.schedule import learning_rate

UPDATES = 20


def rates_of_transformers(name: str, warmup: int, options: dict[str, Any]) -> list[float]:
    """The rates of UPDATES updates as transformers' Trainer makes them, for a peak rate of 2."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    needed = {} if name == "warmup_stable_decay" else {"num_training_steps": UPDATES}
    schedule = get_scheduler(name, optimizer, warmup, **needed, scheduler_specific_kwargs=options)
    rates = []
    for _ in range(UPDATES):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("name", "theirs", "options", "ours"),
    [
        ("constant", "constant_with_warmup", {}, {}),
        ("cosine", "cosine", {}, {}),
        ("cosine", "cosine_with_min_lr", {"min_lr": 0.5}, {"min_lr": 0.5}),
        ("linear", "linear", {}, {}),
        ("polynomial", "polynomial", {"lr_end": 0.5, "power": 3.0}, {"min_lr": 0.5, "power": 3.0}),
        ("inverse_sqrt", "inverse_sqrt", {}, {}),
        ("warmup_stable_decay", "warmup_stable_decay", {"num_decay_steps": 5, "min_lr_ratio": 0.25},
         {"decay_ratio": 0.25, "min_lr": 0.5}),
    ],
)  # fmt: skip
def test_a_schedule_is_that_of_transformers(
    name: Any, theirs: str, options: dict[str, Any], ours: dict[str, Any], warmup: int
) -> None:
    if name == "warmup_stable_decay":
        options = {**options, "num_stable_steps": UPDATES - warmup - options["num_decay_steps"]}
    config = TrainerConfig(lr=2.0, warmup_steps=warmup, schedule=name, **ours)
    wanted = rates_of_transformers(theirs, warmup, options)
    found = [learning_rate(config, update, UPDATES) for update in range(UPDATES)]
    assert found[warmup:] == pytest.approx(wanted[warmup:], abs=1e-12)
    # Their first update has the rate 0, ours the rate of their second one.
    assert found[:warmup] == pytest.approx([2.0 * (update + 1) / warmup for update in range(warmup)])
    assert name == "constant" or len(set(found)) > 4


def test_learning_rate_schedules() -> None:
    warm = TrainerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(warm, step, 0) for step in (0, 1, 3, 4, 900)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    line = TrainerConfig(lr=1.0, warmup_steps=2, schedule="linear")
    assert [learning_rate(line, step, 6) for step in (0, 2, 3, 6, 9)] == [0.5, 1.0, 0.75, 0.0, 0.0]
    cosine = TrainerConfig(lr=2.0, schedule="cosine")
    assert [learning_rate(cosine, step, 4) for step in (0, 2, 4, 5)] == pytest.approx([2.0, 1.0, 0.0, 0.0])
    floor = TrainerConfig(lr=2.0, min_lr=1.0, schedule="cosine")
    assert [learning_rate(floor, step, 4) for step in (0, 2, 4, 5)] == pytest.approx([2.0, 1.5, 1.0, 1.0])


def test_no_schedule_goes_on_below_its_end() -> None:
    ends = {
        name: learning_rate(TrainerConfig(lr=2.0, min_lr=0.5, schedule=name), 20 + more, 20)
        for name in ("cosine", "linear", "polynomial", "warmup_stable_decay")
        for more in (0, 7)
    }
    assert set(ends.values()) == {0.5}


def test_a_schedule_moves_with_each_update_of_a_step() -> None:
    line = TrainerConfig(lr=1.0, min_lr=0.5, warmup_steps=2, schedule="linear")
    rates = [learning_rate(line, update, 6, updates_per_step=2) for update in (0, 1, 3, 4, 8, 12, 20)]
    assert rates == [0.25, 0.5, 1.0, 1.0, 0.75, 0.5, 0.5]


def test_the_warm_up_as_a_share_of_the_run() -> None:
    share = TrainerConfig(lr=1.0, warmup_ratio=0.25)
    rates = [learning_rate(share, update, 4, updates_per_step=2) for update in range(4)]
    assert rates == [0.5, 1.0, 1.0, 1.0]
    assert learning_rate(TrainerConfig(lr=1.0, warmup_ratio=0.01), 0, 10) == 1.0  # a part of an update is a whole one


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "trainer.warmup_ratio: got 0.1 beside trainer.warmup_steps=5, expe"),
        ({"warmup_ratio": 1.0}, "trainer.warmup_ratio: got 1.0, expected a number < 1"),
        ({"power": 2.0}, "trainer.power: got 2 with trainer.schedule='constant', expected 1, because it has an eff"),
        ({"min_lr": 1e-7, "schedule": "inverse_sqrt"}, "trainer.min_lr: got 1e-07 with trainer.schedule='inverse_sqr"),
        ({"schedule": "wsd"}, "trainer.schedule: got 'wsd', expected one of constant, cosine, linear, polynomial, inv"),
    ],
)
def test_settings_that_do_not_fit_are_refused(trainer: dict[str, Any], sentence: str) -> None:
    assert only_problem({"trainer": trainer}).startswith(sentence)
