"""Which cluster a command is about: the one that the operator named, else the `tandem serve` that runs on this machine, else the Ray cluster
that this machine is part of. Between several, no command guesses."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.commands.running import ServingRecord, running
from tandem.cluster.on_ray.runtime import AUTO

RAY_ADDRESS = "RAY_ADDRESS"


class WhichCluster(msgspec.Struct, frozen=True):
    """Which deployment a command is about, as the operator named it."""

    address: str | None = None  # HOST:PORT of the Ray cluster's head
    name: str | None = None  # the deployment's name; None means the cluster's only deployment


def choose_address(which: WhichCluster, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the address of a Ray cluster's head, or AUTO. Raises ConfigurationError when several serve on this machine and the operator
    named none of them."""
    named = which.address or environ.get(RAY_ADDRESS)
    if named:
        return named
    here = running()
    meant = [record for record in here if record.name == which.name] or here
    addresses = {record.address for record in meant}
    if len(addresses) > 1:
        raise several(meant, [f"--address {record.address}" for record in meant])
    return addresses.pop() if addresses else AUTO


def url_of(address: str, name: str) -> str:
    """Returns the URL of this deployment's router; "" where no record has it."""
    found = [record.url for record in running() if (record.address, record.name) == (address, name)]
    return found[0] if len(found) == 1 else ""


def several(records: Sequence[ServingRecord], flags: Sequence[str]) -> ConfigurationError:
    lines = [f"  {flag}  ({described(record)})" for record, flag in zip(records, flags, strict=True)]
    return ConfigurationError(
        "\n".join([f"{len(records)} servers run on this machine: name the one that you mean", *lines])
    )


def described(record: ServingRecord) -> str:
    """Returns one line that tells a server from another one."""
    where = f"at {record.url}" if record.url else "still starting"
    return f"{record.name} {where}, {record.model}, process {record.pid}, since {record.since}"
