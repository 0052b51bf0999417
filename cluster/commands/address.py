"""Which Ray cluster a command talks to."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tandem.cluster.commands.address_record import remembered_address
from tandem.cluster.on_ray.runtime import AUTO


def choose_address(named: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """What the operator says, else the `tandem serve` of this machine, else the cluster that this machine is part of."""
    return named or environ.get("RAY_ADDRESS") or remembered_address() or AUTO
