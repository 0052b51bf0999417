"""Where one request's time went, as the process that spent it saw it. Only for requests that are traced."""

from __future__ import annotations

import enum

import msgspec


class TracePhase(enum.StrEnum):
    # the router
    READ = "read"  # the body has arrived and was checked
    TOKENIZE = "tokenize"  # the prompt is rendered and encoded
    WAIT = "wait"  # for a place among the running
    ROUTE = "route"  # nodes chosen and told
    FLUSH = "flush"  # from the tokens' arrival to their text on the connection
    # a node
    INBOX = "inbox"  # arrived, and the step under way not over
    QUEUE = "queue"  # in line, until the first step that works on it
    PREEMPTED = "preempted"  # it lost its blocks, and is in line again
    STEP = "step"  # one step of the engine that worked on it, with planning and booking
    PREFILL = "prefill"  # the forward pass of a step that read its prompt
    DECODE = "decode"  # the forward pass of a step that wrote for it
    RESUME = "resume"  # its KV is here, and the step that goes on from it has not begun
    # a transfer
    HANDSHAKE = (
        "handshake"  # the two nodes get to know each other's memory, once for all transfers between them
    )
    REGISTER = "register"  # the decode node's blocks are made known to the prefill node
    PLAN = "plan"  # both nodes' blocks are known, and none is computed yet
    WRITE = "write"  # one piece of KV: posted, until every byte has arrived
    NOTICE = "notice"  # the last word about the KV, until the decode node has taken it
    RECEIVE = "receive"  # the decode node's whole wait for KV


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Seconds on the recording process's monotonic clock."""

    phase: TracePhase
    start: float
    end: float
    tokens: int = 0  # of this request
    beside: int = 0  # tokens of others in the same step
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class TransferRecord(msgspec.Struct, frozen=True):
    """One transfer that has ended, as one of its two nodes saw it. What this node did not see, or the transfer never
    came to, is None."""

    request_id: str
    outcome: str  # "sent", "received", or why it ended otherwise
    num_bytes: int
    blocks: int
    descriptors: int = 0  # runs of bytes that were written
    bytes_overlapped: int = 0  # complete before the prompt's last forward pass was
    # The decode node's:
    handshake_s: float | None = None  # until it knew the prefill node's memory; 0 when it did already
    register_s: float | None = None  # from then, until the prefill node knew its blocks
    receive_s: float | None = None  # from its blocks to a handoff that verifies
    # The prefill node's:
    first_byte_s: float | None = None  # from both halves of the plan being there to the first write
    last_byte_s: float | None = None  # from the first write to the end of the last one
    handover_s: float | None = None  # from the end of the last forward pass to the decode node's acceptance

    def waits(self) -> dict[str, float]:
        """By stage, what was waited for."""
        stages = {
            "handshake": self.handshake_s,
            "register": self.register_s,
            "receive": self.receive_s,
            "first_byte": self.first_byte_s,
            "last_byte": self.last_byte_s,
            "handover": self.handover_s,
        }
        return {stage: seconds for stage, seconds in stages.items() if seconds is not None}


class TransferTrace(msgspec.Struct, frozen=True):
    """The same as moments."""

    record: TransferRecord
    spans: list[Span] = []


class NodeTrace(msgspec.Struct, frozen=True, tag="trace"):
    """A node's part in one traced request. Sent once, when the node is done with it, its transfer included."""

    node_id: str
    epoch: int
    request_id: str
    spans: list[Span]
    dropped: int = 0  # spans beyond what one request may have
    transfer: TransferRecord | None = None


class ClockReading(msgspec.Struct, frozen=True, tag="clock"):
    """The answer to a Ping that asked for it: what the node's monotonic clock said."""

    node_id: str
    epoch: int
    asked_at: float  # as the Ping said
    clock: float
