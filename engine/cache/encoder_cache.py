"""Which outputs of the vision tower the runner has, by the content that they are of, and who needs them.

A running request holds what a step's tokens need until these are computed. What no request holds stays for other requests with the same
image, and makes room, the longest unused first, when there is no other. Between two steps a request holds the part that it is in the middle
of and no other, so requests never wait for each other in a circle.

A step encodes so many tokens of images at most; a part that is larger is encoded in a step of its own.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from tandem.engine.request import Request
from tandem.wire.errors import InternalError
from tandem.wire.images import MediaFeature


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderInput:
    """A part of an image that a step encodes."""

    identifier: str
    file: bytes  # the whole image's
    part: int
    length: int  # tokens that it becomes
    columns: int = 0  # see MediaFeature


@dataclasses.dataclass(slots=True)
class _Entry:
    length: int
    holders: set[str] = dataclasses.field(default_factory=set)


class EncoderCache:
    def __init__(self, capacity: int, tokens_per_step: int) -> None:
        self.capacity = capacity
        self.tokens_per_step = tokens_per_step
        self.encoded_tokens = self.reused_tokens = 0
        self._entries: dict[str, _Entry] = {}
        self._unheld: OrderedDict[str, None] = OrderedDict()  # of these, the longest unused first
        self._held_by: dict[str, set[str]] = {}  # what each request holds
        self._used = 0  # tokens of all entries
        self._held = 0  # of those that are held
        self._left = tokens_per_step  # that this step may still encode
        self._begun: dict[str, EncoderInput] = {}  # what this step encodes
        self._forgotten: list[str] = []

    def __len__(self) -> int:
        return len(self._entries)

    def begin_step(self, most: float) -> None:
        """`most`: tokens that this step may encode, if fewer than others."""
        self._left = int(min(self.tokens_per_step, most))

    def cap(self, request: Request, start: int, num_new: int) -> int:
        """How many of the tokens from `start` on can be computed: up to the first part for which this step, or the cache, has no room."""
        left, room = self._left, self.capacity - self._held
        coming: set[str] = set()
        encodes = bool(self._begun)
        for feature in _features(request, start, num_new):
            entry = self._entries.get(feature.identifier)
            if feature.identifier in coming or (entry is not None and entry.holders):
                continue
            fits = feature.length <= room
            if entry is None:
                fits = fits and (feature.length <= left or not encodes)
            if not fits:
                return max(feature.offset - start, 0)
            room -= feature.length
            coming.add(feature.identifier)
            if entry is None:
                left -= feature.length
                encodes = True
        return num_new

    def take(self, request: Request, start: int, num_new: int) -> None:
        """The request holds what these tokens need from here on. They are no more than `cap` has said."""
        missing: list[MediaFeature] = []
        for feature in _features(request, start, num_new):
            if feature.identifier in self._held_by.get(request.request_id, ()):
                continue
            if feature.identifier in self._entries:
                self.reused_tokens += feature.length
                self._hold(request.request_id, feature.identifier)
            else:
                missing.append(feature)
        # What is there is held by now, and gives no way to what is missing.
        for feature in missing:
            if feature.identifier not in self._entries:
                self._begin(request, feature)
            self._hold(request.request_id, feature.identifier)

    def _begin(self, request: Request, feature: MediaFeature) -> None:
        self._make_room(feature.length)
        self._entries[feature.identifier] = _Entry(feature.length)
        self._used += feature.length
        self._left -= feature.length
        self.encoded_tokens += feature.length
        self._begun[feature.identifier] = EncoderInput(
            feature.identifier,
            request.images[feature.image],
            feature.part,
            feature.length,
            feature.columns,
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
            # What was to be encoded in this very step is not known to the runner yet.
            if self._begun.pop(identifier, None) is None:
                self._forgotten.append(identifier)

    def passed(self, request: Request) -> None:
        """Its tokens are computed so far. It keeps the part that it is in the middle of, and not one that comes again later: that would stand
        in the way of those between."""
        held = self._held_by.get(request.request_id)
        if held is None:
            return
        for identifier in held - _entered(request):
            self._let_go(request.request_id, identifier)

    def release(self, request_id: str) -> None:
        """The request does not run any more."""
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

    def take_step(self) -> tuple[list[EncoderInput], list[str]]:
        """What the runner encodes in this step, and what it forgets before."""
        begun, forgotten = list(self._begun.values()), self._forgotten
        self._begun, self._forgotten = {}, []
        return begun, forgotten

    def check_integrity(self, running: Mapping[str, Request]) -> None:
        """Raises InternalError for what contradicts anything else. `running`: the requests that may hold something."""
        for request_id, held in self._held_by.items():
            request = running.get(request_id)
            if request is None or not held:
                raise InternalError(f"{request_id} holds encoded images and does not run")
            if not held <= _entered(request):
                raise InternalError(f"{request!r} holds encoded images that its next token does not need")
        for identifier, entry in self._entries.items():
            holders = {one for one, held in self._held_by.items() if identifier in held}
            if entry.holders != holders or (not holders) != (identifier in self._unheld):
                raise InternalError(f"the holders of {identifier} are not those that say so")
        if self._used != sum(entry.length for entry in self._entries.values()) or self._used > self.capacity:
            raise InternalError(f"the encoder cache counts {self._used} tokens of {self.capacity}")
        if self._held != sum(entry.length for entry in self._entries.values() if entry.holders):
            raise InternalError(f"the encoder cache counts {self._held} tokens that are held")


def _entered(request: Request) -> set[str]:
    """The part that the request is in the middle of, if it is in one."""
    computed = request.num_computed_tokens
    return {each.identifier for each in request.media if each.offset < computed < each.offset + each.length}


def _features(request: Request, start: int, num_new: int) -> Iterator[MediaFeature]:
    """Those that the tokens touch, in order."""
    last = request.media[-1]
    if last.offset + last.length <= start:
        return  # as for every token of its answer
    for feature in request.media:
        if feature.offset >= start + num_new:
            return
        if feature.offset + feature.length > start:
            yield feature
