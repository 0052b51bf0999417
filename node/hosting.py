"""A node as the process that holds it sees it: started once, asked from many threads, msgspec bytes in and out.

Whatever runs the process (a Ray actor, a test) calls these methods and adds nothing.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from tandem.engine.model.runner import ModelRunner
from tandem.node.config import NodeConfig
from tandem.node.node import Progress
from tandem.wire.errors import InternalError, TandemError, Unavailable
from tandem.wire.logs import LogPosition, begin_logging, recent_page
from tandem.wire.nodes import NodeInfo
from tandem.wire.progress import Report, SaidProgress
from tandem.wire.requests import NodeStatus
from tandem.wire.sockets import admit, public_key, raise_descriptor_limit

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode

_REST_S = 1.0  # for the step thread to say that nothing is left
_SWITCH_S = (
    0.001  # a handover passes through several threads: each waits so long for one that computes in Python
)


class HostedNode(Protocol):
    """What a process holds: a node with an engine (node.node.Node), or one that encodes images."""

    @property
    def config(self) -> NodeConfig: ...
    def start(
        self,
        progress: Progress | None = None,
        runner: ModelRunner | None = None,
        *,
        model_folder: str | None = None,
        adapters: Mapping[str, str] | None = None,
        draft_folder: str | None = None,
        keepers: Sequence[str] = (),
    ) -> NodeInfo: ...
    def status(self) -> NodeStatus: ...
    def routers_heard(self) -> list[str]: ...
    def drain(self, timeout_s: float) -> bool: ...
    def reset_cache(self, timeout_s: float) -> bool: ...
    def set_adapters(
        self, folders: Mapping[str, str], kept: Collection[str], timeout_s: float
    ) -> dict[str, str]: ...
    def release(self) -> ModelRunner: ...
    def stop(self) -> None: ...


FindModel = Callable[[str, Report], str]
"""From a model's name to a folder on this machine; says what it is doing. Fetches what is missing."""

FindAdapter = Callable[[str, str, Report], str]
"""The same for an adapter: its name, where it is, and whom to tell."""


class NodeHost:
    def __init__(
        self,
        make_node: Callable[[NodeConfig], HostedNode],
        config: bytes,
        find_model: FindModel | None = None,
        find_adapter: FindAdapter | None = None,
    ) -> None:
        settings = msgspec.msgpack.decode(config, type=NodeConfig)
        begin_logging(settings.logs, settings.node_id)
        raise_descriptor_limit()
        sys.setswitchinterval(_SWITCH_S)
        self._config = config
        self._model, self._draft = settings.engine.model.path, settings.engine.model.draft
        self._find_model = find_model
        self._find_adapter = find_adapter
        self._adapters = settings.engine.model.adapters
        if settings.engine.model.threads:
            # Before anything loads OpenMP, which reads it once.
            os.environ["OMP_NUM_THREADS"] = str(settings.engine.model.threads)
        self._make_node = make_node
        self._node = make_node(settings)
        self._starting = threading.Lock()
        self._info: NodeInfo | None = None
        self._progress = SaidProgress()
        self._report = self._progress.report
        self._stopped = threading.Event()

    def key(self) -> str:
        """The public key of this process."""
        return public_key()

    def configuration(self) -> bytes:
        """What it was made with, for a controller that comes back and asks whether this is the node that it wants."""
        return self._config

    def start(self, keepers: Sequence[str] = ()) -> bytes:
        """The node's NodeInfo. Blocks while the model loads; asked again, it answers what it answered before. `keepers`: of its ranks on
        other machines, where each is reached."""
        with self._starting:
            if self._info is None:
                self._info = self._begin(lambda: self._first_start(keepers))
            return _encode(self._info)

    def _first_start(self, keepers: Sequence[str]) -> NodeInfo:
        if self._find_model is None:
            return self._node.start(self._report, keepers=keepers)
        folder = self._find_model(self._model, self._report)
        draft = self._find_model(self._draft, self._report) if self._draft else None
        return self._node.start(
            self._report,
            model_folder=folder,
            adapters=self._adapter_folders(self._adapters),
            draft_folder=draft,
            keepers=keepers,
        )

    def _adapter_folders(self, adapters: Mapping[str, str]) -> dict[str, str]:
        if self._find_adapter is None:
            return dict(adapters)
        return {name: self._find_adapter(name, where, self._report) for name, where in adapters.items()}

    def change_role(self, config: bytes) -> bytes:
        """The same weights as another node, with an epoch and addresses of its own: its NodeInfo. Raises Unavailable
        when the node that it was has not come to rest."""
        settings = msgspec.msgpack.decode(config, type=NodeConfig)
        with self._starting:
            if not self._node.drain(_REST_S):
                raise Unavailable(f"{settings.node_id} still has work, and cannot change its role")
            self._info = None
            self._info = self._begin(lambda: self._go_on_as(settings))
            return _encode(self._info)

    def _go_on_as(self, settings: NodeConfig) -> NodeInfo:
        runner = self._node.release()
        node = self._make_node(settings)
        info = node.start(self._report, runner)
        self._node = node
        return info

    def _begin(self, start: Callable[[], NodeInfo]) -> NodeInfo:
        try:
            info = start()
            # What loading left is here to stay. A collection that walked over it would stop a step for a tenth of a
            # second.
            gc.collect()
            gc.freeze()
            return info
        except TandemError:
            raise
        except Exception as error:
            # Not every exception survives the way to another process; its text does.
            logger.exception("the node did not start")
            raise InternalError(f"{type(error).__name__}: {error}") from None

    def progress_after(self, seen: int, timeout_s: float) -> tuple[int, str, float]:
        """The latest step of what loads, and its number; waits for one that is newer than `seen`."""
        return self._progress.after(seen, timeout_s)

    def admit(self, keys: list[str]) -> None:
        """The public keys of all processes that may speak to this one, every time."""
        admit(keys)

    def status(self) -> bytes:
        return _encode(self._node.status())

    def routers_heard(self) -> list[str]:
        """Where the routers listen that it heard lately: for a controller that one of them does not answer."""
        return self._node.routers_heard()

    def drain(self, timeout_s: float) -> bool:
        return self._node.drain(timeout_s)

    def reset_cache(self, timeout_s: float) -> bool:
        return self._node.reset_cache(timeout_s)

    def set_adapters(self, wanted: dict[str, str], timeout_s: float) -> dict[str, str]:
        """All adapters that new requests may name: where each is. What is here from the same place stays as it is. Answers with the
        digests, by name. Raises ConfigurationError for one that cannot be served, and nothing has changed then."""
        with self._starting:
            new = {name: where for name, where in wanted.items() if self._adapters.get(name) != where}
            digests = self._node.set_adapters(
                self._adapter_folders(new), wanted.keys() - new.keys(), timeout_s
            )
            self._adapters = dict(wanted)
            return digests

    def log_page(self, seen: tuple[str, int] | None, last: int, most: int) -> bytes:
        """A LogPage of this process's log: the lines after one that was seen, or the last ones."""
        return _encode(recent_page(LogPosition(*seen) if seen is not None else None, last, most))

    def finish(self) -> None:
        """The process was told to end: takes nothing new, and returns when everything under way has ended, or `drain_s` is over. Then
        routers go on elsewhere with the rest."""
        if not self._node.drain(self._node.config.timeouts.drain_s):
            logger.warning("the node ends before its requests have: the rest goes on elsewhere")
        self.stop()

    def stop(self) -> None:
        self._node.stop()
        self._stopped.set()
        self._progress.end()

    def hold(self, timeout_s: float) -> bool:
        """Whether the node has been stopped; waits so long for it. A call that waits ends at once when the process dies.
        (Not for ever: one who asked and died himself would keep a thread.)"""
        return self._stopped.wait(timeout_s)
