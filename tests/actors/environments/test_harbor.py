"""examples/harbor, against a script that stands for Harbor's command, because its containers need Docker.

The script takes the arguments of `harbor run` of harbor 0.26.0 and writes `result.json` with the fields of its trial
results (module `harbor.models.trial.result`) that the example reads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("renderers")

from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.environments.factory import build_environment, check_environment
from headrace.tests.actors.environments.endpoint_world import Recorder
from headrace.tests.actors.environments.test_games import played

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[3] / "examples" / "harbor"
HARBOR = """
import argparse, json, os, pathlib, urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("command", choices=["run"])
for name in ("path", "agent", "model", "base-url", "jobs-dir", "job-name", "n-attempts"):
    parser.add_argument(f"--{name}", required=True)
for name in ("quiet", "yes"):
    parser.add_argument(f"--{name}", action="store_true", required=True)
given = parser.parse_args()
task = pathlib.Path(given.path, "instruction.md").read_text()
body = {"model": given.model.removeprefix("openai/"), "messages": [{"role": "user", "content": task}]}
request = urllib.request.Request(
    given.base_url + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
if said == "nothing":
    raise SystemExit("Docker daemon is not running.")
lost = {"exception_type": "SandboxBuildFailedError", "exception_message": "no image"}
result = {"schema_version": 1, "reward_valid": said != "lost", "exception_info": lost if said == "lost" else None}
result["verifier_result"] = None if said == "lost" else {"rewards": {"reward": 1.0, "style": 0}}
trial = pathlib.Path(given.jobs_dir, given.job_name, "t1__abc")
trial.mkdir(parents=True)
(trial / "result.json").write_text(json.dumps(result))
"""


def test_a_job_calls_the_policy_and_its_rewards_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    command = tmp_path / "harbor"
    command.write_text(f"#!{sys.executable}\n{HARBOR}")
    command.chmod(0o755)
    task = tmp_path / "tasks" / "t1"
    task.mkdir(parents=True)
    (task / "task.toml").touch()
    (task / "instruction.md").write_text("Say hello.")
    options = {"tasks": str(tmp_path / "tasks"), "harbor": str(command)}
    config = EnvironmentConfig(kind="harbor_tasks:HarborTasks", options=options)
    check_environment(config, EndpointConfig(enabled=True))
    environment = build_environment(config)
    [right] = played(environment, Recorder("hello", version=5), [3])
    assert not right.error and right.rewards == {"reward": 1.0, "style": 0.0}
    [lost] = played(environment, Recorder("lost", version=5), [3])
    assert "RuntimeError: Harbor: SandboxBuildFailedError no image" in lost.error
    [none] = played(environment, Recorder("nothing", version=5), [3])
    assert "Docker daemon is not running." in none.error
    with pytest.raises(ValueError, match="environment.options.tasks: got '/none', expected a folder of folders"):
        build_environment(EnvironmentConfig(kind=config.kind, options={"tasks": "/none"}))
