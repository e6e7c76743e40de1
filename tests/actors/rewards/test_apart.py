"""Rewards that are computed apart: coroutines, whole groups, own processes; what hangs or fails costs its rows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.actors.process.user_function_timeouts import UserFunctionFailed, UserProcesses
from headrace.actors.protocols import Prompt, Sample
from headrace.actors.rewards.apart import ApartValues, Failure
from headrace.actors.rewards.config import RewardConfig, RewardFunctionConfig
from headrace.actors.rewards.rubric import build_rubric, check_rewards
from headrace.tests.process_pool import has_ended
from headrace.tests.waiting import wait_until

THERE = "headrace.tests.actors.rewards.own_functions"
calls = 0


async def judge(prompt: Any, response: str, finish_reason: str, *, response_tokens: int, scale: float = 1.0) -> float:
    """Stands for an LLM judge: it hangs on one answer, and fails on the first try of another."""
    global calls
    if response == "hang":
        await asyncio.sleep(3600)
    if response == "flaky":
        calls += 1
        if calls == 1:
            raise ConnectionError("the judge\nis busy")
    return scale * response_tokens


def ranks(prompt: Any, responses: list[str], finish_reasons: list[str]) -> list[float]:
    """Compares the answers of a group."""
    if "odd" in responses:
        return [1.0]
    return [float(sorted(responses).index(response)) for response in responses]


def sample(text: str, uid: str = "p", index: int = 0) -> Sample:
    return Sample(
        Prompt(uid, "q", "good", {"level": 3}), index, np.arange(4, dtype=np.int32),
        np.array([0, 1, 1, 1], np.uint8), np.zeros(4, np.float32), text, "stop", np.zeros(4, np.int32),
    )  # fmt: skip


def values_of(samples: list[Sample], *functions: dict[str, Any]) -> tuple[list[ApartValues], Any]:
    rubric = build_rubric(RewardConfig.model_validate({"functions": functions}))

    async def run() -> list[ApartValues]:
        assert rubric.apart is not None
        try:
            return await rubric.apart.values(samples)
        finally:
            await rubric.apart.close()

    return asyncio.run(run()), rubric


def test_a_judge_is_awaited_tried_again_and_given_up() -> None:
    kind = f"{__name__}:judge"
    function = {"kind": kind, "options": {"scale": 2.0}, "timeout_s": 0.3, "retries": 1}
    began = time.monotonic()
    samples = [sample(text, index=at) for at, text in enumerate(["good", "hang", "flaky"])]
    known, rubric = values_of(samples, function, {"kind": "exact_match"})
    assert time.monotonic() - began < 5.0
    assert known[0].values == known[2].values == {"judge": 6.0}
    assert known[1].values == {"judge": "raised TimeoutError: the function did not return within 0.3 s"}
    scores = [
        rubric.score(one.prompt, one.text, one.finish_reason, 3, one, apart=given)
        for one, given in zip(samples, known, strict=True)
    ]
    assert [score.valid for score in scores] == [True, False, True] and scores[0].reward == 7.0
    assert scores[1].error == "reward 'judge' raised TimeoutError: the function did not return within 0.3 s"


def test_a_group_is_scored_in_one_call() -> None:
    function = {"kind": f"{__name__}:ranks", "per": "group"}
    samples = [sample("b"), sample("a", index=1), sample("odd", "p2"), sample("x", "p2", 1)]
    known, _ = values_of(samples, function)
    assert [one.values for one in known[:2]] == [{"ranks": 1.0}, {"ranks": 0.0}]
    error = "raised ValueError: the function returned 1 values for 2 samples"
    assert known[2].values == known[3].values == {"ranks": error}


@pytest.mark.processes
def test_a_blocking_function_runs_in_processes_that_are_killed() -> None:
    function = {"kind": f"{THERE}:blocking", "runs": "process", "timeout_s": 60.0}
    samples = [sample(text, index=at) for at, text in enumerate(["good", "die", "wrong", "bad"])]
    good, died, wrong, bad = (known.values["blocking"] for known in values_of(samples, function)[0])
    assert 1.0 < float(good) < 1.1 and 0.0 < float(bad) < 0.1
    assert int(float(good) % 1 * 1e9) != os.getpid()
    assert "the process of 'blocking' died" in str(died)
    assert wrong == "raised UserFunctionFailed: KeyError: 3 (own_functions.py line 17)"
    [hung], _ = values_of([sample("hang")], function | {"timeout_s": 1.0})
    assert "'blocking' did not return within 1 s" in str(hung.values["blocking"])


@pytest.mark.parametrize(
    "function",
    [
        {"kind": f"{THERE}:returns"},
        pytest.param({"kind": f"{THERE}:returns_blocking", "runs": "process"}, marks=pytest.mark.processes),
    ],
)
def test_what_is_not_a_number_costs_its_row(function: dict[str, Any]) -> None:
    texts = ["none", "text", "nan", "dict", "good"]
    values, rubric = values_of([sample(text) for text in texts], {**function, "name": "judge"})
    scores = [rubric.score(sample("x").prompt, text, "stop", apart=v) for text, v in zip(texts, values, strict=True)]
    assert [score.valid for score in scores] == [False] * 4 + [True]
    for score, shown in zip(scores, ["None", "'1'", "nan", "{}"], strict=False):
        assert f"'judge' returned {shown}, expected a finite number that float32 can hold" in score.error


@pytest.mark.parametrize("runs", ["thread", pytest.param("process", marks=pytest.mark.processes)])
def test_a_group_gets_values_in_order(runs: str) -> None:
    kinds = ("list", "tuple", "array", "tensor", "set", "dict", "str", "bytes", "matrix", "none")
    function = {"kind": f"{THERE}:group_returns", "name": "g", "per": "group"}
    samples = [sample(kind, kind, at) for kind in kinds for at in range(2)]
    found, _ = values_of(samples, function | ({"runs": runs} if runs == "process" else {}))
    values = {kind: [one.values["g"] for one in found[2 * at : 2 * at + 2]] for at, kind in enumerate(kinds)}
    assert all(values[kind] == [1.0, 0.0] for kind in kinds[:4])
    for kind in kinds[4:-1]:
        assert all(isinstance(one, Failure) and " returned " in one for one in values[kind]), kind
    one, other = values["none"]
    assert one == 1.0 and "'g' returned None, expected a finite number" in other


@pytest.mark.processes
def test_a_cancelled_call_leaves_no_process_behind() -> None:
    async def run() -> None:
        processes = UserProcesses("time:sleep", {}, 2)
        task = asyncio.create_task(processes.call([3600], 60.0))
        while not processes._all:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not processes._all
        with pytest.raises(UserFunctionFailed, match="cannot be loaded.*no attribute 'slep'"):
            await UserProcesses("time:slep", {}, 1).call([], 5.0)

    asyncio.run(run())


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends them")
def test_a_hanging_function_ends_with_the_process_that_called_it(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import os, time\ndef hang():\n    print(os.getpid(), file=open('draft', 'w'))\n    os.rename('draft', 'pid')\n"
        "    time.sleep(3600)\n"
    )
    code = (
        "import asyncio; from headrace.actors.process.user_function_timeouts import UserProcesses; "
        "asyncio.run(UserProcesses('hanging:hang', {}, 1).call([], 3600.0))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as caller:
        wait_until((tmp_path / "pid").exists)
        caller.kill()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: has_ended(pid))


def test_built_in_rewards_run_as_they_are() -> None:
    with pytest.raises(ValueError, match="only your own functions can run in other ways"):
        RewardConfig.model_validate({"functions": [{"kind": "exact_match", "runs": "process"}]})


@pytest.mark.parametrize("key", [{"timeout_s": 5.0}, {"retries": 2}])
def test_a_limit_that_no_call_obeys_is_refused(key: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="has no effect on a function that is called for one sample"):
        RewardFunctionConfig(kind="exact_match", **key)
    with pytest.raises(ValueError, match="has no effect on a function that is called for one sample"):
        check_rewards([RewardFunctionConfig(kind=f"{THERE}:blocking", **key)])
    check_rewards([RewardFunctionConfig(kind=f"{THERE}:blocking", runs="process", **key)])
    check_rewards([RewardFunctionConfig(kind=f"{__name__}:ranks", per="group", **key)])
    check_rewards(
        [RewardFunctionConfig(kind=f"{__name__}:judge", **key), RewardFunctionConfig(kind=f"{__name__}:Judge", **key)]
    )


class Judge:
    async def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        return 1.0
