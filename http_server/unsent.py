"""Whether a client takes what was written for it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Callable


class UnsentWatch:
    """Watches a client that is behind. One that takes nothing for `patience_s` is given up."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        patience_s: float,
        give_up: Callable[[], None],
    ) -> None:
        self._transport, self._loop = transport, loop
        self._patience_s, self._give_up = patience_s, give_up
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watches from now on, if anything is unsent."""
        self.stop()
        if self._transport.get_write_buffer_size() > 0:
            self._timer = self._loop.call_later(self._patience_s, self._look, self._untaken())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _untaken(self) -> int:
        """Bytes that the client has not acknowledged, including those in the kernel's buffer. The kernel buffers
        megabytes, and accepts more only when a good part of them is gone."""
        kept = bytearray(4)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kept)
        return self._transport.get_write_buffer_size() + int.from_bytes(kept, sys.byteorder)

    def _look(self, before: int) -> None:
        """Nothing was written since, so any difference was taken."""
        if self._untaken() < before:
            self.start()
        else:
            self._give_up()
