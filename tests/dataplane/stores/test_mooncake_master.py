"""The master of the store `mooncake` starts from any working folder. Its program is a fake here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.dataplane.errors import StoreLost
from headrace.dataplane.stores import mooncake_processes
from headrace.dataplane.stores.mooncake_processes import MooncakeMaster

pytestmark = pytest.mark.processes


def test_the_master_starts_below_a_folder_that_looks_like_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `/` and `/usr` do on Debian. Python would also run the modules that it finds there."""
    library = tmp_path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library.mkdir(parents=True)
    (library / "os.py").touch()
    (library / "ctypes.py").write_text("raise SystemExit('the wrong library')")
    program = tmp_path / "master"
    program.write_text("#!/bin/sh\necho the program runs\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(mooncake_processes, "_binary", lambda: program)
    monkeypatch.setattr(mooncake_processes, "PORT_ATTEMPTS", 1)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(StoreLost, match="mooncake master ended with code 3: the program runs"):
        MooncakeMaster("run", "127.0.0.1")
