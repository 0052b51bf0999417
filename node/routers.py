"""The routers that a node has heard lately, and what they are told without asking: the node's status, and what its prefix cache holds,
so that they send a prompt to a node that has cached its beginning.

The step thread queues the KV events of each step. The `cache-news` thread translates them into the routers' block hashes
(`wire.requests`) and keeps the set of cached blocks, which it sends whole to a router that is new or has missed a message.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from tandem.base.errors import NodeLost
from tandem.wire.block_hashes import beside_media, block_hashes, root_hash
from tandem.wire.kv_events import DEVICE_MEDIUM, SALT, AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys, KVEvent
from tandem.wire.lines import Position
from tandem.wire.requests import CacheChange, CacheNews, NodeStatus

logger = logging.getLogger(__name__)

COUNTERS_PERIOD_S = 1.0  # between two reports with counters


class Receiver(Protocol):
    @property
    def malformed(self) -> int: ...
    @property
    def died(self) -> str | None:
        """Why it receives nothing any more although it was not closed; None while it receives."""


class RouterLine(Receiver, Protocol):
    """The node's end of the line to its routers."""

    @property
    def gaps(self) -> int:
        """How many times messages were missing and were requested again."""

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        """Queues a message. Raises NodeLost when the router does not read. The first message opens a connection, which stays open."""

    def received(self, endpoint: str) -> Position:
        """The position of the router's last delivered message."""

    def forget(self, endpoint: str) -> None:
        """Drops the connection and the messages queued on it."""


class Routers:
    """The routers that this node has heard lately. Every method may be called from any thread.

    A router that is silent for `silence_s`, or does not read, is lost: `lost` is called once, and the router counts as new when it is
    heard again. A lost router gets no message and has no connection, because messages that it does not read would pile up."""

    def __init__(
        self,
        line: RouterLine,
        status: Callable[[], NodeStatus],
        lost: Callable[[str], None],  # called under the lock: must not wait
        *,
        period_s: float,  # between two status reports to all routers
        silence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._line = line
        self._status = status
        self._lost = lost
        self._period_s = period_s
        self._counted_every = max(1, round(COUNTERS_PERIOD_S / period_s))
        self._reports = 0
        self._silence_s = silence_s
        self._clock = clock
        self._heard: dict[str, float] = {}  # router's address -> when it was last heard
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._report, name="node-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(5)

    @property
    def known(self) -> list[str]:
        """The addresses of the routers that were heard lately."""
        with self._lock:
            return list(self._heard)

    def heard(self, reply_to: str) -> bool:
        """Notes that a message of this router has come. Returns True if the router was not known before."""
        with self._lock:
            is_new = reply_to not in self._heard
            self._heard[reply_to] = self._clock()
        return is_new

    def tell(self, reply_to: str, message: msgspec.Struct) -> None:
        with self._lock:
            if reply_to not in self._heard:
                return
            try:
                self._line.send(reply_to, message)
            except NodeLost as error:
                logger.warning("router lost: %s", error)
                self._lose(reply_to)

    def tell_status(self, reply_to: str) -> None:
        self.tell(reply_to, self._status())

    def tell_all_status(self) -> None:
        for reply_to in self.known:
            self.tell_status(reply_to)

    def report(self) -> None:
        """Drops the routers that are silent, and sends the status to the others: with counters every COUNTERS_PERIOD_S, because they
        are most of a status."""
        status = self._status()
        if self._reports % self._counted_every:
            status = msgspec.structs.replace(status, counters=None)
        self._reports += 1
        for reply_to in self.known:
            self._lose_if_silent(reply_to)
            self.tell(reply_to, status)

    def _report(self) -> None:
        while not self._closing.wait(self._period_s):
            try:
                self.report()
            except Exception:
                # This thread must go on: routers give up a node that does not report, and the controller would not replace it.
                logger.exception("the status was not sent to every router")

    def _lose_if_silent(self, reply_to: str) -> None:
        with self._lock:
            silent_s = self._clock() - self._heard.get(reply_to, self._clock())
            if silent_s > self._silence_s:
                logger.warning("router %s has been silent for %.0f s: aborting its requests", reply_to, silent_s)
                self._lose(reply_to)

    def _lose(self, reply_to: str) -> None:
        """Called under the lock, so that `lost` is called before the router can be heard again."""
        del self._heard[reply_to]
        self._line.forget(reply_to)
        self._lost(reply_to)


HASHES_PER_MESSAGE = 2048


@dataclasses.dataclass(slots=True, frozen=True)
class _Begin:
    reply_to: str


@dataclasses.dataclass(slots=True, frozen=True)
class _Forget:
    reply_to: str


class NamedBlocks:
    """The blocks that are cached now, by the hashes that routers use. It follows one KV cache group only: the others hold blocks of
    the same prompts."""

    def __init__(self, block_size: int, group: int = 0) -> None:
        self._block_size = block_size
        self._group = group
        # Engine's block hash -> router's, for every block in at least one medium
        self._names: dict[bytes, int] = {}
        # Dicts for their order: what is listed does not depend on the process.
        self._media: dict[str, dict[bytes, None]] = {DEVICE_MEDIUM: {}}

    def apply(self, event: KVEvent) -> list[tuple[str, bool, list[int]]]:
        """Returns the changes: the medium, whether blocks were stored (True) or removed, and the routers' hashes of these blocks."""
        match event:
            case BlockStored():
                medium = event.medium or DEVICE_MEDIUM
                if (event.group_idx or 0) != self._group or (medium == DEVICE_MEDIUM and not self._name(event)):
                    return []
                there, names = self._media.setdefault(medium, {}), self._names
                new = [each for each in event.block_hashes if each in names and each not in there]
                there.update(dict.fromkeys(new))
                return [(medium, True, [names[each] for each in new])]
            case BlockRemoved():
                medium = event.medium or DEVICE_MEDIUM
                if (event.group_idx or 0) != self._group:
                    return []
                return [(medium, False, self._remove(medium, event.block_hashes))]
            case AllBlocksCleared():
                return [(medium, False, self._remove(medium, list(there))) for medium, there in self._media.items()]

    def _name(self, event: BlockStored) -> bool:
        if event.block_size != self._block_size:
            return False
        keys = event.extra_keys or []
        if event.parent_block_hash is None:
            parent: int | None = root_hash(_salt(keys), event.lora_name)
        else:
            parent = self._names.get(event.parent_block_hash)
        if parent is None:
            return False
        size, tokens = event.block_size, event.token_ids
        if not any(_media_of(each) for each in keys):
            self._names.update(zip(event.block_hashes, block_hashes(tokens, size, parent), strict=True))
            return True
        for i, block_hash in enumerate(event.block_hashes):
            if media := _media_of(keys[i]):
                parent = beside_media(parent, media)
            (parent,) = block_hashes(tokens[i * size : (i + 1) * size], size, parent)
            self._names[block_hash] = parent
        return True

    def _remove(self, medium: str, hashes: Iterable[bytes]) -> list[int]:
        there, names = self._media.setdefault(medium, {}), self._names
        removed = []
        for each in hashes:
            if each in there:
                del there[each]
                removed.append(names[each])
                if not any(each in others for others in self._media.values()):
                    del names[each]
        return removed

    def everything(self) -> list[tuple[str, list[int]]]:
        return [(medium, [self._names[each] for each in there]) for medium, there in self._media.items()]


def _salt(keys: Sequence[ExtraKeys | None]) -> str | None:
    first = keys[0] if keys else None
    return next((key.removeprefix(SALT) for key in first or () if key.startswith(SALT)), None)


def _media_of(keys: ExtraKeys | None) -> list[str]:
    return [key for key in keys or () if key.startswith("media:")]


def _packed(hashes: Sequence[int]) -> bytes:
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class CacheNewsSender:
    """Owns the `cache-news` thread, which sends each router a numbered stream of CacheNews."""

    def __init__(
        self,
        node_id: str,
        epoch: int,
        cached: NamedBlocks | None,
        tell: Callable[[str, CacheNews], None],
        publishers: Sequence[Callable[[Sequence[KVEvent]], None]] = (),
    ) -> None:
        """`cached`: the blocks that routers are told of; None: tell routers nothing. `tell` sends one message to a router, and drops it
        if the router is not known. `publishers` get every event, for other programs. All are called in the `cache-news` thread."""
        self._node_id = node_id
        self._epoch = epoch
        self._tell = tell
        self._publishers = publishers
        self._publishes = True  # the last events were published
        self._cached = cached
        self._numbers: dict[str, int] = {}  # router's address -> the number of the next message to it
        self._inbox: queue.SimpleQueue[Sequence[KVEvent] | _Begin | _Forget | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cache-news", daemon=True)

    # --- any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(5)

    def happened(self, events: Sequence[KVEvent]) -> None:
        self._inbox.put(events)

    def begin(self, reply_to: str) -> None:
        """Sends the router a list of everything: it is new here, or has missed a message."""
        if self._cached is not None:
            self._inbox.put(_Begin(reply_to))

    def forget(self, reply_to: str) -> None:
        self._inbox.put(_Forget(reply_to))

    # --- the cache-news thread

    def _run(self) -> None:
        while True:
            try:
                if not self.turn():
                    return
            except Exception:
                # The routers may have missed the changes of this turn: send each the whole list again.
                logger.exception("telling routers of the cache failed; they are told all of it again")
                for reply_to in list(self._numbers):
                    self._inbox.put(_Begin(reply_to))

    def turn(self) -> bool:
        """Waits for the first item and handles everything that is queued. Returns False when the thread must end."""
        changes: list[tuple[str, bool, list[int]]] = []
        item = self._inbox.get()
        while True:
            match item:
                case None:
                    self._send(changes)
                    return False
                case _Begin():
                    self._send(changes)
                    changes = []
                    self._list_to(item.reply_to)
                case _Forget():
                    self._numbers.pop(item.reply_to, None)
                case _:
                    # First what routers are told, then other programs: whatever the publisher raises, no event is lost to routers.
                    if self._cached is not None:
                        for event in item:
                            changes += self._cached.apply(event)
                    self._publish_events(item)
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                self._send(changes)
                return True

    def _publish_events(self, events: Sequence[KVEvent]) -> None:
        try:
            for publish in self._publishers:
                publish(events)
            self._publishes = True
        except Exception:
            if self._publishes:  # not with every step while it lasts
                logger.exception("KV events are not published to other programs; routers are told of them")
            self._publishes = False

    def _send(self, changes: list[tuple[str, bool, list[int]]]) -> None:
        merged = _merged(changes)
        for reply_to in list(self._numbers) if merged else ():
            self._send_to(reply_to, merged)

    def _list_to(self, reply_to: str) -> None:
        self._numbers[reply_to] = 0
        self._send_to(reply_to, [])
        for medium, hashes in self._cached.everything() if self._cached is not None else ():
            for start in range(0, len(hashes), HASHES_PER_MESSAGE):
                part = hashes[start : start + HASHES_PER_MESSAGE]
                self._send_to(reply_to, [CacheChange(medium, True, _packed(part))])

    def _send_to(self, reply_to: str, changes: list[CacheChange]) -> None:
        number = self._numbers[reply_to]
        self._numbers[reply_to] = number + 1
        self._tell(reply_to, CacheNews(self._node_id, self._epoch, number, changes))


def _merged(changes: list[tuple[str, bool, list[int]]]) -> list[CacheChange]:
    """Joins consecutive changes of the same medium and kind into one."""
    merged: list[tuple[str, bool, list[int]]] = []
    for medium, is_stored, hashes in changes:
        if merged and merged[-1][:2] == (medium, is_stored):
            merged[-1][2].extend(hashes)
        elif hashes:
            merged.append((medium, is_stored, list(hashes)))
    return [CacheChange(medium, is_stored, _packed(hashes)) for medium, is_stored, hashes in merged]
