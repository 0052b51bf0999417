"""Background answers that another router began, read from the node that keeps them.

A router asks every node for an answer's id. A node that has the answer says so, and then sends its tokens
from any index on, as they come. When that node is lost or its attempt fails, the router asks all nodes again,
because the router that began the answer may have moved it to another node.
"""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from tandem.api.sequence import SequenceSpec
from tandem.base.errors import Cancelled, InternalError, NodeLost, Overloaded, TandemError
from tandem.base.shares import Shares
from tandem.router.config import RouterConfig
from tandem.router.dispatch.ledger import TokenLedger
from tandem.router.dispatch.life import LeftBehind
from tandem.router.dispatch.lives import FollowedAnswers
from tandem.router.links import Links
from tandem.router.pool import NodePool
from tandem.wire.nodes import NodeInfo
from tandem.wire.requests import KeepAnswer, Recalled, TokenChunk
from tandem.wire.sampling import FinishReason, TokenLogprobs

# How often an answer that failed on its node is looked for again: the router that began it may be moving it.
LOOKS = 3
BETWEEN_LOOKS_S = 0.5


# How many ids are looked for at once; each key has a share of them (`shares`). Each costs one message to
# every node, and a client can make ids up.
MOST_QUESTIONS = 64


class FoundAnswer(msgspec.Struct, frozen=True):
    """A node's reply that it keeps an answer."""

    node: NodeInfo
    keep: KeepAnswer
    broken: bool  # its last attempt failed on this node


class _Question:
    def __init__(self, unanswered: set[tuple[str, int]], owner: str) -> None:
        self.owner = owner  # who asked first
        self.unanswered = unanswered
        self.best: FoundAnswer | None = None
        self.answered = asyncio.Event()


class FollowedAnswer:
    """A background answer, read like a request's lives: one sequence, whose tokens come from the node that
    keeps it."""

    def __init__(self, recalls: Recalls, found: FoundAnswer, spec: SequenceSpec, owner: str) -> None:
        self.spec = spec
        self._owner = owner
        self.ledger = TokenLedger(wants_logprobs=False)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.cached_tokens: int | None = None
        self.finish: FinishReason | None = None
        self.error: TandemError | None = None
        self.ended = False
        self.found = found
        self.request_id = f"follow-{secrets.token_hex(16)}"
        self._recalls = recalls
        self._lost: TandemError | None = None
        self._looks = 0  # searches since the last token
        self._news = asyncio.Event()
        recalls.follow(self)

    @property
    def lives(self) -> list[FollowedAnswer]:
        return [self]

    async def news(self) -> None:
        """Waits until there is more to read or the answer has ended. After `patience_s` without news it sends
        Follow again; after another `patience_s` it looks for the answer on all nodes."""
        patience = self._recalls.patience_s
        asked = 0
        while not self._news.is_set():
            if self._lost is not None:
                await self._find_again(self._lost)
                continue
            try:
                async with asyncio.timeout(patience):
                    await self._news.wait()
            except TimeoutError:
                asked += 1
                if asked == 1:
                    self._recalls.follow(self)
                else:
                    self._lost = NodeLost(f"no word from {self.found.node.node_id}, which keeps the answer")
        self._news.clear()

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Any chunk also shows that the node has received the Follow."""
        if chunk.cached_tokens is not None:
            self.cached_tokens = chunk.cached_tokens
        if chunk.finish is FinishReason.ERROR or chunk.finish is FinishReason.ABORT:
            self.ledger.accept(msgspec.structs.replace(chunk, finish=None), may_differ=True)
            error = chunk.error.to_exception() if chunk.error is not None else InternalError("it failed")
            if isinstance(error, Cancelled) or self._looks >= LOOKS:
                self._end(FinishReason.ERROR, error)
            else:
                self._lose(error)
            return
        self.ledger.accept(chunk, may_differ=True)
        if self.ledger.finish is not None:
            self._end(self.ledger.finish, None)
        self._looks = 0
        self._news.set()

    def on_node_lost(self, why: str) -> None:
        self._lose(NodeLost(f"node {self.found.node.node_id}, which keeps the answer, is lost: {why}"))

    def _lose(self, error: TandemError) -> None:
        """Wakes the reader. It finds nothing new, calls `news` again, and `news` looks for the answer on all
        nodes."""
        if not self.ended:
            self._lost = error
            self._recalls.drop(self)
            self._news.set()

    async def _find_again(self, error: TandemError) -> None:
        """Looks for the answer on all nodes, up to LOOKS times, because its router may be moving it just now. If
        it still goes on nowhere, it has failed, and its last node says why. `error`: what is known so far."""
        self._looks += 1
        if self._looks > LOOKS:
            self._end(FinishReason.ERROR, error)
            return
        if self._looks > 1:
            await asyncio.sleep(BETWEEN_LOOKS_S)
        found = await self._recalls.find(self.found.keep.answer_id, self._owner)
        if found is not None and (not found.broken or self._looks == LOOKS):
            self._lost = None
            self.found = found
            self._recalls.follow(self)

    def stop(self) -> None:
        self._end(FinishReason.STOP, None)

    def fail(self, error: TandemError) -> None:
        self._end(FinishReason.ERROR, error)

    def cancel(self) -> None:
        """Ends the reading here. The answer itself goes on at its node."""
        self._end(FinishReason.ABORT, Cancelled("it is not read here"))

    def _end(self, finish: FinishReason, error: TandemError | None) -> None:
        if not self.ended:
            self.ended, self.finish, self.error = True, finish, error
            self._recalls.drop(self)
            self._news.set()


class Recalls(FollowedAnswers):
    """Asks nodes for kept answers and passes their replies to readers. Runs on the event loop only."""

    def __init__(self, config: RouterConfig, links: Links, pool: NodePool) -> None:
        self.patience_s = config.timeouts.token_idle / 2
        self._answer_s = config.heartbeat.silence
        self._links = links
        self._pool = pool
        self.questions: dict[str, _Question] = {}
        self._shares = Shares(MOST_QUESTIONS, alone=1)
        self._followed: dict[str, FollowedAnswer] = {}

    async def find(self, answer_id: str, owner: str) -> FoundAnswer | None:
        """Asks every node for the answer and returns the best reply, or None. A node replies between two
        steps. The search waits no longer than `heartbeat.silence`. Raises Overloaded when too many ids are
        looked for at once, or too many of this owner."""
        question = self.questions.get(answer_id)
        if question is None:
            if not self._shares.fits(owner, 1):
                raise Overloaded(
                    f"responses are being looked for that take up {self._shares.part(1)} {MOST_QUESTIONS} places; send this again later"
                )
            nodes = [member.info for member in self._pool.members if member.lost is None]
            question = _Question({(node.node_id, node.epoch) for node in nodes}, owner)
            if not nodes:
                return None
            self.questions[answer_id] = question
            self._shares.take(owner, 1)
            for node in nodes:
                self._links.recall(node, answer_id)
        try:
            async with asyncio.timeout(self._answer_s):
                await question.answered.wait()
        except TimeoutError:
            pass
        finally:
            if self.questions.get(answer_id) is question:
                del self.questions[answer_id]
                self._shares.take(question.owner, -1)
        return question.best

    def on_recalled(self, message: Recalled) -> None:
        question = self.questions.get(message.answer_id)
        member = self._pool.member(message.node_id)
        if question is None or member is None or member.info.epoch != message.epoch:
            return
        question.unanswered.discard((message.node_id, message.epoch))
        if message.keep is not None:
            found = FoundAnswer(member.info, message.keep, message.broken)
            if question.best is None or _rank(found) > _rank(question.best):
                question.best = found
        if not question.unanswered or (question.best is not None and not question.best.broken):
            question.answered.set()

    def begin(self, found: FoundAnswer, spec: SequenceSpec, owner: str) -> FollowedAnswer:
        return FollowedAnswer(self, found, spec, owner)

    def follow(self, answer: FollowedAnswer) -> None:
        self._followed[answer.request_id] = answer
        at, keep = len(answer.ledger.tokens), answer.found.keep
        self._links.follow(answer.found.node, answer.request_id, keep.answer_id, at)

    def drop(self, answer: FollowedAnswer) -> None:
        if self._followed.pop(answer.request_id, None) is not None:
            node = answer.found.node
            member = self._pool.member(node.node_id)
            if member is not None and member.info == node:
                self._links.cancel(node, answer.request_id)

    def end(self, answer_id: str, error: TandemError, *, forget: bool = False) -> None:
        """Ends the answer with this error on every node that keeps it; with `forget` the nodes drop it as well."""
        why = error.to_wire()
        for member in self._pool.members:
            if member.lost is None:
                self._links.end_answer(member.info, answer_id, why, forget=forget)

    def leave_all(self, error: TandemError) -> None:
        """Ends all readers; their clients may go on at another router."""
        for answer in list(self._followed.values()):
            answer.fail(LeftBehind(str(error)))

    def on_chunk(self, node_id: str, epoch: int, chunk: TokenChunk) -> bool:
        """A chunk for a reader that has gone is dropped, and is no stray."""
        answer = self._followed.get(chunk.request_id)
        if answer is None or (answer.found.node.node_id, answer.found.node.epoch) != (node_id, epoch):
            return chunk.request_id.startswith("follow-")
        answer.on_chunk(chunk)
        return True

    def on_line_broken(self, node: NodeInfo) -> None:
        """Follows again, from the first token that is missing here."""
        for answer in [one for one in self._followed.values() if one.found.node == node]:
            self.follow(answer)

    def on_node_lost(self, node: NodeInfo, why: str) -> None:
        for answer in [one for one in self._followed.values() if one.found.node == node]:
            answer.on_node_lost(why)


def _rank(found: FoundAnswer) -> tuple[bool, int]:
    return not found.broken, found.keep.attempt
