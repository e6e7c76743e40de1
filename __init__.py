"""Headrace trains language models with reinforcement learning, built around its data plane.

The names in `__all__` are the public interface. A name is imported from its module at its first use, so that `import
headrace` itself loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import rewards as rewards
    from .actors.engines.protocol import Completion, GenerationEngine, SamplingParams
    from .actors.failures import JudgeFailed, LimitExceeded, SandboxFailed
    from .actors.train.microbatch_plan import Budget, ShardPlan, plan_shards
    from .actors.train.topology import Topology
    from .actors.train_backend import MicroBatch, TrainBackend
    from .codecs.batch import Batch, Jagged
    from .codecs.blobs import Blob, BlobRows, blob_field
    from .codecs.schema import Field, Kind, Schema
    from .dataplane.client.async_client import AsyncDataPlaneClient
    from .dataplane.client.client import DataPlaneClient
    from .dataplane.config import DataPlaneConfig, StoreConfig
    from .dataplane.directory.samplers import TaskConfig
    from .dataplane.errors import (
        AlreadyWritten,
        BlobsMissing,
        CapacityExceeded,
        ClaimTimeout,
        DataPlaneError,
        DataPlaneTimeout,
        DirectoryLost,
        DuplicateKeys,
        FieldsNotReady,
        ForeignReceipt,
        IntegrityError,
        InvalidArgument,
        KeysNotFound,
        LeaseLost,
        PeerLost,
        RowsCleared,
        SamplerError,
        SchemaMismatch,
        StoreLost,
    )
    from .dataplane.factory import DataPlane, connect, connect_async, open_data_plane, open_storage_unit
    from .dataplane.handle import DataPlaneHandle
    from .dataplane.meta import KVBatchMeta
    from .dataplane.status import LeaseStatus, PartitionRows, TaskReset, TaskStatus
    from .dataplane.streaming import StreamingDataset
    from .trainers.config.config import Config
    from .trainers.config.load import load_config
    from .trainers.errors import ConfigError, UserError
    from .trainers.losses.terms import LossInputs
    from .trainers.parts import WeightSync, make_backend, make_engine, make_tiny_model
    from .trainers.python.grpo import GRPO, Callback, TrainResult
    from .trainers.run.launch import RunEvent, run_training

__all__ = [
    "AlreadyWritten",
    "AsyncDataPlaneClient",
    "Batch",
    "Blob",
    "BlobRows",
    "BlobsMissing",
    "Budget",
    "Callback",
    "CapacityExceeded",
    "ClaimTimeout",
    "Completion",
    "Config",
    "ConfigError",
    "DataPlane",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "DataPlaneHandle",
    "DataPlaneTimeout",
    "DirectoryLost",
    "DuplicateKeys",
    "Field",
    "FieldsNotReady",
    "ForeignReceipt",
    "GRPO",
    "GenerationEngine",
    "IntegrityError",
    "InvalidArgument",
    "Jagged",
    "JudgeFailed",
    "KVBatchMeta",
    "KeysNotFound",
    "Kind",
    "LeaseLost",
    "LeaseStatus",
    "LimitExceeded",
    "LossInputs",
    "MicroBatch",
    "PartitionRows",
    "PeerLost",
    "RowsCleared",
    "RunEvent",
    "SamplerError",
    "SamplingParams",
    "SandboxFailed",
    "Schema",
    "SchemaMismatch",
    "ShardPlan",
    "StoreConfig",
    "StoreLost",
    "StreamingDataset",
    "TaskConfig",
    "TaskReset",
    "TaskStatus",
    "Topology",
    "TrainBackend",
    "TrainResult",
    "UserError",
    "WeightSync",
    "blob_field",
    "connect",
    "connect_async",
    "load_config",
    "make_backend",
    "make_engine",
    "make_tiny_model",
    "open_data_plane",
    "open_storage_unit",
    "plan_shards",
    "rewards",
    "run_training",
]

_MODULES = {
    "actors.engines.protocol": "Completion GenerationEngine SamplingParams",
    "actors.failures": "JudgeFailed LimitExceeded SandboxFailed",
    "actors.train_backend": "MicroBatch TrainBackend",
    "actors.train.microbatch_plan": "Budget ShardPlan plan_shards",
    "actors.train.topology": "Topology",
    "codecs.batch": "Batch Jagged",
    "codecs.blobs": "Blob BlobRows blob_field",
    "codecs.schema": "Field Kind Schema",
    "dataplane.client.async_client": "AsyncDataPlaneClient",
    "dataplane.client.client": "DataPlaneClient",
    "dataplane.config": "DataPlaneConfig StoreConfig",
    "dataplane.directory.samplers": "TaskConfig",
    "dataplane.factory": "DataPlane connect connect_async open_data_plane open_storage_unit",
    "dataplane.handle": "DataPlaneHandle",
    "dataplane.meta": "KVBatchMeta",
    "dataplane.status": "LeaseStatus PartitionRows TaskReset TaskStatus",
    "dataplane.streaming": "StreamingDataset",
    "trainers.config.config": "Config",
    "trainers.config.load": "load_config",
    "trainers.errors": "ConfigError UserError",
    "trainers.losses.terms": "LossInputs",
    "trainers.parts": "WeightSync make_backend make_engine make_tiny_model",
    "trainers.python.grpo": "GRPO Callback TrainResult",
    "trainers.run.launch": "RunEvent run_training",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used. Names without an entry in `_MODULES` are error
    classes of `dataplane.errors`. Raises AttributeError for a name that is not public."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "rewards":
        return importlib.import_module(".rewards", __name__)
    module = importlib.import_module(f".{_MODULE_OF.get(name, 'dataplane.errors')}", __name__)
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
