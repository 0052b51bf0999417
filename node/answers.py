"""Background answers: the node keeps their tokens, up to `answers.kept_bytes`, for any router that asks by answer id."""

from __future__ import annotations

import dataclasses
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

from tandem.base.errors import Cancelled, NodeLost, TandemError, Unavailable, WireError
from tandem.node.config import AnswersConfig
from tandem.wire.requests import Follow, KeepAnswer, Submit, TokenChunk
from tandem.wire.sampling import FinishReason

_ANSWER_BYTES = 1024  # one answer's share of the limit, besides its note and its tokens
_TOKEN_BYTES = 4

# The end of an attempt that its router gave up. The router goes on elsewhere, or says by EndAnswer how the answer ends.
GIVEN_UP = Unavailable("its router has given this attempt up")


@dataclasses.dataclass(slots=True)
class _Answer:
    keep: KeepAnswer
    request_id: str
    tokens: array[int]
    finish: FinishReason | None = None
    stop_token: int | None = None
    error: WireError | None = None
    cached_tokens: int | None = None
    ended_at: float | None = None
    # The follower's request id -> the address where its router listens.
    followers: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        return _ANSWER_BYTES + len(self.keep.note) + _TOKEN_BYTES * len(self.tokens)

    def chunk(self, request_id: str, after: int) -> TokenChunk:
        """The tokens from index `after` on, and the finish reason or error if the answer has ended."""
        return TokenChunk(
            request_id,
            min(after, len(self.tokens)),
            self.tokens[after:].tolist(),
            finish=self.finish,
            stop_token=self.stop_token,
            error=self.error,
            cached_tokens=self.cached_tokens,
        )


class KeptAnswers:
    """Used by the step thread alone. An answer in progress is never dropped to make room; a new answer is refused."""

    def __init__(
        self, config: AnswersConfig, send: Callable[[str, list[TokenChunk]], None], clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._send = send
        self._clock = clock
        # By answer id. An answer moves to the end when it ends, so the ended answers stand in the order of their ends.
        self._kept: OrderedDict[str, _Answer] = OrderedDict()
        self._running: dict[str, _Answer] = {}  # by the id of the request that computes it
        self._followed: dict[str, _Answer] = {}  # by the follower's request id

    # --- the request that computes an answer

    def begin(self, submit: Submit) -> None:
        """Begins to keep an answer. Raises Unavailable when there is no room for it, or when a later attempt is already here."""
        keep = submit.keep
        assert keep is not None
        before = self._kept.get(keep.answer_id)
        if before is not None:
            if before.keep.attempt > keep.attempt:
                raise Unavailable("a later attempt of this answer is here")
            self._drop(before, NodeLost("the answer begins again"))
        answer = _Answer(keep, submit.request_id, array("i", submit.output_token_ids))
        self._make_room(answer.size)
        self._kept[keep.answer_id] = answer
        self._running[submit.request_id] = answer

    def add(self, update: TokenChunk) -> None:
        """Keeps a chunk that the request's router gets as well, and sends the new part to the followers. Ignores other requests."""
        answer = self._running.get(update.request_id)
        if answer is None:
            return
        had = len(answer.tokens)
        new = update.token_ids[max(0, had - update.start) :] if update.start <= had else []
        answer.tokens.extend(new)
        if update.cached_tokens is not None:
            answer.cached_tokens = update.cached_tokens
        if update.finish is not None:
            answer.finish, answer.stop_token, answer.error = update.finish, update.stop_token, update.error
        for request_id, reply_to in answer.followers.items():
            self._send(reply_to, [answer.chunk(request_id, had)])
        if update.finish is not None:
            self._ended(answer)

    def end(self, request_id: str, error: TandemError) -> None:
        """Ends a running answer with an error, because its request ended without a last chunk."""
        answer = self._running.get(request_id)
        if answer is not None:
            index = len(answer.tokens)
            self.add(TokenChunk.failed(request_id, index, error.to_wire()))

    def settle(self, answer_id: str, error: TandemError) -> None:
        """The answer has ended for good, with this error. An attempt that ended with another one, because its router gave it up
        or it failed here alone, has this one from now on."""
        answer = self._kept.get(answer_id)
        if answer is not None and answer.error is not None:
            answer.error = error.to_wire()

    def end_all(self, error: TandemError) -> None:
        for request_id in list(self._running):
            self.end(request_id, error)

    def _ended(self, answer: _Answer) -> None:
        answer.ended_at = self._clock()
        del self._running[answer.request_id]
        self._unfollow(list(answer.followers))
        self._kept.move_to_end(answer.keep.answer_id)

    # --- routers

    def recall(self, answer_id: str) -> tuple[KeepAnswer | None, bool]:
        """Returns what its Submit said of the answer, and whether the answer ended with an error. (None, False) if it is not here."""
        self._expire()
        answer = self._kept.get(answer_id)
        return (answer.keep, answer.error is not None) if answer is not None else (None, False)

    def follow(self, message: Follow) -> None:
        """Sends the router the tokens so far at once, which also confirms that it follows the answer."""
        self._expire()
        answer = self._kept.get(message.answer_id)
        if answer is None:
            gone = Unavailable("this node does not keep the answer any more").to_wire()
            chunk = TokenChunk.failed(message.request_id, message.after, gone)
        else:
            chunk = answer.chunk(message.request_id, message.after)
            if answer.ended_at is None:
                answer.followers[message.request_id] = message.reply_to
                self._followed[message.request_id] = answer
        self._send(message.reply_to, [chunk])

    def request_of(self, answer_id: str) -> str | None:
        """The id of the request that computes the answer now; None if it has ended or is not here."""
        answer = self._kept.get(answer_id)
        return answer.request_id if answer is not None and answer.ended_at is None else None

    def forget(self, answer_id: str) -> None:
        """Drops an answer for good; its request must have ended."""
        answer = self._kept.get(answer_id)
        if answer is not None:
            self._drop(answer, Cancelled("the answer was deleted"))

    def cancelled(self, request_ids: Iterable[str]) -> None:
        """A router has cancelled these requests: send nothing more to those of them that are followers."""
        self._unfollow(request_ids)

    def router_lost(self, reply_to: str) -> None:
        self._unfollow([id for id, answer in self._followed.items() if answer.followers.get(id) == reply_to])

    def _unfollow(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            answer = self._followed.pop(request_id, None)
            if answer is not None:
                answer.followers.pop(request_id, None)

    # --- how much is kept

    @property
    def size(self) -> int:
        return sum(answer.size for answer in self._kept.values())

    def _drop(self, answer: _Answer, why: TandemError) -> None:
        self.end(answer.request_id, why)
        self._kept.pop(answer.keep.answer_id, None)

    def _expire(self) -> None:
        oldest = self._clock() - self._config.kept_s
        for answer in list(self._kept.values()):
            if answer.ended_at is not None and answer.ended_at < oldest:
                del self._kept[answer.keep.answer_id]

    def _make_room(self, wanted: int) -> None:
        """Drops ended answers, the oldest first, until `wanted` more bytes fit. Raises Unavailable if they do not fit even then.

        An answer in progress grows without asking for room; its growth counts here, when the next answer begins."""
        self._expire()
        size = self.size + wanted
        for answer in list(self._kept.values()):
            if size <= self._config.kept_bytes:
                return
            if answer.ended_at is not None:
                size -= answer.size
                del self._kept[answer.keep.answer_id]
        if size > self._config.kept_bytes:
            raise Unavailable(
                f"the background answers that are being made here take up the {self._config.kept_bytes} bytes for them"
            )
