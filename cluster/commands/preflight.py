"""Finds everything that would certainly fail, all of it at once and in well under a second, before anything is loaded."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from tandem.cluster.config import TandemConfig
from tandem.cluster.models.store import Model, check_name, find_model, weight_files
from tandem.cluster.pools.placement import LocalMachine, computes_on_cpu, place_nodes
from tandem.cluster.pools.room import check_memory
from tandem.cluster.settings import SettingsError
from tandem.kvtransfer.registry import CONNECTORS, find_connector
from tandem.router.config import RouterConfig
from tandem.router.http.certificate import check_before_use
from tandem.wire.errors import ConfigurationError


def check_before_start(config: TandemConfig, machine: LocalMachine) -> None:
    """Raises SettingsError with every reason why serving on this machine would fail."""
    _raise_all(
        lambda: check_address(config.router.host, config.router.port),
        lambda: _check_certificate(config.router),
        lambda: check_model_here(config.model.path, config.model.revision),
        lambda: place_nodes(config, machine),
        lambda: check_machine_memory(config, machine),
        lambda: _check_connector(config),
    )


def check_before_attach(config: TandemConfig) -> None:
    """Raises SettingsError with every reason why serving on a Ray cluster would fail, as far as that shows without its machines."""
    _raise_all(lambda: check_name(config.model.path, config.model.revision), lambda: _check_connector(config))


def _raise_all(*checks: Callable[[], object]) -> None:
    reasons: list[str] = []
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            reasons.append(str(error))
    if reasons:
        raise SettingsError(reasons)


def check_model_here(name: str, revision: str = "") -> Model | None:
    """Returns the model if it is on this machine; None if it must be fetched."""
    check_name(name, revision)
    found = find_model(name)
    if found is not None and not weight_files(found.path):
        raise ConfigurationError(
            f"model.path {name!r} has no weights: there is no .safetensors file in that folder"
        )
    return found


def check_machine_memory(config: TandemConfig, machine: LocalMachine) -> None:
    on_cpu = computes_on_cpu(config, machine)
    check_memory(config, machine.free_memory, _weights_bytes(config.model.path), on_cpu=on_cpu)


def _weights_bytes(name: str) -> int:
    """Returns 0 if the model is not on this machine; other checks report a wrong name."""
    try:
        found = find_model(name)
        return sum(file.stat().st_size for file in weight_files(found.path)) if found is not None else 0
    except (ConfigurationError, OSError):
        return 0


def _check_connector(config: TandemConfig) -> None:
    name = config.transfer.connector
    if (
        config.pools.prefill.first_size and name not in CONNECTORS
    ):  # Tandem's own connectors need no check, and importing one takes a while
        find_connector(name)


def _check_certificate(router: RouterConfig) -> None:
    if router.tls_certificate is not None and router.tls_key is not None:
        check_before_use(router.tls_certificate, router.tls_key)


def check_address(host: str, port: int) -> None:
    """Binds to the address as the router will, then releases it. Raises ConfigurationError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigurationError(
            f"router.host {host!r} is not an address: use one of this machine's"
        ) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigurationError(_why_not(error, host, port)) from None


def _why_not(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is taken: end what listens there, or choose another port (--port, router.port)"
        case errno.EACCES:
            return f"port {port} needs privileges that this user lacks: choose one above 1023 (--port, router.port)"
        case errno.EADDRNOTAVAIL:
            return f"router.host {host!r} is not an address of this machine: name one that is, or 127.0.0.1"
        case _:
            return f"cannot listen on {host}:{port}: {error.strerror}"
