"""A node as the process that holds it sees it: started once, asked from many threads, msgspec bytes in and out.

Whatever runs the process (a Ray actor, a test) calls these methods and adds nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

import msgspec

from engine.node import Node
from engine.node_config import NodeConfig
from wire.errors import InternalError, TandemError
from wire.nodes import NodeInfo

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


FindModel = Callable[[str, Callable[[str, float], None]], str]
"""From a model's name to a folder on this machine; says meanwhile what it does. Fetches what is missing."""


class NodeHost:
    def __init__(
        self, make_node: Callable[[NodeConfig], Node], config: bytes, find_model: FindModel | None = None
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        settings = msgspec.msgpack.decode(config, type=NodeConfig)
        self._config = config
        self._model = settings.engine.model.path
        self._find_model = find_model
        if settings.engine.model.threads:
            # Before anything loads OpenMP, which reads it once.
            os.environ["OMP_NUM_THREADS"] = str(settings.engine.model.threads)
        self._node = make_node(settings)
        self._progress = threading.Condition()
        self._steps: tuple[int, str, float] = (0, "", 0.0)
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        self._info: bytes | None = None

    def configuration(self) -> bytes:
        """What it was made with, for a controller that comes back and asks whether this is the node that it wants."""
        return self._config

    def start(self) -> bytes:
        """The node's NodeInfo. Blocks while the model loads. Asked again, it says again what it said."""
        with self._starting:
            if self._info is None:
                self._info = _encode(self._start())
            return self._info

    def _start(self) -> NodeInfo:
        try:
            if self._find_model is None:
                return self._node.start(self._report)
            return self._node.start(self._report, model_folder=self._find_model(self._model, self._report))
        except TandemError:
            raise
        except Exception as error:
            # Not every exception survives the way to another process; its text does.
            logger.exception("the node did not start")
            raise InternalError(f"{type(error).__name__}: {error}") from None

    def _report(self, what: str, fraction: float) -> None:
        with self._progress:
            self._steps = (self._steps[0] + 1, what, fraction)
            self._progress.notify_all()

    def progress_after(self, seen: int, timeout_s: float) -> tuple[int, str, float]:
        """The latest step of `start` and its number; waits for one that is newer than `seen`."""
        with self._progress:
            self._progress.wait_for(lambda: self._steps[0] > seen or self._stopped.is_set(), timeout_s)
            return self._steps

    def status(self) -> bytes:
        return _encode(self._node.status())

    def drain(self, timeout_s: float) -> bool:
        return self._node.drain(timeout_s)

    def stop(self) -> None:
        self._node.stop()
        self._stopped.set()
        with self._progress:
            self._progress.notify_all()

    def hold(self, timeout_s: float) -> bool:
        """Whether the node has been stopped; waits so long for it. Whoever asks learns at once when the process dies.
        (Not for ever: one who asked and died himself would keep a thread.)"""
        return self._stopped.wait(timeout_s)
