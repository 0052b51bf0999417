"""Engines besides Tandem's own. Each is a wing: a folder of this room that can be deleted, known by its row here.

Such a module is imported by commands and controllers, so its imports are light; what it computes with is imported by `make`, in the
node's process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.progress import Report
from tandem.base.wings import find_wings
from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.config import OWN_ENGINE, EngineConfig, ModelConfig
from tandem.engine.contract import NodeEngine
from tandem.kvtransfer.base import SchedulerConnector, WorkerConnector

ROWS = ("tandem.engine.vllm.wing",)


class Connect(NamedTuple):
    """The node's connector, and what becomes of a request whose load fails."""

    # For a cache of these groups, with lines to the ranks that keep it, as in `ConnectorContext`.
    halves: Callable[[Sequence[KVCacheGroup], Sequence[socket.socket]], tuple[SchedulerConnector, WorkerConnector]]
    fails: bool  # with its load; otherwise the engine computes what did not come


class EngineFound(msgspec.Struct, frozen=True, kw_only=True):
    """What a Python has of an engine."""

    name: str
    python: str
    version: str = ""  # of the engine; "": it is not there
    device: str = ""  # what its build computes on, as far as that shows
    wrong: list[str] = []  # why nodes cannot run there, each a sentence that says what to do


class EngineWing(Protocol):
    @property
    def NAME(self) -> str:
        """What `model.engine` calls it."""

    def refusals(self, engine: EngineConfig) -> Iterator[tuple[str, str]]:
        """Yields each setting that this engine lacks or takes otherwise, such as `cache.tiers`, and the end of a sentence about it."""

    def look(self, model: ModelConfig, env: Mapping[str, str]) -> EngineFound:
        """Asks the Python that `model.engine_python` names what it has, and whether that knows `model.engine_args`. `env`: variables of
        the nodes' processes besides this one's. Takes a few seconds at most."""

    def make(self, config: EngineConfig, model: ModelConfig, progress: Report, connect: Connect | None) -> NodeEngine:
        """Loads the model. `model` has the paths of this machine; `connect` is None on a node without peers. Raises ConfigurationError for
        what an operator can change."""


def other_engines() -> dict[str, EngineWing]:
    return {module.NAME: cast("EngineWing", module) for module in find_wings(ROWS)}


def other_engine(name: str) -> EngineWing | None:
    """The engine that `model.engine` names; None: Tandem's own. Raises ConfigurationError for a name that no engine here has."""
    if name == OWN_ENGINE:
        return None
    engines = other_engines()
    if name not in engines:
        raise ConfigurationError(f"model.engine must be one of {', '.join((OWN_ENGINE, *engines))}, not {name!r}")
    return engines[name]
