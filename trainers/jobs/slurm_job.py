"""Writes the batch file with which Slurm runs a training on several nodes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from .start_again import RESUME

MARK = "# Written by `headrace launch slurm`"
"""Beginning of the second line of a batch file, by which the command knows its own files."""
GRACE_S = 120
"""Seconds before the time limit at which Slurm tells the job to stop, so that the run can write its checkpoint."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A training as a job of Slurm."""

    name: str
    """Name of the job."""
    train: Sequence[str]
    """Words of the command that trains, without `resources.ray_address` and `--resume`, which the job adds."""
    run_dir: str
    """Absolute path of the run folder, which all nodes see."""
    folder: str
    """Absolute path of the working folder, which all nodes see."""
    nodes: int
    """Number of nodes."""
    gpus: int
    """Number of GPUs of each node that the job uses. 0 for a run on CPUs."""
    cpus: int | None
    """Number of CPUs of each node that the job uses. None for whole nodes."""
    start_timeout_s: float
    """Seconds within which every node must have joined the job's Ray."""
    programs: str
    """Folder of `python`, `ray` and `headrace` on every node; "" if they are on the PATH, as in a container."""
    container: str | None = None
    """Image in which the commands run, by the plugin Pyxis. None to run them on the nodes themselves."""
    options: Sequence[str] = ()
    """Further options of sbatch, such as `--partition=gpu`."""

    def script(self) -> str:
        """Return the text of the batch file."""
        head = f"#!/bin/bash\n{MARK}. Start it with: sbatch FILE\n{self._options()}{self._variables()}"
        return f"{head}{_RAY}{RESUME}{_DRIVER}"

    def _options(self) -> str:
        lines = [
            f"--job-name={self.name}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *(["--exclusive"] if self.cpus is None else [f"--cpus-per-task={self.cpus}"]),
            f"--chdir={self.folder}",
            "--output=%x-%j.out",
            "--open-mode=append",
            "--requeue",
            f"--signal=B:USR1@{GRACE_S}",
            *self.options,
        ]
        return "".join(f"#SBATCH {shlex.quote(line)}\n" for line in lines)

    def _variables(self) -> str:
        step = ["srun", "--cpu-bind=none"]
        if self.container is not None:
            mounts = dict.fromkeys([self.folder, self.run_dir])
            step += [
                f"--container-image={self.container}",
                f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
                f"--container-workdir={self.folder}",
            ]
        all_nodes = ["--kill-on-bad-exit=0", *([f"--gpus-per-node={self.gpus}"] if self.gpus else [])]
        path = f'export PATH={shlex.quote(self.programs)}:"$PATH"\n' if self.programs else ""
        return (
            f"\nRUN_DIR={shlex.quote(self.run_dir)}\n"
            f"TRAIN=({shlex.join(self.train)})\n"
            f"STEP=({shlex.join(step)})           # runs a command on nodes of this job\n"
            f"ALL_NODES=({shlex.join(all_nodes)})\n"
            f"export NUM_GPUS={self.gpus} START_TIMEOUT_S={self.start_timeout_s:g}\n{path}"
        )


_RAY = r"""
# The files of this start. The job's Ray refuses calls without the token, which only the user can read.
export JOB=$RUN_DIR/slurm-$SLURM_JOB_ID
mkdir -p "$JOB" && rm -f "$JOB/token" || exit 1
(umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$JOB/token") || exit 1
trap 'rm -f "$JOB/token"' EXIT
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$JOB/token
# Ray would wait 30 s at its end for requests of Ray Serve, which this job has none of.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

# Two jobs that share a node have ports and folders of their own.
export PORT=$((10000 + SLURM_JOB_ID % 10000 * 2)) TEMP=/tmp/ray-$SLURM_JOB_ID

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NUM_NODES=${#NODES[@]}
ON_FIRST=(--overlap --nodes=1 --ntasks=1 --nodelist="${NODES[0]}")

# The address from which the first node reaches the last one is its address for the others.
HEAD=$("${STEP[@]}" "${ON_FIRST[@]}" python -c '
import socket, sys
family, kind, _, _, address = socket.getaddrinfo(sys.argv[1], 9, type=socket.SOCK_DGRAM)[0]
with socket.socket(family, kind) as probe:
    probe.connect(address)
    print(probe.getsockname()[0])' "${NODES[-1]}") || exit 1
case $HEAD in *:*) ADDRESS=[$HEAD]:$PORT ;; *) ADDRESS=$HEAD:$PORT ;; esac  # IPv6 has brackets
export HEAD ADDRESS

# One Ray on each node. Its output is in the files ray-*.log; the last lines are shown here if it ends by itself.
"${STEP[@]}" "${ALL_NODES[@]}" --nodes="$NUM_NODES" --ntasks="$NUM_NODES" --ntasks-per-node=1 bash -c '
  ulimit -n "$(ulimit -Hn)"
  trap "STOPPED=1" TERM
  LOG=$JOB/ray-$SLURM_PROCID.log
  COMMON=(--block --disable-usage-stats --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus="$NUM_GPUS"
          --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0)  # 0 is any free port
  if [ "$SLURM_PROCID" = 0 ]; then
    ray start --head --port="$PORT" --ray-client-server-port="$((PORT + 1))" --node-ip-address="$HEAD" \
      --temp-dir="$TEMP" --include-dashboard=false "${COMMON[@]}" > "$LOG" 2>&1
  else
    ray start --address="$ADDRESS" "${COMMON[@]}" > "$LOG" 2>&1
  fi
  CODE=$?
  if [ "$STOPPED" ]; then rm -rf "$TEMP" 2> /dev/null; exit; fi
  echo "$(hostname): Ray ended with code $CODE:" && tail -n 20 "$LOG" | sed "s/^/$(hostname): /"' &
RAY=$!
# The Ray of this job ends with its step; that of another job on the same node goes on. Slurm kills what is left.
end_ray() {
  rm -f "$JOB/token"
  kill -TERM "$RAY" 2> /dev/null
  for _ in {1..30}; do kill -0 "$RAY" 2> /dev/null && sleep 1; done
}
trap end_ray EXIT
"""
_DRIVER = r"""
"${STEP[@]}" "${ON_FIRST[@]}" bash -c '
  python -m headrace.trainers.jobs.joined_nodes "$ADDRESS" "$NUM_NODES" "$START_TIMEOUT_S" && exec "$@"
' - "${TRAIN[@]}" resources.ray_address="$ADDRESS" ${RESUME:+"$RESUME"} &
DRIVER=$!

# USR1 comes before the time limit: the run writes a checkpoint, and the job goes back to the queue. TERM comes from
# scancel. Slurm itself puts the job back after a preemption or the loss of a node.
STOPPED='' AGAIN=''
trap 'STOPPED=1 AGAIN=1; kill -TERM "$DRIVER"' USR1
trap 'STOPPED=1 AGAIN=""; kill -TERM "$DRIVER"' TERM INT
while wait "$DRIVER"; CODE=$?; [ "$STOPPED" ]; do STOPPED=''; done  # A signal ends `wait` early.
if [ "$AGAIN" ] && { [ "$CODE" = 143 ] || [ "$CODE" = 130 ]; }; then
  echo "the time limit is near: the job goes back to the queue and continues from its last checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
"""
"""The parts of a batch file that are the same in every job, before and after RESUME."""
