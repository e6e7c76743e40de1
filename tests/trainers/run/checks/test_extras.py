"""A missing optional package is one sentence that names its extra, before the run starts and where it is imported."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from pathlib import Path

import pytest

from headrace.actors.rollout import prompt_sources
from headrace.actors.rollout.data_config import DataConfig
from headrace.cli import main
from headrace.dataplane.imports import MissingExtra
from headrace.trainers.config.config import Config
from headrace.trainers.config.load import build_config
from headrace.trainers.config.tracker_options import TrackerConfig
from headrace.trainers.errors import ConfigError
from headrace.trainers.observe.trackers import TrackedRun, build_tracker
from headrace.trainers.run.checks.extras import check_extras

EVERYTHING = {
    "data": {"train": "org/math"},
    "validation": {"every": 0},
    "dataplane": {"store": {"kind": "simple"}},
    "logging": {"trackers": ["wandb"]},
    "reward": {"functions": [{"kind": "math_verify"}]},
}
"""A configuration that uses all optional packages but those of engines and backends."""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core install: none of the optional packages can be found or imported."""
    found = importlib.util.find_spec
    absent = ("matplotlib", "tensorboard", "datasets", "transfer_queue", "wandb", "math_verify")
    for name in {*absent, *sys.modules}:
        if name.partition(".")[0] in absent:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))


def check(config: Config) -> None:
    """Check the extras of a run, as its start does."""
    check_extras(
        config.logging,
        config.rollout,
        config.sources,
        config.rubrics.values(),
        renderer=config.model.renderer,
        store=config.dataplane.store.kind,
    )


def test_a_run_names_all_missing_extras_before_it_starts(bare: None) -> None:
    config = build_config(EVERYTHING)
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert list(caught.value.problems) == [
        "the tracker wandb needs wandb, which is not installed: pip install 'headrace[trackers]'",
        "logging.tensorboard=true needs tensorboard, which is not installed: pip install 'headrace[report]'",
        "dataplane.store.kind=simple needs transfer_queue, which is not installed: "
        "pip install 'headrace[transferqueue]'",
        "data.train=org/math needs datasets, which is not installed: pip install 'headrace[datasets]'",
        "the reward math_verify needs math_verify, which is not installed: pip install 'headrace[math]'",
    ]


def test_nothing_is_missed_where_everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    there = ("wandb", "math_verify")  # no test needs them but some of `make test-all`
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else found(name))
    check(build_config(EVERYTHING))


def test_a_dry_run_names_them_too(bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("logging: {trackers: [wandb]}\n")
    assert main(["train", str(tmp_path / "run.yaml"), "--dry-run"]) == 2
    assert "headrace: the tracker wandb needs wandb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("headrace.bench.transfer.plots", "report"),
        ("headrace.dataplane.stores.simple", "transferqueue"),
    ],
)
def test_a_module_names_the_extra_of_its_package(
    bare: None, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingExtra, match=rf"pip install 'headrace\[{extra}\]'"):
        importlib.import_module(module)


def test_writers_and_sources_name_the_extra_of_their_package(bare: None, tmp_path: Path) -> None:
    run = TrackedRun("run", tmp_path, {}, None)
    for kind in ("tensorboard", "wandb"):
        with pytest.raises(MissingExtra, match=kind):
            build_tracker(TrackerConfig.model_validate(kind)).start(run)
    with pytest.raises(MissingExtra, match="datasets"):
        prompt_sources._load_dataset(DataConfig(train="org/math"), "org/math", tmp_path / "absent", False)


def test_the_error_survives_a_process_boundary() -> None:
    error = MissingExtra("datasets", "data.train=org/math", "datasets")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
