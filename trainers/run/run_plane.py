"""Opens the data plane of a run on the hosts of its actors."""

from __future__ import annotations

from dataclasses import dataclass

from ...dataplane.client.client import DataPlaneClient
from ...dataplane.config import DataPlaneConfig
from ...dataplane.errors import DataPlaneError
from ...dataplane.factory import DataPlane, open_data_plane
from ...dataplane.listen_address import Listening
from ..cluster.places.placement import Placement
from ..errors import UserError


@dataclass(frozen=True, slots=True)
class Plane:
    """A run's data plane, with the driver's client."""

    plane: DataPlane
    client: DataPlaneClient


def opened(
    dataplane: DataPlaneConfig, placement: Placement, run_id: str, listening: Listening, start_timeout_s: float
) -> DataPlane:
    """Open the run's data plane. Raises UserError if a host cannot provide the configured store."""
    try:
        return open_data_plane(
            dataplane,
            run_id=run_id,
            listening=listening,
            nodes=placement.row_nodes,
            directory_node=placement.directory_node,
            start_timeout_s=start_timeout_s,
        )
    except DataPlaneError:
        raise
    except ValueError as error:
        raise UserError(str(error)) from error
