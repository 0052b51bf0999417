"""Connectors by name. A connector's module is imported when it is asked for, and not before: what it needs may
not be installed."""

from __future__ import annotations

import importlib

from tandem.kvtransfer.base import ConnectorContext, ConnectorFactory, SchedulerConnector, WorkerConnector
from tandem.wire.errors import ConfigurationError

CONNECTORS = {
    "nccl": "tandem.kvtransfer.nccl:create",
    "nixl": "tandem.kvtransfer.nixl:create",
}


def find_connector(name: str) -> ConnectorFactory:
    """`name` is a registered one, or "package.module:factory" for a connector that lives elsewhere."""
    path = CONNECTORS.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(
            f"transfer.connector: there is no connector {name!r}; there are {', '.join(sorted(CONNECTORS))}, "
            'and any other by "package.module:factory"'
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"transfer.connector: {module_name!r} of connector {name!r} cannot be imported: {error}"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigurationError(f"transfer.connector: {module_name!r} has no factory {attribute!r}")
    found: ConnectorFactory = factory
    return found


def create_connector(context: ConnectorContext) -> tuple[SchedulerConnector, WorkerConnector]:
    return find_connector(context.config.connector)(context)
