"""A TCP proxy on loopback that resets connections, as NAT, a firewall or a flapping link does."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from tandem.wire.endpoints import Endpoint, parse_endpoint

_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close() sends RST and drops what is queued


class ResettingProxy:
    """Passes bytes on in both directions. After every `reset_after` bytes it drops what it has just read and resets both ends."""

    def __init__(self, target: str, reset_after: int) -> None:
        inside = parse_endpoint(target)
        assert inside is not None
        self._target = (inside.host, inside.port)
        self._reset_after = reset_after
        self._passed = 0
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = str(Endpoint(inside.key, "127.0.0.1", self._listener.getsockname()[1]))
        self.resets = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        # shutdown wakes accept; close alone does not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, set()
            self.resets += bool(pairs)
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                    # Another thread reads from it: only shutdown wakes that one.
                    end.shutdown(socket.SHUT_RD)
                    end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            with self._lock:
                self._pairs.add((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self._passed += len(data)
                    due = self._passed >= self._reset_after
                    if due:
                        self._passed = 0
                if due:
                    self.reset()
                    return
                sink.sendall(data)
