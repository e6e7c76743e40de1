"""`python tools/measure/directory_cost.py` measures the directory's CPU time for each row, beside another checkout's.

    python tools/measure/directory_cost.py [--connections 1000] [--groups 256] [--repeats 5] [--against FOLDER] [--tcp]
    python tools/measure/directory_cost.py --rate [--processes 12] [--shards 2]

`--against` names the root folder of another checkout of Headrace. Its code is measured in turn with this one, by the
same script, so that other load on the machine meets both. Prints one JSON line for each checkout, with medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULE = "headrace.bench.hosts.directory_cost"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=256, help="groups of 8 rows in a run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="root folder of another checkout")
    parser.add_argument("--tcp", action="store_true", help="connect by TCP, as clients of other hosts do")
    parser.add_argument("--rate", action="store_true", help="also measure rows per second")
    parser.add_argument("--processes", type=int, default=2, help="client processes for --rate")
    parser.add_argument("--shards", type=int, default=1, help="directories for --rate, as dataplane.directory_shards")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        print(json.dumps(_measured(a)))
        return
    trees = {"this": ROOT} | ({"against": a.against.resolve()} if a.against else {})
    found: dict[str, list[Any]] = {name: [] for name in trees}
    for _ in range(a.repeats):
        for name, tree in trees.items():
            found[name].append(_in_tree(tree))
    medians = {}
    for name, runs in found.items():
        medians[name] = statistics.median(run["us_per_row"] for run in runs)
        operations = {op: statistics.median(run["by_operation"][op] for run in runs) for op in runs[0]["by_operation"]}
        rates = {"rows_per_s": round(statistics.median(run["rows_per_s"] for run in runs))} if a.rate else {}
        figures = {"us_per_row": round(medians[name], 1), "runs": [round(run["us_per_row"], 1) for run in runs]} | rates
        figures["by_operation"] = {op: round(used, 1) for op, used in operations.items()}
        print(json.dumps({"tree": name, "connections": a.connections, "groups": a.groups} | figures), flush=True)
    if a.against:
        print(json.dumps({"ratio": round(medians["this"] / medians["against"], 3)}))


def _in_tree(tree: Path) -> Any:
    """Run this script with the package of another checkout, and return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "headrace").symlink_to(tree)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--child"]
        return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def _measured(a: argparse.Namespace) -> dict[str, Any]:
    """Measure the package that this process imports."""
    module = _code()
    (run,) = module.measure_cost(module.CostOptions(a.connections, a.groups, 1, a.tcp))
    rate = {"rows_per_s": module.measure_rate(a.processes, shards=a.shards)} if a.rate else {}
    return dataclasses.asdict(run) | rate


def _code() -> Any:
    """Return this checkout's code for measuring, which uses the package that this process imports."""
    spec = importlib.util.spec_from_file_location(MODULE, ROOT / "bench/hosts/directory_cost.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__mp_main__":
    _code()  # This is a client's process for --rate, and the package of another checkout may lack the code.
if __name__ == "__main__":
    main()
