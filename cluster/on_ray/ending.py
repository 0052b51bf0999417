"""Handles SIGTERM in an actor's process: the process finishes its work before it ends."""

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
    """Runs `finish` in a thread of its own at the first SIGTERM, and ends the process when `finish` has returned. A second
    SIGTERM ends the process at once. Without this handler Ray would end the actor by SIGKILL.

    The owner keeps this object for as long as the process lives."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._begun = False
        # Python installs signal handlers from the main thread only, and an asyncio actor is constructed in another thread. A
        # pending call runs in the main thread at the next call to the actor.
        self._pending = _Pending(self._install)
        if threading.current_thread() is threading.main_thread():
            self._install(None)
        elif ctypes.pythonapi.Py_AddPendingCall(self._pending, None) != 0:
            logger.warning(
                "no handler for SIGTERM could be installed: SIGTERM will end this process at once, with requests in flight"
            )

    def _install(self, _: object) -> int:
        signal.signal(signal.SIGTERM, self._on_signal)
        return 0

    def _on_signal(self, number: int, frame: object) -> None:
        if self._begun:
            os._exit(_ENDED_BY_SIGTERM)
        self._begun = True
        threading.Thread(target=self._end, name="end", daemon=True).start()

    def _end(self) -> None:
        logger.info("got SIGTERM: this process finishes the work in flight, then ends")
        try:
            self._finish()
        except Exception:
            logger.exception("finishing the work in flight failed: this process ends without it")
        finally:
            os._exit(_ENDED_BY_SIGTERM)
