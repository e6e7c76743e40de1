"""Starts a pool of two GPUs and trains the runs a.yaml and b.yaml on it at the same time: `make pool`.

    python examples/time-sharing/both.py FOLDER [key.sub=value ...]

The overrides are for both runs. FOLDER then has the runs' folders `a` and `b`, and the pool's trace and report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
HEADRACE = [sys.executable, "-m", "headrace.cli"]
START_S = 120.0


def main(folder: Path, overrides: list[str]) -> int:
    os.environ["RAY_AUTH_MODE"] = "token"  # for the pool's Ray cluster, and for the runs that join it
    pool = subprocess.Popen([*HEADRACE, "pool", "start", "--gpus", "2", "--cpus", "16", "--dir", str(folder)])
    runs = []
    try:
        where = folder / "server.json"
        deadline = time.monotonic() + START_S
        while not where.exists():
            if pool.poll() is not None or time.monotonic() > deadline:
                print("the pool did not start", file=sys.stderr)
                return 1
            time.sleep(0.2)
        address = json.loads(where.read_text())["address"]
        for name in ("a", "b"):
            own = [f"pool.address={address}", f"run.dir={folder / name}", *overrides]
            print(f"run {name}: its output is in {folder / name}.log", flush=True)
            with open(f"{folder / name}.log", "w") as log:
                command = [*HEADRACE, "train", str(HERE / f"{name}.yaml"), *own]
                runs.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        code = follow(runs, folder)
        subprocess.run([*HEADRACE, "pool", "stop", "--dir", str(folder)], check=True)
        subprocess.run([*HEADRACE, "pool", "report", "--dir", str(folder)], check=True)
        return code
    finally:
        for process in (*runs, pool):
            process.terminate()
        for process in (*runs, pool):
            process.wait(timeout=60)


def follow(runs: list[subprocess.Popen[bytes]], folder: Path) -> int:
    """Print what the pool does until both runs have ended. Returns 0 if both succeeded."""
    while any(run.poll() is None for run in runs):
        time.sleep(30)
        if any(run.poll() is None for run in runs):
            subprocess.run([*HEADRACE, "pool", "status", "--dir", str(folder)], check=False)
    return max(abs(run.returncode) for run in runs)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
