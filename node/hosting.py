"""The methods by which a process runs its node: msgspec bytes in and out, callable from many threads.

A Ray actor (or a test) forwards each call to `NodeHost` and adds no logic.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.base.errors import DeadlineExceeded, InternalError, TandemError, Unavailable
from tandem.base.logs import LogPosition, begin_logging, recent_page
from tandem.base.progress import Report, SaidProgress
from tandem.engine.config import OWN_HEAD
from tandem.node.config import NodeConfig
from tandem.wire.nodes import NodeInfo
from tandem.wire.sockets import admit, public_key, raise_descriptor_limit

if TYPE_CHECKING:
    from tandem.node.node import Node

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode

_REST_S = 1.0  # how long the step thread may take to report that nothing is left
# CPython's switch interval. A handover passes through several threads, and each waits up to this long for the thread that runs Python.
_SWITCH_S = 0.001


FindModel = Callable[[str, Report], str]
"""Returns the folder of a model on this machine, by the model's name. Fetches missing files and reports its progress."""

FindAdapter = Callable[[str, str, Report], str]
"""Returns the folder of an adapter on this machine. Its arguments: the adapter's name, its source, and the progress callback."""


class NodeHost:
    def __init__(
        self,
        make_node: Callable[[NodeConfig], Node[Any]],
        config: bytes,
        find_model: FindModel | None = None,
        find_adapter: FindAdapter | None = None,
        end: Callable[[Callable[[], None]], object] = lambda finish: None,
    ) -> None:
        """`end`: called with what must be done when the process is told to end. This object keeps what it returns."""
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
            # OpenMP reads this once, when it is loaded, so set it before any library loads OpenMP.
            os.environ["OMP_NUM_THREADS"] = str(settings.engine.model.threads)
        self._make_node = make_node
        self._node = make_node(settings)
        self._starting = threading.Lock()
        self._info: NodeInfo | None = None
        self._progress = SaidProgress()
        self._report = self._progress.report
        self._stopped = threading.Event()
        self._end = end(self.finish)

    def key(self) -> str:
        return public_key()

    def configuration(self) -> bytes:
        """The bytes of the NodeConfig. A controller that has restarted compares them with the configuration that it wants."""
        return self._config

    def start(self, keepers: Sequence[str] = ()) -> bytes:
        """Starts the node and returns its NodeInfo. Blocks while the model loads; a second call returns the same NodeInfo. `keepers`: the
        endpoints of the keepers of its ranks on other machines."""
        with self._starting:
            if self._info is None:
                self._info = self._begin(lambda: self._first_start(keepers))
            return _encode(self._info)

    def _first_start(self, keepers: Sequence[str]) -> NodeInfo:
        if self._find_model is None:
            return self._node.start(self._report, keepers=keepers)
        folder = self._find_model(self._model, self._report)
        draft = None if self._draft in ("", OWN_HEAD) else self._find_model(self._draft, self._report)
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
        """Goes on as another node with the loaded weights, and returns that node's NodeInfo: it has a new epoch and new addresses.
        Raises Unavailable if the old node still has work after `_REST_S`."""
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
            # The objects that loading created stay for good. Freeze them: a collection that walks over them stops a step for a
            # tenth of a second.
            gc.collect()
            gc.freeze()
            return info
        except TandemError:
            raise
        except Exception as error:
            # Not every exception can be sent to another process; its text can.
            logger.exception("the node did not start")
            raise InternalError(f"{type(error).__name__}: {error}") from None

    def progress_after(self, seen: int, timeout_s: float) -> tuple[int, str, float]:
        """Waits up to `timeout_s` for progress newer than number `seen`. Returns its number, what is being done, and the share done."""
        return self._progress.after(seen, timeout_s)

    def admit(self, keys: list[str]) -> None:
        """Admits exactly these public keys: each call names all processes that may speak to this one."""
        admit(keys)

    def status(self) -> bytes:
        return _encode(self._node.status())

    def routers_heard(self) -> list[str]:
        """The addresses of the routers that this node has heard lately. A controller asks this when a router does not answer it."""
        return self._node.routers_heard()

    def drain(self, timeout_s: float) -> bool:
        return self._node.drain(timeout_s)

    def reset_cache(self, timeout_s: float) -> bool:
        return self._node.reset_cache(timeout_s)

    def set_adapters(self, wanted: dict[str, str], timeout_s: float) -> dict[str, str]:
        """Replaces the adapters that new requests may name; `wanted`: each adapter's source, by name. An adapter that is already served
        from the same source stays loaded. Returns the digests by name. Raises ConfigurationError, and changes nothing, if one cannot
        be served; DeadlineExceeded if the change waits for a step that takes longer than `timeout_s`."""
        with self._starting:
            kept = {name: where for name, where in wanted.items() if self._adapters.get(name) == where}
            new = {name: where for name, where in wanted.items() if name not in kept}
            try:
                digests = self._node.set_adapters(self._adapter_folders(new), kept.keys(), timeout_s)
            except DeadlineExceeded:
                # The change is made after the running step. What it replaces is read again by the change that undoes it.
                self._adapters = kept
                raise
            self._adapters = dict(wanted)
            return digests

    def log_page(self, seen: tuple[str, int] | None, last: int, most: int) -> bytes:
        """Returns a LogPage of this process's log: at most `most` lines after position `seen`, or the `last` lines if `seen` is None."""
        return _encode(recent_page(LogPosition(*seen) if seen is not None else None, last, most))

    def finish(self) -> None:
        """Ends the node because its process was told to end. Refuses new requests and waits up to `timeouts.drain_s` for the running
        ones; routers continue the rest on other nodes."""
        if not self._node.drain(self._node.config.timeouts.drain_s):
            logger.warning("the node ends before its requests have: the rest goes on elsewhere")
        self.stop()

    def stop(self) -> None:
        self._node.stop()
        self._stopped.set()
        self._progress.end()

    def hold(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the node to be stopped, and returns whether it was. The caller's call fails at once if this process
        dies. The wait is bounded because a caller that dies would leave its thread waiting here."""
        return self._stopped.wait(timeout_s)
