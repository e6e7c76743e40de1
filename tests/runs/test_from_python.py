"""The documentation's snippet that trains from Python runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.processes
@pytest.mark.timeout(280)
def test_the_start_pages_run_from_python(tmp_path: Path) -> None:
    blocks = (ROOT / "docs" / "start" / "first-run.md").read_text(encoding="utf-8").split("```python\n")[1:]
    [snippet] = [block.split("```")[0] for block in blocks if "run_training" in block]
    (tmp_path / "train.py").write_text(snippet)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=260)
    assert done.returncode == 0, done.stdout + done.stderr
    report = Path(done.stdout.splitlines()[-1])
    assert report == tmp_path / "runs" / "first" / "report.html" and report.exists()
