"""The output of one request, merged by index from whichever nodes report it."""

from __future__ import annotations

import enum

from tandem.router.dispatch.logprobs import LogprobStore
from tandem.wire.errors import InternalError
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason


class MergedChunk(enum.Enum):
    NEWS = enum.auto()  # tokens, or the end, or nothing that was not known: it is in
    HELD = enum.auto()  # it waits for a report that comes before it
    DIFFERS = enum.auto()  # it contradicts a token that is known: it was dropped


class TokenLedger:
    """Invariant: `tokens` is a gapless prefix of the output; with logprobs wanted, `logprobs` is as long.

    A chunk that leaves a gap, or lacks logprobs for tokens that are new, is held until another fills in what is
    missing: the decode node may report the first token, without logprobs, before the prefill node's report comes.

    The first report of a token counts. It may have been shown already, so a later one that differs changes nothing.
    """

    def __init__(self, *, wants_logprobs: bool) -> None:
        self.tokens: list[int] = []
        self.logprobs = LogprobStore()
        self.finish: FinishReason | None = None
        self.stop_token: int | None = None
        self._wants_logprobs = wants_logprobs
        self._held: list[TokenChunk] = []

    def accept(self, chunk: TokenChunk, *, may_differ: bool = False) -> MergedChunk:
        """`may_differ`: take what is new of a chunk even if it repeats known tokens differently."""
        merged = self._merge(chunk, may_differ)
        if merged is MergedChunk.HELD:
            self._held.append(chunk)
        while merged is MergedChunk.NEWS and self._held:
            held, self._held = self._held, []
            differs = False
            for waiting in held:
                again = self._merge(waiting, may_differ)
                if again is MergedChunk.HELD:
                    self._held.append(waiting)
                differs = differs or again is MergedChunk.DIFFERS
            if differs:
                return MergedChunk.DIFFERS
            if len(self._held) == len(held):
                break
        return merged

    def _merge(self, chunk: TokenChunk, may_differ: bool) -> MergedChunk:
        tokens, ids, start = self.tokens, chunk.token_ids, chunk.start
        have = len(tokens)
        if start != have:
            if start < 0:
                raise InternalError(f"a node reported tokens from index {start}")
            if start > have:
                return MergedChunk.HELD
            known = have - start
            if tokens[start : start + len(ids)] != ids[:known] and not may_differ:
                return MergedChunk.DIFFERS
            ids = ids[known:]
        if ids:
            if self._wants_logprobs:
                if chunk.logprobs is None:
                    return MergedChunk.HELD
                self.logprobs.extend(chunk.logprobs[len(chunk.token_ids) - len(ids) :])
            tokens.extend(ids)
        if chunk.finish is FinishReason.STOP or chunk.finish is FinishReason.LENGTH:
            self.finish = chunk.finish
            self.stop_token = chunk.stop_token
        return MergedChunk.NEWS

    @property
    def waiting(self) -> bool:
        """Something was reported that cannot be merged yet."""
        return bool(self._held)

    @property
    def reported(self) -> int:
        """How many tokens were reported without a gap, merged or held."""
        have = len(self.tokens)
        for chunk in sorted(self._held, key=lambda chunk: chunk.start):
            if chunk.start <= have:
                have = max(have, chunk.start + len(chunk.token_ids))
        return have

    def drop_held(self) -> None:
        """Another attempt begins: it reports everything again from the last token that is here."""
        self._held.clear()
