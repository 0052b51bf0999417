"""Hands a router's listening sockets to its successor, or to another process on its port.

The router's own socket comes first, then those of addresses that it has given up and still serves for a
while. Both routers then share the sockets and their lines of connections that are not accepted yet, so no
connection is refused or reset when one router goes or is killed. With several sockets on one port
(SO_REUSEPORT), closing one would reset the connections in its own line. The tally of connections goes with
each socket (`serving`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Sequence

from tandem.http_server.serving import Tally

logger = logging.getLogger(__name__)

TAKE_S = 5.0
# The router's own socket and those of addresses that it has given up. A version that knows only one takes the
# first.
MOST_SOCKETS = 8
_CREDENTIALS = struct.Struct("3i")  # process, user and group id

Listener = tuple[socket.socket, Tally]


class Door:
    """Gives the sockets to any process of the same user on this machine that knows its name. Runs on the
    event loop that makes it."""

    def __init__(self, listener: socket.socket, tally: Tally, former: Sequence[Listener] = ()) -> None:
        """`former`: sockets of addresses that are given up. The caller still owns all sockets and tallies."""
        self.name = f"tandem-router-{secrets.token_hex(16)}"
        self._listener = listener.dup()
        self._tally = os.dup(tally.descriptor)
        self._former = [(there.dup(), os.dup(counted.descriptor)) for there, counted in former]
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # An abstract address is no file, and ends with the process.
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
                    logger.warning("a process of user %d asked for the listening socket, and was refused", user)
                    return
                sockets = [(self._listener, self._tally), *self._former][:MOST_SOCKETS]
                socket.send_fds(guest, [b"\0"], [one for there, tally in sockets for one in (there.fileno(), tally)])
        except OSError as error:
            logger.warning("the listening socket could not be handed on: %s", error)

    def forget_former(self) -> None:
        """From now on, no other router gets the sockets of the addresses that were given up."""
        for there, tally in self._former:
            there.close()
            os.close(tally)
        self._former = []

    def close(self) -> None:
        """Closes the door. Idempotent. Processes that have the sockets keep them."""
        if self._door.fileno() >= 0:
            self._loop.remove_reader(self._door.fileno())
            self._door.close()
            self._listener.close()
            os.close(self._tally)
            self.forget_former()


def take_listeners(name: str) -> list[Listener]:
    """Takes the sockets and tallies from the door of this name. Returns an empty list when its process is
    gone or hands out none. Blocks for up to TAKE_S per socket operation, so it must not run on the event
    loop."""
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
