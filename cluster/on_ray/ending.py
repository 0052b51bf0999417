"""SIGTERM to the process of an actor: what it has is finished before it ends."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_Pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class PoliteEnd:
    """`finish` runs in a thread of its own when the first SIGTERM comes, and the process ends when it has returned. With the second
    one it ends at once. Ray ends actors otherwise, by SIGKILL. To be kept for as long as the process lives."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._begun = False
        # Python takes handlers from the main thread alone, and an asyncio actor is made in another one: its main thread does this
        # with the next call that comes to the actor.
        self._pending = _Pending(self._install)
        if threading.current_thread() is threading.main_thread():
            self._install(None)
        elif ctypes.pythonapi.Py_AddPendingCall(self._pending, None) != 0:
            logger.warning("SIGTERM will end this process without a drain")

    def _install(self, _: object) -> int:
        signal.signal(signal.SIGTERM, self._on_signal)
        return 0

    def _on_signal(self, number: int, frame: object) -> None:
        if self._begun:
            os._exit(_ENDED_BY_SIGTERM)
        self._begun = True
        threading.Thread(target=self._end, name="end", daemon=True).start()

    def _end(self) -> None:
        logger.info("told to end: requests under way are finished first")
        try:
            self._finish()
        except Exception:
            logger.exception("the drain failed: the process ends with requests under way")
        finally:
            os._exit(_ENDED_BY_SIGTERM)
