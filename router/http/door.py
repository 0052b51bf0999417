"""A router's listening sockets, handed to the router that takes its place, or serves beside it.

Its own one comes first, then those of addresses that it has given up and answers at for a while. Both routers have the same sockets
then, and the same lines of connections that nothing has accepted yet. So no connection is refused or reset when one of them goes, or is
killed: closing one of several sockets of a port (SO_REUSEPORT) resets those in its own line. The tally of connections goes with each
socket (`accepting`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence

from tandem.router.http.serving import Tally

logger = logging.getLogger(__name__)

TAKE_S = 5.0
# Its own socket and those of addresses that were given up within a minute; a version that knows one alone takes the first.
MOST_SOCKETS = 8
_CREDENTIALS = struct.Struct("3i")  # process, user, group

Listener = tuple[socket.socket, Tally]


class Door:
    """Listens, on the event loop that makes it, for a process of the same user on this machine that knows its name."""

    def __init__(self, listener: socket.socket, tally: Tally, former: Sequence[Listener] = ()) -> None:
        """`former`: of addresses that are given up. All stay the caller's."""
        self.name = f"tandem-router-{secrets.token_hex(16)}"
        self._listener = listener.dup()
        self._tally = os.dup(tally.descriptor)
        self._former = [(there.dup(), os.dup(counted.descriptor)) for there, counted in former]
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
                    logger.warning(
                        "a process of user %d asked for the listening socket, and was refused", user
                    )
                    return
                sockets = [(self._listener, self._tally), *self._former][:MOST_SOCKETS]
                socket.send_fds(
                    guest, [b"\0"], [one for there, tally in sockets for one in (there.fileno(), tally)]
                )
        except OSError as error:
            logger.warning("the listening socket could not be handed on: %s", error)

    def forget_former(self) -> None:
        """The addresses that were given up are given to no other router from now on."""
        for there, tally in self._former:
            there.close()
            os.close(tally)
        self._former = []

    def close(self) -> None:
        """Idempotent. A process that has the socket keeps it."""
        if self._door.fileno() >= 0:
            self._loop.remove_reader(self._door.fileno())
            self._door.close()
            self._listener.close()
            os.close(self._tally)
            self.forget_former()


def take_listeners(name: str) -> list[Listener]:
    """The sockets that the door of that name has, each with its tally; none when its process is gone, or does not hand them on. Blocks."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest:
            guest.settimeout(TAKE_S)
            guest.connect(f"\0{name}")
            _, descriptors, _, _ = socket.recv_fds(guest, 1, 2 * MOST_SOCKETS)
    except OSError as error:
        logger.warning("no listening socket from the old router: %s", error)
        return []
    if not descriptors or len(descriptors) % 2:
        for descriptor in descriptors:
            os.close(descriptor)
        logger.warning("the old router does not hand over its listening socket")
        return []
    return [_listener(*pair) for pair in zip(descriptors[::2], descriptors[1::2], strict=True)]


def _listener(descriptor: int, memory: int) -> Listener:
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    try:
        return listener, Tally(memory)
    finally:
        os.close(memory)
