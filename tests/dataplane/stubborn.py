"""A sampler that is no use, in a module of its own, as the configuration of a data plane names it by import path."""

from __future__ import annotations

import numpy as np

from headrace.dataplane.directory.samplers import Candidates, ClaimRequest

STUBBORN = f"{__name__}:Stubborn"


class Stubborn:
    """Asks for rows that it was not offered."""

    order = "version"
    looks_ahead = 0
    arguments = ()

    def select(self, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
        return np.arange(request.most) + len(candidates)
