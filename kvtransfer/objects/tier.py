"""The tier in an object store, as the connector of tiers uses it: which chunks are known to be there, and a copier."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import EvictionPolicy, TierConfig
from tandem.kvtransfer.objects.chunks import ChunkStore, ReadResult
from tandem.kvtransfer.objects.client import ObjectClient, StoreError, StoreRefused
from tandem.kvtransfer.objects.eras import Eras
from tandem.kvtransfer.objects.inquiries import Inquiries, Workers
from tandem.kvtransfer.objects.options import ObjectOptions
from tandem.kvtransfer.offload.chunks import Chunk, ChunkCopier, Places
from tandem.kvtransfer.offload.cpu import TierSurroundings
from tandem.kvtransfer.offload.disk import identity
from tandem.kvtransfer.offload.fetches import Rate
from tandem.kvtransfer.offload.manager import StoreRoom, TierManager, filtered
from tandem.kvtransfer.offload.patience import OPEN_S, Hold
from tandem.kvtransfer.offload.policies import Key
from tandem.kvtransfer.offload.spec import Copy, LastingSpec, Mover
from tandem.kvtransfer.sources import TierSources

logger = logging.getLogger(__name__)

# Chunks on their way at a time, each over a connection of its own: a store answers after milliseconds, whatever their size.
CONNECTIONS = 4
# Chunks that are known to be in the store; the one that was used longest ago is asked for again.
MOST_KNOWN = 200_000


def create(config: TierConfig) -> ObjectTier:
    if config.policy is not EvictionPolicy.LRU:
        raise ConfigurationError(
            "cache.tiers: objects has no policy: its store deletes chunks by the bucket's own rules"
        )
    return ObjectTier(config)


class ObjectTier(LastingSpec):
    name = "objects"
    whole_prefixes_only = True

    def __init__(self, config: TierConfig, around: TierSurroundings | None = None) -> None:
        self._config = config
        self._around = around or TierSurroundings()
        self._client = ObjectClient(ObjectOptions.parse(config.options))
        self.recall = TierSources()

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        factor = self._config.block_factor
        layout = identity(memory, factor)
        eras = Eras(self._client, layout)
        store = ChunkStore(self._client, layout, memory.block_bytes * factor)
        copier = ObjectCopier(memory, factor, store, eras)
        thread = self._around.copying(copier, wake, self.name)
        thread.await_open(OPEN_S)
        if copier.problem:
            thread.leave_out(copier.problem)

        inquiries = copier.inquiries = Inquiries(store, eras, wake, lambda error: thread.leave_out(str(error)))
        manager = ObjectManager(
            eras,
            inquiries,
            copier,
            forget_all=lambda: thread.do_first(copier.forget_all),
            forget=lambda keys: thread.do_first(lambda: copier.forget(keys)),
        )
        # No list of sources is kept: a node that distrusts its KV has this tier, too, and begins another era.
        self.recall.bind(lambda kept: None, lambda: thread.has_first)
        return filtered(manager, self._config.store_threshold), thread


class ObjectManager(TierManager):
    """Knows what was stored from here, and what was asked for."""

    capacity = evicted = 0

    def __init__(
        self,
        eras: Eras,
        inquiries: Inquiries,
        copier: ObjectCopier,
        *,
        forget_all: Callable[[], None],
        forget: Callable[[set[Key]], None],
    ) -> None:
        self._eras = eras
        self._inquiries = inquiries
        self._copier = copier
        self._forget_all = forget_all
        self._forget = forget
        self._era = ""
        self._known: OrderedDict[Key, None] = OrderedDict()  # in this era
        self._asked: dict[Key, float] = {}  # until when what begins here is asked for, by the last key
        self._written: set[Key] = set()  # stores of these are under way
        self._resets = 0

    @property
    def used(self) -> int:
        return len(self._known)

    @property
    def distrusted(self) -> str:
        return self._eras.distrusted if self._copier.resets == self._resets else ""  # it is being forgotten

    def lookup(self, keys: Iterable[Key]) -> int:
        self._follow()
        if self._eras.is_quiet:
            return 0
        return sum(1 for _ in itertools.takewhile(self._known.__contains__, keys))

    def _follow(self) -> None:
        """What was there in an earlier era is not there any more."""
        if self._era != (present := self._eras.name):
            self._era = present
            self._known.clear()

    def find_out(self, keys: Sequence[Key], compute_s: float) -> bool:
        if keys[-1] in self._asked:
            return True
        if self._eras.is_quiet or self._inquiries.answer_s >= compute_s:
            return False
        self._asked[keys[-1]] = self._inquiries.ask(keys)
        return True

    def is_finding_out(self, last: Key) -> bool:
        self._follow()
        for found in self._inquiries.take():
            self._asked.pop(found.keys[-1], None)
            if found.era == self._era:
                self._know(found.keys[: found.count])
        if (until := self._asked.get(last)) is not None and time.monotonic() >= until:
            del self._asked[last]
        return last in self._asked

    def _know(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self._written:
                self._known[key] = None
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def is_slower(self, chunks: int, compute_s: float) -> bool:
        load_s = self._copier.seconds_of(chunks)
        return load_s is not None and load_s >= compute_s

    def touch(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key in self._known:
                self._known.move_to_end(key)

    def line_up(self, keys: Sequence[Key]) -> None: ...

    def prepare_load(self, keys: Iterable[Key]) -> list[int]:
        return [number for number, _ in enumerate(keys)]  # a chunk is found by its key alone

    def complete_load(self, slots: Iterable[int]) -> None: ...

    def prepare_store(self, keys: Sequence[Key]) -> StoreRoom | None:
        self._follow()
        if self._eras.is_quiet:
            return None
        new = [key for key in dict.fromkeys(keys) if key not in self._known and key not in self._written]
        self._written.update(new)
        return StoreRoom(new, list(range(len(new))))

    def complete_store(self, room: StoreRoom, *, written: bool) -> None:
        self._written.difference_update(room.keys)
        if written:
            self._know(key for key in room.keys if key not in self._copier.void)
        self._copier.void.difference_update(room.keys)

    def lost(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._known.pop(key, None)

    def forget(self, keys: Iterable[Key]) -> None:
        gone = set(keys)
        self._copier.void.update(gone & self._written)
        self.lost(gone)
        if gone:
            self._forget(gone)

    def reset(self) -> None:
        self._resets += 1
        self._known.clear()
        self._copier.void.update(self._written)
        self._forget_all()


class ObjectCopier(ChunkCopier):
    """Has a few chunks on their way at a time."""

    def __init__(self, memory: KVCacheMemory, block_factor: int, store: ChunkStore, eras: Eras) -> None:
        super().__init__(memory, block_factor)
        self._store = store
        self._eras = eras
        self._workers = Workers(CONNECTIONS, "kv-objects")
        self._pace = Rate(time.monotonic)
        self.resets = 0  # how often everything was forgotten
        self.inquiries: Inquiries | None = None
        self.problem = ""  # why the store cannot be used yet
        # Keys to which nothing is stored, because what their stores hold was forgotten. The step thread changes it.
        self.void: set[Key] = set()

    def open(self) -> None:
        try:
            self._eras.look()
            self._store.probe(secrets.token_hex(16))
        except StoreRefused as error:
            raise ConfigurationError(f"cache.tiers: {error}") from error
        except StoreError as error:
            self.problem = str(error)

    def probe(self) -> bool:
        self._eras.look()
        return self._store.probe(secrets.token_hex(16))

    def seconds_of(self, chunks: int) -> float | None:
        """How long a load of so many chunks should take; None: it is not known."""
        rate = self._pace.value
        return None if rate is None else chunks / rate

    def copy(self, job: Copy, to_device: bool, fence: Any, hold: Hold) -> bool:
        if fence is not None:
            fence.synchronize()
        if job.resets != self.resets:
            return False  # planned before everything was forgotten
        until = time.monotonic() + job.within_s
        return self._load(job, until, hold) if to_device else self._store_all(job, until, hold)

    def _load(self, job: Copy, until: float, hold: Hold) -> bool:
        if not (era := self._eras.to_load()):
            return False
        began, right = time.monotonic(), True

        def read(key: Key, chunk: Chunk) -> bool:
            return self._store.read(era, key, chunk.bytes, until) is ReadResult.RIGHT

        on_their_way: collections.deque[tuple[Future[bool], Chunk, Places]] = collections.deque()
        for key, _, places in self.chunks_of(job):
            if len(on_their_way) == CONNECTIONS:
                right = self._arrive(on_their_way.popleft(), hold) and right
            if not right:
                break
            chunk = self.new_chunk()
            on_their_way.append((self._workers.begin(functools.partial(read, key, chunk)), chunk, places))
        for one in on_their_way:
            right = self._arrive(one, hold) and right
        if right:
            self._pace.observe(len(job.keys), time.monotonic() - began)
        # If another era has begun meanwhile, what was read may be wrong.
        return right and self._eras.look() == era

    def _arrive(self, one: tuple[Future[bool], Chunk, Places], hold: Hold) -> bool:
        read, chunk, places = one
        if not read.result():
            return False
        self.scatter(chunk, places, hold)
        return True

    def _store_all(self, job: Copy, until: float, hold: Hold) -> bool:
        if not (era := self._eras.open_now):
            return False

        def write(key: Key, chunk: Chunk) -> bool:
            if key in self.void:
                return False
            self._store.write(era, key, chunk.bytes, until)
            return True

        begun: list[Future[bool]] = []
        try:
            for key, _, places in self.chunks_of(job):
                if len(begun) >= CONNECTIONS:
                    begun[-CONNECTIONS].result()
                chunk = self.new_chunk()
                self.gather(chunk, places, hold)
                begun.append(self._workers.begin(functools.partial(write, key, chunk)))
        finally:
            # What is forgotten after this is not stored later.
            concurrent.futures.wait(begun)
        return all(one.result() for one in begun)

    def forget_all(self) -> None:
        self._eras.forget_all()
        self.resets += 1

    def forget(self, keys: set[Key]) -> None:
        if self._store.is_unsettled:
            self._eras.begin_another()  # a store may be done after the deletion
        elif era := self._eras.name:
            for key in keys:
                self._store.delete(era, key)

    def close(self) -> None:
        self._workers.close()
        if self.inquiries is not None:
            self.inquiries.close()
