"""Finds connectors by name. It imports a connector's module only when asked for it, because the package that the module
needs may not be installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import ConnectorFactory

CONNECTORS = {
    "nccl": "tandem.kvtransfer.nccl:create",
    "nixl": "tandem.kvtransfer.nixl:create",
}


def find_connector(name: str) -> ConnectorFactory:
    """Returns the factory of a registered connector, or of "package.module:factory". Raises ConfigurationError."""
    found: ConnectorFactory = find_factory("transfer.connector", "connector", name, CONNECTORS)
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
