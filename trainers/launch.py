"""A run from start to end: folder, base model, Ray, data plane, actors, controller, and all of it undone in reverse."""

from __future__ import annotations

import json
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from ..actors.protocols import ROLLOUT_SCHEMA, ActorInfo
from ..dataplane.factory import DataPlane, connect, open_data_plane
from . import grpo, setups
from .advantages.factory import build_advantages
from .base_model import prepare_model
from .checkpoints import Checkpoints
from .cluster import MIN_OBJECT_STORE_MIB, Cluster
from .config import Config
from .controllers.factory import controller
from .crew import Crew, demand, start_crew
from .data_plane_watch import DataPlaneWatch
from .errors import UserError
from .peers import DriverMeter
from .progress import Progress
from .prometheus import PrometheusEndpoint
from .report import write_report
from .run_folder import RunFolder
from .trace import Tracer
from .weight_sync import WeightSync


def run_training(config: Config, *, resume: bool) -> None:
    """Train as `config` says, into `config.run.dir`; with `resume` go on from the run's newest checkpoint there.

    Raises UserError for what the user can mend, PeerFailed and DataPlaneError for a process that died, failed or hung.
    Whatever happens, the processes, shared memory and ports of the run are gone when it returns.
    """
    try:
        setups.backend_config(config, config.model.path)
    except ValueError as error:
        raise UserError(str(error)) from error
    with RunFolder(config, resume=resume) as folder, PrometheusEndpoint(config, folder.path) as endpoint:
        steps = config.algorithm.steps
        with Progress(config.run.name, steps, enabled=config.logging.progress) as progress:
            checkpoints = Checkpoints(folder.checkpoints_dir)
            state = checkpoints.latest_state() if resume else grpo.State()
            model = prepare_model(config, folder, progress)
            tracer = Tracer(config.traced_step)
            if endpoint.address:
                progress.message(f"metrics for Prometheus: {endpoint.address}")
            progress.phase("starting Ray, data plane and actors")
            with launched(config, model, tracer, folder.path, first_prompt=state.position) as run:
                endpoint.run.watch(run.watch)
                if state.step:
                    checkpoints.load(run, state)
                    grpo.sync_weights(run, state)
                    folder.resumed(state.step)

                def after_step(state: grpo.State, metrics: dict[str, float]) -> None:
                    folder.metrics.log(state.step, metrics)
                    endpoint.run.publish(state.step, metrics)
                    progress.update(state.step, metrics)
                    every = config.run.checkpoint_every
                    if every and state.step and state.step % every == 0:
                        checkpoints.save(run, state)

                controller(config)(run, state, after_step)
                progress.phase("saving the model")
                checkpoints.finish(run)
                draft = folder.path / "model.new"
                shutil.rmtree(draft, ignore_errors=True)
                grpo.export_model(run, str(draft))
                shutil.rmtree(folder.path / "model", ignore_errors=True)  # of the run that this one resumed
                draft.rename(folder.path / "model")
            tracer.write(folder.trace_path)
            folder.metrics.finish(state.step)
            write_report(folder.path)
            progress.message(f"report: {folder.report_path}")


@contextmanager
def launched(config: Config, model: str, tracer: Tracer, folder: Path, *, first_prompt: int = 0) -> Iterator[grpo.Run]:
    """Ray, data plane and actors, ready to train from prompt `first_prompt` of the stream on; all of it gone on
    leaving, however that happens."""
    run_id = uuid.uuid4().hex[:8]
    with ExitStack() as stack:
        stack.callback(remove_shared_memory, run_id)
        cluster = Cluster(
            address=config.resources.ray_address,
            num_cpus=config.resources.num_cpus,
            demand=demand(config),
            namespace=f"headrace-{run_id}",
            object_store_mib=object_store_mib(config),
        )
        stack.callback(cluster.close)
        plane = stack.enter_context(open_data_plane(config.dataplane, run_id=run_id, one_host=cluster.num_nodes == 1))
        client = connect(plane.handle, name="driver")
        stack.callback(client.close)
        meter = DriverMeter()
        crew = start_crew(config, model, plane, cluster, meter, stack)
        write_actors(folder, plane, crew)
        task = setups.task(config, first_prompt)
        client.register(grpo.PARTITION, ROLLOUT_SCHEMA, [task], group_size=config.algorithm.group_size)
        meter.take()
        yield grpo.Run(
            config=config,
            client=client,
            rollouts=crew.rollouts,
            workers=crew.workers,
            engines=crew.engines,
            weights=WeightSync(
                config.sync,
                crew.workers,
                crew.engines,
                lasting=setups.is_lasting(config, one_host=cluster.num_nodes == 1, gpus=cluster.num_gpus > 0),
                direct=config.sync.staging == "none" or (config.sync.staging == "auto" and cluster.num_gpus > 0),
            ),
            meter=meter,
            tracer=tracer,
            estimate=build_advantages(setups.advantage_config(config)),
            sampling=setups.sampling(config),
            greedy=setups.greedy(config),
            budget=setups.budget(config),
            watch=DataPlaneWatch(client),
        )


def remove_shared_memory(run_id: str) -> None:
    """What a killed process of the run left behind; the others have removed their own."""
    for folder in Path("/dev/shm").glob(f"headrace-{run_id}*"):
        shutil.rmtree(folder, ignore_errors=True)


def write_actors(folder: Path, plane: DataPlane, crew: Crew) -> None:
    """actors.json: the run's id (part of its folders' names in /dev/shm) and who runs where, for post-mortems."""
    host = socket.gethostname()
    infos = [ActorInfo(name, pid, host) for name, pid in plane.processes().items()]
    infos += [peer.info for peer in crew.peers]
    content = {"run_id": plane.handle.run_id, "actors": [asdict(info) for info in infos]}
    (folder / "actors.json").write_text(json.dumps(content, indent=1))


def object_store_mib(config: Config) -> int:
    """Ray's object store: the data plane's capacity when that lives in it, else just enough for Ray."""
    if config.dataplane.store.kind == "ray":
        return config.dataplane.store.capacity_mib + MIN_OBJECT_STORE_MIB
    return MIN_OBJECT_STORE_MIB
