"""Which router a command asks: the one that the operator named, else that of the `tandem serve` that runs on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.cluster.commands.address import RAY_ADDRESS, WhichCluster, several
from tandem.cluster.commands.operate import with_controller
from tandem.cluster.commands.running import running
from tandem.cluster.on_ray.runtime import AUTO
from tandem.cluster.orders import ViewOrder

DEFAULT_URL = "http://127.0.0.1:8000"
_CONNECT_S = 1.0


def choose_url(named: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the URL of a router. Joins a Ray cluster to ask for it only where no record has it. Raises ConfigurationError when several
    serve on this machine, Unavailable when none does."""
    if named is not None:
        return named
    address = environ.get(RAY_ADDRESS)
    here = [record for record in running() if address in (None, "", AUTO, record.address)]
    if len(here) > 1:
        raise several(here, [f"--url {record.url}" if record.url else "no URL yet" for record in here])
    if here:
        if not here[0].url:
            raise Unavailable(
                f"the `tandem serve` of process {here[0].pid} is still starting: its router does not answer yet"
            )
        return here[0].url
    if not address and _listens(DEFAULT_URL):
        return DEFAULT_URL
    return _url_on_ray()


def _url_on_ray() -> str:
    """Returns the URL of a router of the deployment on the Ray cluster that the environment names, or that this machine is part of."""
    try:
        view = with_controller(WhichCluster(), lambda cluster: cluster.ask(ViewOrder()))
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; or a router with --url") from error
    except Unavailable as error:
        raise Unavailable(f"{error}; or name a router with --url") from error
    for router in view.routers:
        if router.phase == "ready":
            return router.url
    raise Unavailable("no router of this cluster is ready: `tandem status` shows why")


def _listens(url: str) -> bool:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True
