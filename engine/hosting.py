"""A node as the process that holds it sees it: started once, asked from many threads, msgspec bytes in and out.

Whatever runs the process (a Ray actor, a test) calls these methods and adds nothing.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable

import msgspec

from engine.node import Node
from engine.node_config import NodeConfig
from wire.errors import InternalError, TandemError

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode


class NodeHost:
    def __init__(self, make_node: Callable[[NodeConfig], Node], config: bytes) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        settings = msgspec.msgpack.decode(config, type=NodeConfig)
        if settings.engine.model.threads:
            # Before anything loads OpenMP, which reads it once.
            os.environ["OMP_NUM_THREADS"] = str(settings.engine.model.threads)
        self._node = make_node(settings)
        self._progress = threading.Condition()
        self._steps: tuple[int, str, float] = (0, "", 0.0)
        self._stopped = threading.Event()

    def start(self) -> bytes:
        """The node's NodeInfo. Blocks while the model loads."""
        try:
            info = self._node.start(self._report)
            # What loading left is here to stay. A collection that walked over it would stop a step for a tenth of a
            # second.
            gc.collect()
            gc.freeze()
            return _encode(info)
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

    def hold(self) -> int:
        """Returns when the node has been stopped. Whoever waits for it learns at once when the process dies."""
        self._stopped.wait()
        return os.getpid()
