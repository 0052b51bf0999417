"""A router's listening socket, handed to the router that takes its place, or serves beside it.

Both have the same socket then, and the same line of connections that nothing has accepted yet. So no connection is refused or reset
when one of them goes, or is killed: closing one of several sockets of a port (SO_REUSEPORT) resets those in its own line. The tally
of connections goes with it (`accepting`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct

from tandem.router.http.accepting import Tally

logger = logging.getLogger(__name__)

TAKE_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Door:
    """Listens, on the event loop that makes it, for a process of the same user on this machine that knows its name."""

    def __init__(self, listener: socket.socket, tally: Tally) -> None:
        self.name = f"tandem-router-{secrets.token_hex(16)}"
        self._listener = listener.dup()
        self._tally = os.dup(tally.descriptor)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Abstract: it is no file, and gone with the process.
        self._door.bind(f"\0{self.name}")
        self._door.listen()
        self._door.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._door.fileno(), self._on_knock)

    def _on_knock(self) -> None:
        try:
            guest, _ = self._door.accept()
            with guest:
                _, user, _ = _CREDENTIALS.unpack(
                    guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if user != os.geteuid():
                    logger.warning("a process of user %d asked for the listening socket, in vain", user)
                    return
                socket.send_fds(guest, [b"\0"], [self._listener.fileno(), self._tally])
        except OSError as error:
            logger.warning("the listening socket could not be handed on: %s", error)

    def close(self) -> None:
        """Idempotent. A process that has the socket keeps it."""
        if self._door.fileno() >= 0:
            self._loop.remove_reader(self._door.fileno())
            self._door.close()
            self._listener.close()
            os.close(self._tally)


def take_listener(name: str) -> tuple[socket.socket, Tally] | None:
    """The socket that the door of that name has, and its tally; None when its process is gone, or does not hand it on. Blocks."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
            guest.settimeout(TAKE_S)
            guest.connect(f"\0{name}")
            _, descriptors, _, _ = socket.recv_fds(guest, 1, 2)
    except OSError as error:
        logger.warning("no listening socket from the router before: %s", error)
        return None
    if len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        logger.warning("the router before does not hand its listening socket on")
        return None
    listener = socket.socket(fileno=descriptors[0])
    listener.setblocking(False)
    try:
        return listener, Tally(descriptors[1])
    finally:
        os.close(descriptors[1])
