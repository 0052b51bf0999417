"""Fake nodes for router tests: they speak wire/ over real sockets, and make up their tokens without a model.

A token is a function of the prompt, the seed and the token's index, as with the stateless sampling of real nodes. So a test knows the
text that any request must get, whichever nodes serve it.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Sequence

from tandem.base.errors import WireError
from tandem.node.answers import GIVEN_UP, KeptAnswers
from tandem.node.config import AnswersConfig
from tandem.node.requests import keeps_here
from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import NodeInfo, NodeState, Role, new_epoch
from tandem.wire.pooling import Pooling, VectorModel
from tandem.wire.requests import (
    Ask,
    Cancel,
    EndAnswer,
    Follow,
    Holding,
    KVTransferParams,
    NodeCounters,
    NodeStatus,
    Recall,
    Recalled,
    Submit,
    TokenBatch,
    TokenChunk,
    ToNode,
    TransferRole,
    TurnEnded,
)
from tandem.wire.sampling import FinishReason, TokenLogprobs
from tandem.wire.tracing import ClockReading, NodeTrace, Span, TracePhase
from tandem.wire.versions import WIRE_VERSION

WAIT_S = 10.0

TokenRule = Callable[[Sequence[int], int, int], int]  # prompt, seed, index -> token


def hashed_token(low: int, high: int) -> TokenRule:
    """A rule that picks a token from `low` to `high` by a hash."""

    def rule(prompt: Sequence[int], seed: int, index: int) -> int:
        text = f"{list(prompt)}/{seed}/{index}".encode()
        return low + int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % (high - low)

    return rule


def scripted(tokens: Sequence[int]) -> TokenRule:
    """A rule that repeats these tokens."""
    return lambda prompt, seed, index: tokens[index % len(tokens)]


class Board:
    """Shared by the fake nodes in place of KV transfers: the first token of each prompt that a prefill node has handed off."""

    def __init__(self, rule: TokenRule, eos: int) -> None:
        self.rule = rule
        self.eos = eos
        self.changed = threading.Condition()
        self.arrived: dict[str, int] = {}  # transfer id -> first token

    def hand_off(self, transfer_id: str, token: int) -> None:
        with self.changed:
            self.arrived[transfer_id] = token
            self.changed.notify_all()


class _Running:
    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.next = len(submit.output_token_ids)
        self.started = False


class FakeNode:
    def __init__(
        self,
        node_id: str,
        role: Role,
        board: Board,
        *,
        model: str = "fake",
        max_model_len: int = 2048,
        mirrors: bool = False,
        pin_seconds: float = 0.0,
        vectors: VectorModel | None = None,
        wire_version: int = WIRE_VERSION,
        content: str = "",
    ) -> None:
        self.role = role
        self.board = board
        self._lock = board.changed
        self.pinged_at = 0.0  # when the router sent its latest ping
        self.begin_anew()
        self._running: dict[str, _Running] = {}
        self.answers = KeptAnswers(AnswersConfig(), self._send, time.monotonic)
        self._dead = False
        epoch = new_epoch()
        self._channel = NumberedChannel("127.0.0.1", epoch, name=node_id)
        self.info = NodeInfo(
            content=content,
            node_id=node_id,
            role=role,
            epoch=epoch,
            request_endpoint=self._channel.endpoint,
            peer_endpoint=f"peer://{node_id}",
            model=model,
            max_model_len=max_model_len,
            block_size=4,
            tier_endpoint=f"tier://{node_id}" if mirrors else "",
            mirrors=mirrors,
            pin_seconds=pin_seconds,
            vectors=vectors,
            wire_version=wire_version,
        )
        self._channel.listen(self._on_message, begun=self._list_requests, replaced=lambda endpoint: None)
        self._thread = threading.Thread(target=self._work, name=f"{node_id}-steps", daemon=True)
        self._thread.start()

    def begin_anew(self) -> None:
        """Has no fault and has heard nothing."""
        self.submits: list[Submit] = []
        self.cancels: list[str] = []
        self.ended_turns: list[TurnEnded] = []
        self.pings = 0
        self.asks = 0
        # Faults that tests switch on.
        self.refuse: WireError | None = None  # the answer to every Submit
        self.pause_at: int | None = None  # output index before which every request stops
        self.mute = False  # it answers no ping and sends no token
        self.wedged = False  # its engine hangs: it sends no token, and does not say what it holds
        self.hide_first_token = False  # it does not report the first token, as if the report were lost
        self.report_first_token_as: int | None = None
        # The output index at which requests fail, and the error
        self.error_at: tuple[int, WireError] | None = None
        self.errors_left = 1_000_000
        self.state = NodeState.READY
        self.status_fields: dict[str, object] = {}
        self.counters = NodeCounters()
        self.queue_s = 0.0  # how long traces say that each request waited here
        self.preemptions = 0
        self.clock_ahead = 0.0  # how far its clock is ahead of all others
        self.hide_traces = False
        self.forget_vectors = False  # requests for a vector end without one

    # --- for tests --------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
        with self._lock:
            if not self._lock.wait_for(condition, timeout_s):
                raise AssertionError(f"{self.info.node_id}: not within {timeout_s} s: {what}")

    def resume(self) -> None:
        with self._lock:
            self.pause_at = None
            self._lock.notify_all()

    def set(self, **behaviour: object) -> None:
        with self._lock:
            for name, value in behaviour.items():
                setattr(self, name, value)
            self._lock.notify_all()

    def report(self, submit: Submit, error: WireError) -> None:
        """Sends an error for any request, even one that is no longer here."""
        chunk = TokenChunk(submit.request_id, 0, [], finish=FinishReason.ERROR, error=error)
        with self._lock:
            self._send(submit.reply_to, [chunk])

    def say(self, submit: Submit, start: int, tokens: list[int], finish: FinishReason | None) -> None:
        """Sends a chunk that the node's work does not call for."""
        with self._lock:
            self._send(submit.reply_to, [TokenChunk(submit.request_id, start, tokens, finish=finish)])

    def forget(self, request_id: str) -> None:
        """Loses a request without a message, which a real node never does."""
        with self._lock:
            del self._running[request_id]

    def become(self, info: NodeInfo) -> None:
        """Becomes another incarnation at the same address, as after a restart."""
        with self._lock:
            self.info = info
            self._channel.lines.epoch = info.epoch

    @property
    def running(self) -> list[str]:
        with self._lock:
            return list(self._running)

    def kill(self) -> None:
        """Ends as after kill -9: sends nothing more, and closes its ports."""
        with self._lock:
            if self._dead:
                return
            self._dead = True
            self._running.clear()
            self._lock.notify_all()
        self._thread.join(WAIT_S)
        self._channel.close()

    # --- being a node -----------------------------------------------------------------------------------------

    def _list_requests(self, endpoint: str) -> None:
        position = self._channel.received(endpoint)
        with self._lock:
            if self.mute or self.wedged or self._dead:
                return
            held = {id: running.next for id, running in self._running.items() if running.submit.reply_to == endpoint}
            self._channel.send(endpoint, Holding(self.info.node_id, self.info.epoch, *position, requests=held))

    def _on_message(self, message: ToNode) -> None:
        if isinstance(message, Ask):
            self.asks += 1
            self._list_requests(message.reply_to)
            return
        with self._lock:
            if isinstance(message, Submit):
                self.submits.append(message)
                if self.refuse is not None:
                    chunk = TokenChunk(message.request_id, 0, [], finish=FinishReason.ERROR, error=self.refuse)
                    self._send(message.reply_to, [chunk])
                else:
                    self._running[message.request_id] = _Running(message)
                    if keeps_here(message):
                        self.answers.begin(message)
            elif isinstance(message, Cancel):
                self.cancels.extend(message.request_ids)
                self.answers.cancelled(message.request_ids)
                for request_id in message.request_ids:
                    if self._running.pop(request_id, None) is not None:
                        self.answers.end(request_id, GIVEN_UP)
            elif isinstance(message, Recall):
                keep, broken = self.answers.recall(message.answer_id)
                found = Recalled(self.info.node_id, self.info.epoch, message.answer_id, keep, broken)
                if not self.mute:
                    self._channel.send(message.reply_to, found)
            elif isinstance(message, Follow):
                self.answers.follow(message)
            elif isinstance(message, EndAnswer):
                self._end_answer(message)
            elif isinstance(message, TurnEnded):
                self.ended_turns.append(message)
            else:
                self.pings += 1
                self.pinged_at = message.asked_at or 0.0
                self._send_status(message.reply_to)
                if message.asked_at is not None and not self.mute:
                    self._channel.send(
                        message.reply_to,
                        ClockReading(self.info.node_id, self.info.epoch, message.asked_at, self._now()),
                    )
            self._lock.notify_all()

    def _end_answer(self, message: EndAnswer) -> None:
        request_id = self.answers.request_of(message.answer_id)
        running = self._running.pop(request_id, None) if request_id is not None else None
        error = message.error.to_exception()
        if running is not None:
            self.answers.end(running.submit.request_id, error)
            end = FinishReason.ERROR
            chunk = TokenChunk(running.submit.request_id, running.next, [], finish=end, error=error.to_wire())
            self._send(running.submit.reply_to, [chunk])
        self.answers.settle(message.answer_id, error)
        if message.forget:
            self.answers.forget(message.answer_id)

    def _now(self) -> float:
        return time.monotonic() + self.clock_ahead

    def tell_trace(self, submit: Submit) -> None:
        """Sends a trace with one span: the moment of the request's last token."""
        now = self._now()
        span = Span(TracePhase.PREFILL if self.role is Role.PREFILL else TracePhase.DECODE, now - 0.001, now, 1)
        self._channel.send(submit.reply_to, NodeTrace(self.info.node_id, self.info.epoch, submit.request_id, [span]))

    def _send_status(self, reply_to: str) -> None:
        if self.mute:
            return
        fields: dict[str, object] = {
            "free_blocks": 1000,
            "total_blocks": 1000,
            "running": len(self._running),
            "waiting": 0,
            "waiting_tokens": 0,
            "transfers": 0,
            "held_blocks": 0,
            "step_age_s": 0.0,
            "counters": self.counters,
        } | self.status_fields
        self._channel.send(
            reply_to,
            NodeStatus(self.info.node_id, self.role, self.info.epoch, self.state, **fields),  # type: ignore[arg-type]
        )

    def _send(self, reply_to: str, chunks: list[TokenChunk]) -> None:
        if not self.mute:
            self._channel.send(reply_to, TokenBatch(self.info.node_id, self.info.epoch, chunks))

    def _work(self) -> None:
        with self._lock:
            while not self._dead:
                batches = self._step()
                for reply_to, chunks in batches.items():
                    self._send(reply_to, chunks)
                if not batches:
                    self._lock.wait()
                else:
                    self._lock.notify_all()
                    self._lock.release()
                    time.sleep(0)  # let other threads run: all fake nodes share one lock
                    self._lock.acquire()

    def _step(self) -> dict[str, list[TokenChunk]]:
        """Makes one token for each request that can go on."""
        batches: dict[str, list[TokenChunk]] = {}
        for request_id, running in list(self._running.items()):
            chunk = self.advance(running)
            if chunk is None:
                continue
            if chunk.finish is not None:
                del self._running[request_id]
                if running.submit.trace and not self.hide_traces:
                    self.tell_trace(running.submit)
            self.answers.add(chunk)
            if not (self.hide_first_token and self.role is Role.PREFILL):
                batches.setdefault(running.submit.reply_to, []).append(chunk)
            else:
                batches.setdefault(running.submit.reply_to, [])
        return batches

    def advance(self, running: _Running) -> TokenChunk | None:
        submit, index = running.submit, running.next
        if self.wedged or (self.pause_at is not None and index >= self.pause_at):
            return None
        if self.error_at is not None and index >= self.error_at[0] and self.errors_left > 0:
            self.errors_left -= 1
            return TokenChunk(submit.request_id, index, [], finish=FinishReason.ERROR, error=self.error_at[1])
        transfer = submit.transfer
        if transfer is not None and transfer.role is TransferRole.CONSUME and not running.started:
            first = self.board.arrived.get(transfer.transfer_id)
            if first is None:
                return None
            running.started, running.next = True, index + 1
            return TokenChunk(submit.request_id, index, [first])  # as its connector told it: without logprobs
        if submit.pooling is not None:
            vector = None if self.forget_vectors else fake_vector(submit.prompt_token_ids, submit.pooling)
            cached = self._start(running)
            return TokenChunk(submit.request_id, 0, [], FinishReason.STOP, cached_tokens=cached, vector=vector)
        token = self.board.rule(submit.prompt_token_ids, submit.sampling.seed, index)
        if self.report_first_token_as is not None and index == 0:
            token = self.report_first_token_as
        running.next = index + 1
        finish = self._finish(submit, token, running.next)
        if transfer is not None and transfer.role is TransferRole.PRODUCE and finish is None:
            finish = FinishReason.HANDOFF
            self._hand_off(transfer, submit, index)
        return TokenChunk(
            submit.request_id,
            index,
            [token],
            finish=finish,
            stop_token=token if finish is FinishReason.STOP else None,
            logprobs=[fake_logprobs(token, submit.sampling.logprobs)] if submit.sampling.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs(submit) if not running.started else None,
            cached_tokens=self._start(running),
            queue_s=self.queue_s,
            preemptions=self.preemptions if finish is not None else 0,
        )

    def _hand_off(self, transfer: KVTransferParams, submit: Submit, index: int) -> None:
        token = self.board.rule(submit.prompt_token_ids, submit.sampling.seed, index)
        self.board.hand_off(transfer.transfer_id, token)

    def _start(self, running: _Running) -> int | None:
        if running.started:
            return None
        running.started = True
        return len(running.submit.prompt_token_ids) // self.info.block_size

    def _finish(self, submit: Submit, token: int, length: int) -> FinishReason | None:
        sampling = submit.sampling
        if length > sampling.min_tokens and (
            (token == self.board.eos and not sampling.ignore_eos) or token in sampling.stop_token_ids
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= sampling.max_tokens else None

    def _prompt_logprobs(self, submit: Submit) -> list[TokenLogprobs | None] | None:
        wanted = submit.sampling.prompt_logprobs
        if wanted is None:
            return None
        return [None, *(fake_logprobs(token, wanted) for token in submit.prompt_token_ids[1:])]


VECTOR_SIZE = 8


def fake_vector(prompt: Sequence[int], pooling: Pooling) -> bytes:
    """Counts the prompt's tokens by their remainders, so that texts that share words get similar vectors."""
    counts = [0.0] * VECTOR_SIZE
    for token in prompt:
        counts[token % VECTOR_SIZE] += 1
    counts = counts[: pooling.dimensions]
    length = sum(count * count for count in counts) ** 0.5 or 1.0
    return struct.pack(f"<{len(counts)}f", *(count / length for count in counts))


def fake_logprobs(token: int, alternatives: int) -> TokenLogprobs:
    logprob = -0.25 - token % 7
    return TokenLogprobs(token, logprob, 1, [(token + at, logprob - at) for at in range(alternatives)])
