"""Provides a small scenario whose values a test replaces. Lengths are constant, and one engine has room for one step at
no other cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.trainers.config.config import Config
from headrace.trainers.simulation.config import SimulationConfig
from headrace.trainers.simulation.scenario import MODES, Scenario, build_scenario

PLAIN = replace(
    build_scenario(Config(), SimulationConfig(), {}),
    steps=8,
    prompts_per_step=4,
    group_size=2,
    num_engines=1,
    engine_rows=8,
    sampler=dict.fromkeys(MODES, "in_order"),
    in_flight="keep",
    response_tokens=100.0,
    response_sigma=0.0,
    prompt_tokens=0.0,
    max_response_tokens=1e9,
    decode_s=0.1,
    train_token_s=0.0,
    logprob_token_s=0.0,
    train_step_s=7.0,
    chunk_groups=1,
    controller_s=0.0,
    sync_s=2.0,
    pause_s=0.0,
    call_s=0.0,
    put_bytes=0.0,
    got_bytes=0.0,
)
"""A scenario in which generating a step takes 10 s, training 7 s and the sync 2 s."""


def scenario(**changes: Any) -> Scenario:
    """Return the plain scenario with changes; `sampler` applies to all modes."""
    if "sampler" in changes:
        changes["sampler"] = dict.fromkeys(MODES, changes["sampler"])
    return replace(PLAIN, **changes)
