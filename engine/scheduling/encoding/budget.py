"""Which parts of images the runner has rows for, by their content and the cache salt, and which requests need them.

A running request holds the parts that a step's tokens need until these tokens are computed. A part that no request holds stays
for other requests with the same image and salt, until its room is needed; the least recently used goes first. Between two steps a
request holds only a part that its computed tokens end in the middle of, so requests never wait for each other in a circle.

A step encodes a limited number of image tokens. A larger part is encoded in a step without others.

An encoder node may make a part's rows. Until they arrive, no step computes tokens that need them, and no step encodes the part.
If the encoder node says that they will not come, the part is encoded here.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from tandem.base.errors import InternalError
from tandem.engine.request import Request
from tandem.engine.scheduling.output import EncoderInput
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature


@dataclasses.dataclass(slots=True)
class _Coming:
    """Rows that an encoder node makes; `rows` is None until they arrive. No step has used them yet."""

    length: int
    wanted_by: set[str]
    rows: PromptEmbeds | None = None


@dataclasses.dataclass(slots=True)
class _Entry:
    length: int
    holders: set[str] = dataclasses.field(default_factory=set)
    is_void: bool = False  # dropped once it has no holder


class EncoderCache:
    """See engine.scheduling.parts.EncodedImages."""

    def __init__(self, capacity: int, tokens_per_step: int) -> None:
        self.capacity = capacity
        self.tokens_per_step = tokens_per_step
        self.encoded_tokens = self.reused_tokens = self.received_tokens = 0
        self._entries: dict[str, _Entry] = {}
        # Entries without a holder, the least recently used first.
        self._unheld: OrderedDict[str, None] = OrderedDict()
        self._held_by: dict[str, set[str]] = {}  # the entries that each request holds
        self._used = 0  # tokens of all entries
        self._held = 0  # tokens of the entries with a holder
        self._left = tokens_per_step  # tokens that this step may still encode
        self._begun: dict[str, EncoderInput] = {}  # the entries that this step adds
        self._forgotten: list[str] = []
        self._coming: dict[str, _Coming] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # --- rows from elsewhere

    def expect(self, request_id: str, parts: Iterable[MediaFeature]) -> list[MediaFeature]:
        asked: list[MediaFeature] = []
        for part in parts:
            coming = self._coming.get(part.identifier)
            if coming is not None:
                coming.wanted_by.add(request_id)
            elif part.identifier not in self._entries and self._on_their_way + part.length <= self.capacity:
                self._coming[part.identifier] = _Coming(part.length, {request_id})
                asked.append(part)
        return asked

    @property
    def _on_their_way(self) -> int:
        return sum(coming.length for coming in self._coming.values())

    def came(self, identifier: str, rows: PromptEmbeds) -> None:
        coming = self._coming.get(identifier)
        if coming is not None:  # None: no request wants them any more
            coming.rows = rows

    def will_not_come(self, identifier: str) -> None:
        coming = self._coming.get(identifier)
        if coming is not None and coming.rows is None:
            del self._coming[identifier]

    def awaits(self, request: Request, at: int) -> bool:
        return any(
            ((coming := self._coming.get(feature.identifier)) is not None and coming.rows is None)
            or self._leaves(feature.identifier, request)
            for feature in _features(request, at, 1)
        )

    def _leaves(self, identifier: str, request: Request) -> bool:
        """Whether other requests still hold the part, and this one needs it encoded again after them."""
        entry = self._entries.get(identifier)
        return entry is not None and entry.is_void and request.request_id not in entry.holders

    def forget(self, request_id: str) -> None:
        for identifier, coming in list(self._coming.items()):
            coming.wanted_by.discard(request_id)
            if not coming.wanted_by:
                del self._coming[identifier]

    # --- steps

    def begin_step(self, most: float) -> None:
        self._left = int(min(self.tokens_per_step, most))

    def cap(self, request: Request, start: int, num_new: int) -> int:
        left, room = self._left, self.capacity - self._held
        taken: set[str] = set()
        encodes = any(one.rows is None for one in self._begun.values())
        for feature in _features(request, start, num_new):
            entry = self._entries.get(feature.identifier)
            if self._leaves(feature.identifier, request):
                return max(feature.offset - start, 0)
            if feature.identifier in taken or (entry is not None and entry.holders):
                continue
            coming = self._coming.get(feature.identifier)
            is_made_here = entry is None and coming is None
            fits = feature.length <= room and (coming is None or coming.rows is not None)
            if is_made_here:
                fits = fits and (feature.length <= left or not encodes)
            if not fits:
                return max(feature.offset - start, 0)
            room -= feature.length
            taken.add(feature.identifier)
            if is_made_here:
                left -= feature.length
                encodes = True
        return num_new

    def take(self, request: Request, start: int, num_new: int) -> None:
        missing: list[MediaFeature] = []
        for feature in _features(request, start, num_new):
            if feature.identifier in self._held_by.get(request.request_id, ()):
                continue
            if feature.identifier in self._entries:
                self.reused_tokens += feature.length
                self._hold(request.request_id, feature.identifier)
            else:
                missing.append(feature)
        # The parts that are here are held by now, so making room for the missing ones does not drop them.
        for feature in missing:
            if feature.identifier not in self._entries:
                self._begin(request, feature)
            self._hold(request.request_id, feature.identifier)

    def _begin(self, request: Request, feature: MediaFeature) -> None:
        self._make_room(feature.length)
        self._entries[feature.identifier] = _Entry(feature.length)
        self._used += feature.length
        coming = self._coming.pop(feature.identifier, None)
        if coming is not None:
            self.received_tokens += feature.length
        else:
            self._left -= feature.length
            self.encoded_tokens += feature.length
        self._begun[feature.identifier] = EncoderInput(
            feature.identifier,
            request.facts.images[feature.image],
            feature.part,
            feature.length,
            feature.columns,
            coming.rows if coming is not None else None,
        )

    def _hold(self, request_id: str, identifier: str) -> None:
        entry = self._entries[identifier]
        if not entry.holders:
            self._unheld.pop(identifier, None)
            self._held += entry.length
        entry.holders.add(request_id)
        self._held_by.setdefault(request_id, set()).add(identifier)

    def _make_room(self, length: int) -> None:
        while self._used + length > self.capacity:
            if not self._unheld:
                raise InternalError("the encoder cache is full of what running requests hold")
            identifier, _ = self._unheld.popitem(last=False)
            self._used -= self._entries.pop(identifier).length
            # The runner does not know a part that this same step would have added.
            if self._begun.pop(identifier, None) is None:
                self._forgotten.append(identifier)

    def passed(self, request: Request) -> None:
        held = self._held_by.get(request.request_id)
        if held is None:
            return
        for identifier in held - _entered(request):
            self._let_go(request.request_id, identifier)

    def release(self, request_id: str) -> None:
        for identifier in list(self._held_by.get(request_id, ())):
            self._let_go(request_id, identifier)

    def _let_go(self, request_id: str, identifier: str) -> None:
        held = self._held_by[request_id]
        held.discard(identifier)
        if not held:
            del self._held_by[request_id]
        entry = self._entries[identifier]
        entry.holders.discard(request_id)
        if not entry.holders:
            self._held -= entry.length
            self._unheld[identifier] = None
            if entry.is_void:
                self.drop([identifier])

    def drop(self, identifiers: Iterable[str]) -> None:
        for identifier in identifiers:
            entry = self._entries.get(identifier)
            if entry is None or identifier in self._begun:
                continue
            if entry.holders:
                entry.is_void = True
                continue
            del self._unheld[identifier]
            self._used -= self._entries.pop(identifier).length
            self._forgotten.append(identifier)

    def drop_all(self) -> None:
        self.drop(list(self._entries))

    def take_step(self) -> tuple[list[EncoderInput], list[str]]:
        begun, forgotten = list(self._begun.values()), self._forgotten
        self._begun, self._forgotten = {}, []
        return begun, forgotten

    def check_integrity(self, running: Mapping[str, Request]) -> None:
        for request_id, held in self._held_by.items():
            request = running.get(request_id)
            if request is None or not held:
                raise InternalError(f"{request_id} holds encoded images and does not run")
            if not held <= _entered(request):
                raise InternalError(f"{request!r} holds encoded images that its next token does not need")
        if both := self._coming.keys() & self._entries.keys():
            raise InternalError(f"rows are here and on their way: {', '.join(sorted(both))}")
        for identifier, entry in self._entries.items():
            holders = {one for one, held in self._held_by.items() if identifier in held}
            if entry.holders != holders or (not holders) != (identifier in self._unheld):
                raise InternalError(f"the holders of {identifier} are not those that say so")
        if self._used != sum(entry.length for entry in self._entries.values()) or self._used > self.capacity:
            raise InternalError(f"the encoder cache counts {self._used} tokens of {self.capacity}")
        if self._held != sum(entry.length for entry in self._entries.values() if entry.holders):
            raise InternalError(f"the encoder cache counts {self._held} tokens that are held")


def _entered(request: Request) -> set[str]:
    """The part that the request's computed tokens end in the middle of; an empty set if there is none."""
    computed = request.num_computed_tokens
    return {each.identifier for each in request.image_parts if each.offset < computed < each.offset + each.length}


def _features(request: Request, start: int, num_new: int) -> Iterator[MediaFeature]:
    """The parts that the `num_new` tokens from `start` on touch, in order."""
    last = request.image_parts[-1]
    if last.offset + last.length <= start:
        return  # a fast exit for every token of the answer
    for feature in request.image_parts:
        if feature.offset >= start + num_new:
            return
        if feature.offset + feature.length > start:
            yield feature
