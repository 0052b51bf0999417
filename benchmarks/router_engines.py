"""Engines that answer instantly, so that a request's time is the router's and the sockets'.

The thread that receives a Submit answers it with the first token. Further tokens come in steps, with one message per step for all running
requests, like a real engine's.
"""

from __future__ import annotations

import random
import threading
import time
from multiprocessing.connection import Connection

from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import NodeInfo, NodeState, Role, new_epoch
from tandem.wire.requests import (
    Cancel,
    NodeCounters,
    NodeStatus,
    Ping,
    Submit,
    TokenBatch,
    TokenChunk,
    ToNode,
    TransferRole,
)
from tandem.wire.sampling import FinishReason, TokenLogprobs
from tandem.wire.sockets import admit

MODEL = "instant"
TOKEN = 70
MOST_LOGPROBS = 20
_draw = random.Random(0)
_ROWS = [
    TokenLogprobs(
        TOKEN,
        -_draw.random(),
        1,
        [(_draw.randrange(256), -20 * _draw.random()) for _ in range(MOST_LOGPROBS)],
    )
    for _ in range(257)
]


class InstantNode:
    def __init__(self, node_id: str, role: Role, step_s: float) -> None:
        self._role = role
        self._step_s = step_s
        self._running: dict[str, tuple[Submit, int]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        epoch = new_epoch()
        self._channel = NumberedChannel("127.0.0.1", epoch, name=node_id)
        self.info = NodeInfo(
            node_id, role, epoch, self._channel.endpoint, "tcp://127.0.0.1:1", MODEL, 1 << 20, 16
        )
        self._channel.listen(self._on_message, begun=lambda endpoint: None, replaced=lambda endpoint: None)
        threading.Thread(target=self._steps, daemon=True).start()

    def _on_message(self, message: ToNode) -> None:
        if isinstance(message, Submit):
            self._on_submit(message)
        elif isinstance(message, Cancel):
            with self._lock:
                for request_id in message.request_ids:
                    self._running.pop(request_id, None)
        elif isinstance(message, Ping):
            status = NodeStatus(
                self.info.node_id, self._role, self.info.epoch, NodeState.READY, 10**6, 10**6, len(self._running),
                0, 0, 0, 0, 0.0, NodeCounters(),
            )  # fmt: skip
            self._channel.send(message.reply_to, status)

    def _on_submit(self, submit: Submit) -> None:
        alone = submit.transfer is None
        finish = None
        if submit.sampling.max_tokens == 1:
            finish = FinishReason.LENGTH
        elif submit.transfer is not None and submit.transfer.role is TransferRole.PRODUCE:
            finish = FinishReason.HANDOFF
        chunk = TokenChunk(
            submit.request_id, 0, [TOKEN], finish=finish, cached_tokens=0, logprobs=_logprobs(submit, 0)
        )
        self._send(submit.reply_to, [chunk])
        if finish is None and (alone or self._role is not Role.PREFILL):
            with self._lock:
                self._running[submit.request_id] = (submit, 1)
            self._wake.set()

    def _send(self, reply_to: str, chunks: list[TokenChunk]) -> None:
        self._channel.send(reply_to, TokenBatch(self.info.node_id, self.info.epoch, chunks))

    def _steps(self) -> None:
        while True:
            self._wake.wait()
            began = time.perf_counter()
            with self._lock:
                chunks = [self._next(request_id) for request_id in list(self._running)]
                reply_to = {submit.reply_to for submit, _ in self._running.values()}
                for chunk in chunks:
                    if chunk.finish is not None:
                        del self._running[chunk.request_id]
                if not self._running:
                    self._wake.clear()
            if chunks:
                self._send(next(iter(reply_to)), chunks)
            time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))

    def _next(self, request_id: str) -> TokenChunk:
        submit, index = self._running[request_id]
        self._running[request_id] = (submit, index + 1)
        finish = FinishReason.LENGTH if index + 1 >= submit.sampling.max_tokens else None
        return TokenChunk(request_id, index, [TOKEN], finish=finish, logprobs=_logprobs(submit, index))


def _logprobs(submit: Submit, index: int) -> list[TokenLogprobs] | None:
    """Returns different log-probabilities for different tokens, like a model's: equal ones would cost the router less."""
    count = submit.sampling.logprobs
    if count is None:
        return None
    row = _ROWS[index % len(_ROWS)]
    return [
        row if count == len(row.top) else TokenLogprobs(row.token_id, row.logprob, row.rank, row.top[:count])
    ]


def serve_engines(pipe: Connection, step_s: float) -> None:
    """Runs in a process of its own: sends its nodes' addresses, admits the keys that it gets, and serves until the pipe is closed."""
    nodes = [InstantNode("p0", Role.PREFILL, step_s), InstantNode("d0", Role.DECODE, step_s)]
    pipe.send([node.info for node in nodes])
    keys: set[str] = set()
    while True:
        try:
            keys.add(pipe.recv())
        except EOFError:
            return
        admit(keys)
        pipe.send("admitted")


class Engines(list[NodeInfo]):
    """The nodes of one process of instant engines."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(pipe.recv())
        self._pipe = pipe
        self.router_inbox = ""  # set when there is a router

    def admit(self, key: str) -> None:
        self._pipe.send(key)
        self._pipe.recv()
