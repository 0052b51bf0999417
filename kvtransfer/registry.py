"""Finds connectors by name. It imports a connector's module only when asked for it, because the package that the module
needs may not be installed."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import (
    ConnectorContext,
    ConnectorFactory,
    KVCacheMemory,
    SchedulerConnector,
    WorkerConnector,
)

CONNECTORS = {"nccl": "tandem.kvtransfer.nccl:create", "nixl": "tandem.kvtransfer.nixl:create"}
# What makes `cache.tiers`, and a rank's part of them.
TIERS = {
    "tiers": "tandem.kvtransfer.offload.worker_half:create_tiers",
    "tiers of ranks": "tandem.kvtransfer.offload.ranks:tiers_of",
    "tiers of a rank": "tandem.kvtransfer.offload.ranks:RankTiers",
}


def find_connector(name: str) -> ConnectorFactory:
    """Returns the factory of a registered connector, or of "package.module:factory". Raises ConfigurationError."""
    found: ConnectorFactory = find_factory("transfer.connector", "connector", name, CONNECTORS)
    return found


# Makes one connector for each of `cache.tiers`, the nearest first. Raises ConfigurationError.
CreateTiers = Callable[[ConnectorContext], list[tuple[SchedulerConnector, WorkerConnector]]]


def find_tiers() -> CreateTiers:
    found: CreateTiers = find_factory("cache.tiers", "factory", "tiers", TIERS)
    return found


class RankThread(Protocol):
    """A thread that moves the KV of one of a node's ranks, as rank 0 says."""

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...


# The function is called from the thread when a bug ends it.
MakeRankThread = Callable[[socket.socket, KVCacheMemory, Callable[[], None]], RankThread]


def find_tiers_of_rank() -> MakeRankThread:
    found: MakeRankThread = find_factory("cache.tiers", "factory", "tiers of a rank", TIERS)
    return found


def find_factory(setting: str, what: str, name: str, known: Mapping[str, str]) -> Any:
    """Returns the factory of the `what` (a connector, a tier) that the setting `setting` names. Raises
    ConfigurationError when there is none."""
    path = known.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(
            f"{setting}: there is no {what} {name!r}; there are {', '.join(sorted(known))}, "
            'and any other by "package.module:factory"'
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"{setting}: {module_name!r} of {what} {name!r} cannot be imported: {error}"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigurationError(f"{setting}: {module_name!r} has no factory {attribute!r}")
    return factory
