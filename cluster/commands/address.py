"""Which cluster a command is about, and which router: the one that the operator named, else the `tandem serve` that runs on this machine,
else the Ray cluster that this machine is part of. Between several, no command guesses."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import msgspec

from tandem.cluster.commands.running import ServingRecord, running
from tandem.cluster.on_ray.runtime import AUTO
from tandem.wire.errors import ConfigurationError, Unavailable

DEFAULT_URL = "http://127.0.0.1:8000"
_RAY_ADDRESS = "RAY_ADDRESS"
_CONNECT_S = 1.0


class WhichCluster(msgspec.Struct, frozen=True):
    """Which deployment a command is about, as the operator named it."""

    address: str | None = None  # HOST:PORT of the Ray cluster's head
    name: str | None = None  # the deployment's name; None means the cluster's only deployment


def choose_address(which: WhichCluster, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the address of a Ray cluster's head, or AUTO. Raises ConfigurationError when several serve on this machine and the operator
    named none of them."""
    named = which.address or environ.get(_RAY_ADDRESS)
    if named:
        return named
    here = running()
    meant = [record for record in here if record.name == which.name] or here
    addresses = {record.address for record in meant}
    if len(addresses) > 1:
        raise _several(meant, [f"--address {record.address}" for record in meant])
    return addresses.pop() if addresses else AUTO


def url_of(address: str, name: str) -> str:
    """Returns the URL of this deployment's router; "" where no record has it."""
    found = [record.url for record in running() if (record.address, record.name) == (address, name)]
    return found[0] if len(found) == 1 else ""


def choose_url(named: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the URL of a router. Joins a Ray cluster to ask for it only where no record has it. Raises ConfigurationError when several
    serve on this machine, Unavailable when none does."""
    if named is not None:
        return named
    address = environ.get(_RAY_ADDRESS)
    here = [record for record in running() if address in (None, "", AUTO, record.address)]
    if len(here) > 1:
        raise _several(here, [f"--url {record.url}" if record.url else "starting" for record in here])
    if here:
        if not here[0].url:
            raise Unavailable(
                f"the `tandem serve` of process {here[0].pid} is still starting: its router does not answer yet"
            )
        return here[0].url
    if not address and _listens(DEFAULT_URL):
        return DEFAULT_URL
    return _url_on_ray(environ)


def _url_on_ray(environ: Mapping[str, str]) -> str:
    """Returns the URL of a router of the deployment on the Ray cluster that the environment names, or that this machine is part of."""
    from tandem.cluster.commands.operate import with_controller

    try:
        view = with_controller(WhichCluster(environ.get(_RAY_ADDRESS)), lambda cluster: cluster.view())
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; or a router with --url") from error
    except Unavailable as error:
        raise Unavailable(f"{error}; or name a router with --url") from error
    for router in view.routers:
        if router.phase == "ready":
            return router.url
    raise Unavailable("no router of this cluster is ready: `tandem status` shows why")


def _several(records: Sequence[ServingRecord], flags: Sequence[str]) -> ConfigurationError:
    lines = [f"  {flag}  ({described(record)})" for record, flag in zip(records, flags, strict=True)]
    return ConfigurationError(
        "\n".join([f"{len(records)} servers run on this machine: name the one that you mean", *lines])
    )


def described(record: ServingRecord) -> str:
    """Returns one line that tells a server from another one."""
    where = record.url or "not ready yet"
    return f"{record.name} at {where}, {record.model}, process {record.pid}, since {record.since}"


def _listens(url: str) -> bool:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True
