"""Mistakes are reported before an actor is built, by dry run and start alike, and leave no folder behind."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from safetensors.torch import save

from headrace.cli import main
from headrace.dataplane.stores import shm_folder
from headrace.trainers.base_model.prepare import TINY_QWEN3
from headrace.trainers.cluster import ray_cluster
from headrace.trainers.cluster.gpu_bundles import Reservation
from headrace.trainers.cluster.places.placement import ON_CPUS
from headrace.trainers.config.config import with_run_dir
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import ConfigError
from headrace.trainers.run import early_ray, processes
from headrace.trainers.run.checks import preflight, prompts
from headrace.trainers.run.checks.preflight import check_start
from headrace.trainers.run.checks.prompts import SourceRows, changed_data

REWARDS = """
def digits(prompt, response, finish_reason, *, base=10): return 1.0
number = 3
"""
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, data and rewards in it, in which everything fits."""
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "my_preflight_rewards.py").write_text(REWARDS)
    write(tmp_path / "chat.jsonl", {"prompt": [{"role": "user", "content": "r12="}], "answer": "21"})
    (tmp_path / "run.yaml").write_text(
        "model: {path: ./model}\n"
        "data: {train: ./chat.jsonl, validation: ./chat.jsonl, max_prompt_tokens: 16}\n"
        "rollout: {max_new_tokens: 10}\n"
        "algorithm: {steps: 2, prompts_per_step: 4, group_size: 2}\n"
        'reward: {functions: [{kind: "my_preflight_rewards:digits", options: {base: 8}}]}\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_preflight_rewards", raising=False)
    return tmp_path


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def nothing(place: Path) -> None:
    """Damage nothing, as the mistake is in the overrides."""


def no_tokenizer(place: Path) -> None:
    for path in (place / "model").iterdir():
        if path.name != "config.json":
            path.unlink()


def damaged_tokenizer(place: Path) -> None:
    (place / "model" / "tokenizer.json").write_text('{"version": 1}')


def broken_template(place: Path) -> None:
    for path in (place / "model").iterdir():
        if "chat_template" in path.read_text():
            path.write_text(path.read_text().replace("{% for m in messages %}", "{% for m in %}"))
    template = place / "model" / "chat_template.jinja"
    if template.exists():
        template.write_text("{% for m in %}")


def damaged_data(place: Path) -> None:
    with (place / "chat.jsonl").open("a") as file:
        file.write('{"prompt": ')


def empty_data(place: Path) -> None:
    (place / "chat.jsonl").write_text("\n")


def gpt2(place: Path) -> None:
    (place / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 4, "vocab_size": 40}))


def large(place: Path) -> None:
    (place / "model" / "config.json").write_text(json.dumps({**TINY_QWEN3, **LARGE, "model_type": "qwen3"}))


def wide(place: Path) -> None:
    (place / "model" / "config.json").write_text(json.dumps({**TINY_QWEN3, "head_dim": 512, "model_type": "qwen3"}))


MISTAKES = {
    "no tokenizer": (no_tokenizer, [], "model.path: got './model', expected a model whose tokenizer can be loaded"),
    "damaged tokenizer": (damaged_tokenizer, [], "model.path: got './model', expected a model whose tokenizer can be"),
    "broken template": (broken_template, [], "data: line 1 of './chat.jsonl': the chat template does not take"),
    "prompt column": (nothing, ["data.prompt_field=question"], "data.prompt_field: line 1 of './chat.jsonl' has no"),
    "answer column": (nothing, ["data.answer_field=solution"], "data.answer_field: line 1 of './chat.jsonl' has no"),
    "prompts too long": (nothing, ["data.max_prompt_tokens=3"], "data.max_prompt_tokens: got 3, but these prompts are"),
    "reward module": (nothing, ['reward.functions=[{kind: "gone:f"}]'], "reward.functions: module 'gone' of 'gone:"),
    "reward function": (nothing, ["reward.functions.0.kind=my_preflight_rewards:f"],
     "reward.functions: module 'my_preflight_rew"),
    "reward options": (nothing, ["reward.functions.0.options={bas: 8}"], "with options ['bas']: got an unexpected key"),
    "tool": (nothing, ["environment.kind=tool_use", "environment.options.tools=[saw]"],
     "environment.options.tools: got 'saw', expected one"),
    "sampler": (nothing, ["algorithm.sampler=foo"], "algorithm.sampler: task 'train': sampler 'foo': expected oldest"),
    "sampler of ranks": (nothing, ["algorithm.sampler=rank_aware"], "got 'rank_aware', whose claims need the argum"),
    "megatron": (gpt2, ["trainer.backend=megatron"], "trainer.backend: got 'megatron', expected 'fsdp' for a model of"),
    "train heads": (nothing, ["trainer.tp=3"], "trainer.tp: got 3, expected a divisor of the model's num_attention_he"),
    "engine heads": (nothing, ["rollout.engine=vllm", "rollout.tp=3"],
     "rollout.tp: got 3, expected a divisor of the m"),
    "key-value cache": (wide, ["rollout.engine=vllm", "rollout.kv_cache=1", "model.dtype=float32"],
     "rollout.kv_cache: got 1 MiB, expected auto or at least 8 MiB, for one sequence of 26 tokens of 32,768 bytes"),
    "long engine": (nothing, ["rollout.engine=vllm", "rollout.max_model_len=65"],
     "rollout.max_model_len: got 65, expected at most 64, the context of ./model"),
    "long validation": (nothing, ["validation.max_new_tokens=60"],
     "data.max_prompt_tokens + validation.max_new_tokens: got 76, expected at most 64, the context of ./model"),
    "long evaluation": (nothing, ["evaluation={x: {data: {source: ./chat.jsonl}, max_new_tokens: 70}}"],
     "evaluation.x: data.max_prompt_tokens + max_new_tokens: got 86, expected at most 64, the context of ./model"),
    "run.dir": (nothing, ["run.dir=/proc/x"], "run.dir: /proc/x cannot be created"),
    "ray": (nothing, ["resources.ray_address=nope.invalid:1"], "resources.ray_address: got 'nope.invalid:1', expected"),
    "ray without port": (nothing, ["resources.ray_address=here"], "(it does not have the form HOST:PORT)"),
    "stop text": (nothing, ["rollout.stop=['<eos>=']"], "rollout.stop: got '<eos>=', expected the special token"),
    "stop token": (nothing, ["rollout.stop_token_ids=[999]"], "rollout.stop_token_ids: got 999, expected less than 40"),
    "no pool": (nothing, ["pool.engines=shared"], "pool.engines: got 'shared' with pool.address=None, expected pool.a"),
    "damaged data": (damaged_data, [], "data: line 2 of './chat.jsonl' is not JSON"),
    "empty data": (empty_data, [], "data: './chat.jsonl' is empty, expected at least one row"),
    "memory": (large, [], "this machine has"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_by_the_dry_run_and_by_the_start(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    damage, overrides, sentence = MISTAKES[name]
    damage(place)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray is started"))
    clusters = fake_clusters(monkeypatch)
    before = {path.name for path in place.iterdir()}
    for more in (["--dry-run"], ["resources.watchdog=false"]):
        assert main(["train", "run.yaml", "run.dir=run", *overrides, *more]) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.startswith("headrace: ") and "Traceback" not in error
        assert {path.name for path in place.iterdir()} - {"__pycache__"} == before
    assert len(clusters) == (0 if name.startswith("ray") else 1), "Ray starts beside the checks, but for a dry run"
    assert all(cluster.closed for cluster in clusters)


class FakeCluster:
    """Ray as the start sees it until the prompts are checked."""

    def __init__(self) -> None:
        self.closed = False
        self.num_nodes, self.num_gpus = 1, 0

    def processes(self) -> set[psutil.Process]:
        return set()

    def close(self) -> None:
        self.closed = True


def fake_clusters(monkeypatch: pytest.MonkeyPatch) -> list[FakeCluster]:
    """Have a start open fake clusters, which the list gets, and no actors."""
    opened: list[FakeCluster] = []

    def open_cluster(*_: Any) -> FakeCluster:
        opened.append(FakeCluster())
        return opened[-1]

    monkeypatch.setattr(early_ray, "open_cluster", open_cluster)
    monkeypatch.setattr(processes, "reserve_places", lambda *_: Reservation(ON_CPUS))
    monkeypatch.setattr(processes, "ActorStarter", lambda *_, **__: None)
    monkeypatch.setattr(processes, "StartingActors", lambda *_, **__: None)
    return opened


def test_all_mistakes_are_told_at_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no_tokenizer(place)
    assert main(["train", "run.yaml", "--dry-run", "algorithm.sampler=foo", "trainer.tp=3"]) == 2
    assert [line.split(" ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "trainer.tp:",
        "algorithm.sampler:",
        "model.path:",
    ]


STAGES = {
    "model": (["model.path=./nope"], ["model.path: got './nope', expected an existing model folder (relative paths"]),
    "keys": (["algorithm.prompts_per_step=7", "trainer.dp=2"], ["algorithm.prompts_per_step: got 7, expected a multi"]),
    "packages": (["dataplane.store.kind=simple", "dataplane.trusted_network=true"], ["store.kind=simple needs transf"]),
}  # fmt: skip
"""Mistakes of a stage -> their sentences."""


@pytest.mark.parametrize("stage", STAGES)
def test_mistakes_of_all_stages_are_told_at_once(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transfer_queue" else found(name))
    overrides, sentences = STAGES[stage]
    functions = 'reward.functions=[{kind: "gone:f"}, {kind: "my_preflight_rewards:number"}]'
    mistakes = [*overrides, functions, "data.prompt_field=zzz", "environment.kind=lost:play"]
    assert main(["train", "run.yaml", "run.dir=run", *mistakes, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 5 and "Traceback" not in error
    for sentence in (*sentences, "module 'gone'", "rewards:number' is a int", "module 'lost'", "no column 'zzz'; it"):
        assert sentence in error
    assert not (place / "run").exists()


def test_what_fits_is_described(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.yaml", "run.dir=deep/run", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "plan of a step" in output and "not checked" not in output and "name different ends" not in output
    assert output.index("placement") < output.index("plan of a step") < output.index("\nconfiguration\n")
    assert "  2 steps of 4 of the 1 prompts of ./chat.jsonl = 8 epochs" in output
    assert "note: validation reads the prompts that are trained on, those of ./chat.jsonl" in output
    assert "note: a step has 4 prompts of ./chat.jsonl, which has 1 rows, so prompts repeat within a step" in output
    assert not (place / "deep").exists()
    config = {**TINY_QWEN3, "model_type": "qwen3", "eos_token_id": None}
    (place / "model" / "config.json").write_text(json.dumps(config))
    assert main(["train", "run.yaml", "run.dir=deep/run", "--dry-run"]) == 0
    assert (
        "note: the files of the model name different ends of an answer, and a sample ends at each of them (generation "
        "config: none; tokenizer: <eos> (2); chat template: none)\n"
    ) in capsys.readouterr().out


def test_the_same_file_is_known_under_another_name(place: Path) -> None:
    write(place / "many.jsonl", *({"prompt": f"r{n}=", "answer": "1"} for n in range(8)))
    (place / "link.jsonl").symlink_to(place / "many.jsonl")
    mixture = [{"source": "./many.jsonl", "weight": 3}, {"source": "./chat.jsonl"}]
    for name in ("many.jsonl", str(place / "many.jsonl"), "./link.jsonl"):
        for train in ({"train": "./many.jsonl"}, {"train": "mixture", "mixture": mixture}):
            data = {**train, "validation": name, "max_prompt_tokens": 16}
            run = {"model": {"path": "./model"}, "data": data, "rollout": {"max_new_tokens": 8}}
            run["evaluation"] = {"hard": {"data": {"source": "./chat.jsonl"}}}
            read = check_start(with_run_dir(build_config({"run": {"dir": str(place / "run")}, **run})))
            assert f"validation reads the prompts that are trained on, those of {name}" in read.notes
            assert any(note.startswith("evaluation.hard reads") for note in read.notes) == ("mixture" in train)
    assert read.plan == [
        "  100 steps of 24 of the 8 prompts of ./many.jsonl = 300 epochs",
        "  100 steps of 8 of the 1 prompts of ./chat.jsonl = 800 epochs",
    ]


def test_a_damaged_model_is_told_with_its_file(place: Path) -> None:
    run = {"model": {"path": "./model"}, **SMALL}
    weights = place / "model" / "model.safetensors"
    weights.write_bytes(save({"w": torch.zeros(100)}))
    assert checked(place, run) == []
    weights.write_bytes(weights.read_bytes()[:-7])
    [problem] = problems(place, run)
    assert problem.startswith("model.path: model/model.safetensors is not a complete safetensors file (")
    weights.rename(place / "model" / "model-1.safetensors")
    index = {"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}
    (place / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    [problem] = problems(place, run)
    assert problem.startswith("model.path: model/model-1.safetensors is not a complete safetensors file")
    (place / "model" / "model-1.safetensors").write_bytes(save({"w": torch.zeros(1)}))
    [problem] = problems(place, run)
    assert problem.startswith("model.path: model/model-2.safetensors does not exist, expected it, because model.saf")
    for content, words in (('{"a": ', "cannot be read as JSON: "), ("[]", "holds a list, expected an object")):
        (place / "model" / "config.json").write_text(content)
        assert any(f"model.path: model/config.json {words}" in problem for problem in problems(place, run))


def test_data_that_changed_before_a_resume_is_told(tmp_path: Path) -> None:
    def rows(count: int, digest: str = "a", name: str = "p.jsonl") -> dict[str, SourceRows]:
        return {name: SourceRows(count, digest)}

    assert changed_data(tmp_path, rows(20)) == [] == changed_data(tmp_path, rows(20))
    [note] = changed_data(tmp_path, rows(6))
    assert note == (
        "data: p.jsonl had 20 rows and has 6 since the run began; prompts go on at their positions in its new order"
    )
    assert changed_data(tmp_path, rows(6)) == [], "it is told once"
    assert "has other content in its 6 rows" in changed_data(tmp_path, rows(6, "b"))[0]
    [note] = changed_data(tmp_path, rows(6, "b", "q.jsonl"))
    assert note == "data: the run began with prompts of p.jsonl, and goes on with those of q.jsonl"


SMALL = {"data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 8}}
"""Rows that fit into the built-in model's context."""


def checked(place: Path, data: dict[str, Any]) -> list[str]:
    return check_start(with_run_dir(build_config({"run": {"dir": str(place / "run")}, **data}))).left


def problems(place: Path, data: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        checked(place, data)
    return caught.value.problems


def test_what_is_not_on_this_machine_is_left_to_the_run(place: Path) -> None:
    pytest.importorskip("datasets")
    [line] = checked(place, {"model": {"path": "no-one/has-this-model"}})
    assert line.startswith("model.path: no-one/has-this-model is not on this machine")
    data = {"train": "no-one/has-this-data", "validation": "./chat.jsonl", "max_prompt_tokens": 16}
    [line] = checked(place, {"model": {"path": "./model"}, "data": data, "rollout": {"max_new_tokens": 10}})
    assert line.startswith("data: no-one/has-this-data is not on this machine")


def test_of_a_large_source_the_first_prompts_are_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "READ_PROMPTS", 2)
    write(place / "many.jsonl", *({"prompt": f"r{n}=", "answer": "1"} for n in (1, 22, 333333333)))
    data = {"train": "./many.jsonl", "validation": "./chat.jsonl", "max_prompt_tokens": 6}
    run = {"model": {"path": "./model"}, "rollout": {"max_new_tokens": 10}}
    assert checked(place, {**run, "data": data}) == [
        "data.max_prompt_tokens: only the first 2 of 3 prompts of ./many.jsonl"
    ]
    problem, other = problems(place, {**run, "data": {**data, "max_prompt_tokens": 3}})
    assert "longer: line 1 of './chat.jsonl' (4 tokens)" in other
    assert problem.startswith("data.max_prompt_tokens: got 3, but these prompts are longer: line 2 of './many.jsonl' (")


def test_shared_memory_that_is_too_small(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_folder, "free_memory", lambda _: 3 << 20)
    run = {"model": {"path": "no-one/has-this-model"}}
    [problem] = problems(place, run)
    assert problem.startswith("dataplane.store.capacity_mib: got 1024, but /dev/shm of host ")
    assert " has 3 MiB free" in problem
    assert checked(place, {**run, "dataplane": {"store": {"kind": "ray"}}})


@pytest.fixture
def no_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wait for the first bytes of a Ray nor for its TLS, as a test's port sends none."""
    monkeypatch.setattr(ray_cluster, "GREETING_S", 0.01)
    monkeypatch.setattr(ray_cluster, "CONNECT_TIMEOUT_S", 0.2)


@pytest.mark.usefixtures("no_greeting")
def test_a_joined_ray_is_asked_about_its_token(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "asks_for_token", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        run = {**SMALL, "resources": {"ray_address": address}}
        [problem] = problems(place, run)
        assert problem.startswith(
            f"dataplane.trusted_network: got false with resources.ray_address='{address}', expect"
        )
        trusting = {**run, "dataplane": {"trusted_network": True}}
        assert checked(place, trusting) == []
        [problem] = problems(place, {**trusting, "resources": {"ray_address": address, "interface": "eth77"}})
        assert problem.startswith("resources.interface: got 'eth77', expected the name or the network of an interface")


@pytest.mark.usefixtures("no_greeting")
def test_a_store_that_trusts_everybody_needs_a_network_that_may_be_trusted(place: Path) -> None:
    run = {"model": {"path": "no-one/has-this-model"}}
    with socket.create_server(("127.0.0.1", 0)) as cluster:  # any that can be reached
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        for resources in ({}, {"ray_address": address}):
            for kind in ("simple", "mooncake"):
                plane = {"store": {"kind": kind}}
                [problem] = problems(place, {**run, "resources": resources, "dataplane": plane})
                assert problem.startswith(
                    f"dataplane.trusted_network: got false with dataplane.store.kind='{kind}', expected true, because "
                )
                plane = {**plane, "trusted_network": True}
                assert checked(place, {**run, "resources": resources, "dataplane": plane})


def test_prompts_that_are_left_out_are_no_mistake(place: Path) -> None:
    write(place / "some.jsonl", *({"prompt": f"r{n}=", "answer": "1"} for n in (1, 333333333)))
    data = {"train": "./some.jsonl", "validation": "./some.jsonl", "max_prompt_tokens": 6}
    run = {"model": {"path": "./model"}, "rollout": {"max_new_tokens": 10}}
    assert checked(place, {**run, "data": {**data, "overlong_prompts": "drop"}}) == []
    found = problems(place, {**run, "data": {**data, "overlong_prompts": "drop", "max_prompt_tokens": 2}})
    assert found[0].startswith("data.max_prompt_tokens: got 2, but all 2 prompts of './some.jsonl' are longer")


@pytest.mark.usefixtures("no_greeting")
def test_a_cluster_that_answers_is_accepted(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for given in (address, f"ray://{address}"):
            assert checked(place, {**SMALL, "resources": {"ray_address": given}}) == []


def test_the_memory_that_is_needed_is_that_of_all_processes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    large(place)
    run: dict[str, Any] = {
        "model": {"path": "./model"},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 8},
    }
    [problem] = problems(place, {**run, "trainer": {"dp": 2}, "rollout": {"num_engines": 2, "max_new_tokens": 8}})
    assert "for 2 train worker(s) of" in problem and "2 engine(s) of" in problem
    assert "2 engine(s) of 0.0 GiB" not in problem
    [problem] = problems(place, {**run, "rollout": {"engine": "scripted", "max_new_tokens": 8}})
    assert "1 engine(s) of 0.0 GiB" in problem
    monkeypatch.setattr(preflight, "total_memory", lambda: 1 << 50)
    assert checked(place, run) == []


def test_a_running_or_finished_run_is_told_by_the_dry_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run").mkdir()
    (place / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["train", "run.yaml", "run.dir=run", "--dry-run"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", "run.yaml", "run.dir=other", "--resume", "--dry-run"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
