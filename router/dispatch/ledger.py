"""The output of one request, merged by index from whichever nodes report it."""

from __future__ import annotations

from tandem.router.dispatch.logprobs import LogprobStore
from tandem.wire.errors import InternalError
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason


class TokenMismatch(InternalError):
    """Two nodes reported different tokens for one index: one of the two answers is wrong."""


class TokenLedger:
    """Invariant: `tokens` is a gapless prefix of the output; with logprobs wanted, `logprobs` is as long.

    A chunk that leaves a gap, or lacks logprobs for tokens that are new, is held until another fills in what is
    missing: the decode node may report the first token, without logprobs, before the prefill node's report comes.
    """

    def __init__(self, *, wants_logprobs: bool) -> None:
        self.tokens: list[int] = []
        self.logprobs = LogprobStore()
        self.finish: FinishReason | None = None
        self.stop_token: int | None = None
        self._wants_logprobs = wants_logprobs
        self._held: list[TokenChunk] = []

    def accept(self, chunk: TokenChunk) -> bool:
        """Whether there is news: tokens, or the end. Raises TokenMismatch."""
        if not self._merge(chunk):
            self._held.append(chunk)
            return False
        news = True
        while self._held:
            held, self._held = self._held, []
            self._held = [waiting for waiting in held if not self._merge(waiting)]
            if len(self._held) == len(held):
                break
        return news

    def _merge(self, chunk: TokenChunk) -> bool:
        """False when it cannot be merged yet."""
        tokens, ids, start = self.tokens, chunk.token_ids, chunk.start
        have = len(tokens)
        if start != have:
            if start < 0:
                raise TokenMismatch(f"a node reported tokens from index {start}")
            if start > have:
                return False
            known = have - start
            if tokens[start : start + len(ids)] != ids[:known]:
                raise TokenMismatch(f"two nodes disagree about the tokens from index {start}")
            ids = ids[known:]
        if ids:
            if self._wants_logprobs:
                if chunk.logprobs is None:
                    return False
                self.logprobs.extend(chunk.logprobs[len(chunk.token_ids) - len(ids) :])
            tokens.extend(ids)
        if chunk.finish is FinishReason.STOP or chunk.finish is FinishReason.LENGTH:
            self.finish = chunk.finish
            self.stop_token = chunk.stop_token
        return True

    @property
    def waiting(self) -> bool:
        """Something was reported that cannot be merged yet."""
        return bool(self._held)

    def drop_held(self) -> None:
        """Another attempt begins: it reports everything again from the last token that is here."""
        self._held.clear()
