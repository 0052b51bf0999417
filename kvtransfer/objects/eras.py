"""Which of the store's content is valid: that of its present era.

All nodes that share a folder, a model and a layout share an era. Its name is drawn at random, stands in one small object, and is a part
of every chunk's name. When a node may have stored wrong KV, it begins a new era: nothing of an earlier one is read again, also not what
is still on its way there. A reader looks at the era's object after it has read its chunks, and a node that has KV from the store looks
at it every few seconds. Once there is another era, that KV may be wrong: the node's cache begins a new generation, as it does when a
peer distrusts its own.

A node that changes to another era neither stores nor loads for a while. By then every node has changed, and each node that has KV of
a node that had to forget knows it. A node that has loaded nothing since it changed only changes again. So one node's doubt does not
go round.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable

from tandem.kvtransfer.objects.client import ObjectClient, StoreError

logger = logging.getLogger(__name__)

LOOK_S = 5.0  # between two looks at the era
QUIET_S = 3 * LOOK_S
REQUEST_S = 3.0  # for a small request
_NAME = re.compile(rb"[0-9a-f]{32}")


class Eras:
    """Any thread may use it."""

    def __init__(self, client: ObjectClient, layout: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._object = f"eras/{layout}"
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields from here on
        self.name = ""  # of the era that this node uses; "": the store has not answered yet
        self._loaded = False  # this node may have loaded something since it last forgot everything
        self._other = ""  # an era that has begun, and to which this node has yet to change
        self._quiet_until = 0.0

    @property
    def is_quiet(self) -> bool:
        """Whether nothing may be stored or loaded for now."""
        return not self.name or bool(self._other) or self._clock() < self._quiet_until

    @property
    def distrusted(self) -> str:
        """Why everything that is cached here must be forgotten; "" if it need not."""
        return "another node distrusts what it has stored, from which KV was loaded here" if self._other else ""

    @property
    def open_now(self) -> str:
        """The era in which may be stored, and asked what is there; "" if nothing may be for now."""
        with self._lock:
            return "" if self.is_quiet else self.name

    # ── what the threads that copy and look call; all but `to_load` raise StoreError ──

    def to_load(self) -> str:
        """Returns the era from which a load that begins now reads; "" if none may be."""
        with self._lock:
            if self.is_quiet:
                return ""
            self._loaded = True
            return self.name

    def look(self) -> str:
        """Reads which era it is. Returns its name if this node uses it, else ""."""
        present = self._read() or self._begin()
        with self._lock:
            if present == self.name:
                return present
            if self.name and self._loaded:
                self._other = present
            else:
                self._change_to(present)
            return ""

    def forget_all(self) -> None:
        """Begins another era, unless one has begun: the engine forgets everything that it has computed, loaded and stored so far."""
        present = self._read()
        if present is None or present == self.name:
            present = self._begin()
        with self._lock:
            if present != self.name:
                self._change_to(present)
            self._loaded, self._other = False, ""

    def begin_another(self) -> None:
        """Makes everything in the store invalid. What was loaded stays valid here."""
        present = self._begin()
        with self._lock:
            loaded = self._loaded
            self._change_to(present)
            self._loaded = loaded

    def _change_to(self, present: str) -> None:
        if self.name:
            self._quiet_until = self._clock() + QUIET_S
            logger.warning(
                "the object store has begun another era: nothing that it had so far is read; in %.0f s it is used again",
                QUIET_S,
            )
        self.name, self._loaded, self._other = present, False, ""

    def _read(self) -> str | None:
        found = self._client.get(self._object, self._clock() + REQUEST_S)
        return found.decode() if found is not None and _NAME.fullmatch(found) else None

    def _begin(self) -> str:
        """If several nodes begin an era at once, the last one's holds."""
        self._client.put(self._object, [secrets.token_hex(16).encode()], self._clock() + REQUEST_S)
        if (present := self._read()) is None:
            raise StoreError("the store has not got what was just stored in it")
        return present
