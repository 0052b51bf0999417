"""The last ten minutes of a router: how many requests met the `slo`, how long the line was, which requests were slowest,
and why, and what went wrong.

Each request is noted once, at its end, by a few additions, and memory is bounded at any load. Runs on the event loop only.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from tandem.base.errors import Cancelled, Unavailable
from tandem.wire.forecasts import MeasuredRequest
from tandem.wire.nodes import PoolReport

WINDOW_S = 600.0
BUCKET_S = 10.0
LATEST = 200  # how many requests are shown one by one
SLOWEST = 8  # kept of each bucket
TROUBLES = 40  # kinds of trouble that are kept
TEXT_SHOWN = 200

# What to do about the cause of a slow request, beside it on the page. The alerts say the same.
ADVICE = {
    "reading the request": "Give the router's machine more cores, or set `router.processes`.",
    "the router's line": "No decode node has the blocks for it: add a decode node, or raise `cache.memory_bytes`.",
    "a node's line": "Prefill nodes have more prompts than they can read: add a prefill node.",
    "computing the prompt": "Add a prefill node, or send shorter prompts; prefixes that repeat are read once.",
    "the handover": "Look at the network between the pools: `tandem trace` shows what the transfer waited for.",
    "writing the answer": "Decode nodes are too full: add a decode node, or lower `scheduler.step_target_ms`.",
    "one gap in its answer": "A node stood still: its log and `tandem trace` say why.",
    "it moved to another node": "The router's log names the node that was lost; `tandem status` says why.",
    "it lost its blocks and was computed again": "`scheduler.reserve: sequence` admits fewer requests; another decode node keeps them all.",
    "it failed": "The router's and the node's log have its id: `tandem logs --request ID`.",
}


class RequestAccount(msgspec.Struct, frozen=True):
    """Where one request's time went, as its router saw it. The parts follow one another and add up to the
    whole."""

    request_id: str
    ended_at: float  # time of day
    reading_s: float  # checking, rendering and tokenizing
    router_wait_s: float  # for a place
    node_wait_s: float  # in the line of the node that computes the prompt
    prefill_s: float  # until the first token; for a request that moved, with all earlier attempts
    handover_s: float  # until the decode node began; not every token waits for it
    decode_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    longest_gap_s: float  # between two reports of its tokens
    prefill_node: str
    decode_node: str
    decision: str
    preemptions: int
    failovers: int
    finish: str
    traced: bool

    @property
    def total_s(self) -> float:
        return self.reading_s + self.router_wait_s + self.node_wait_s + self.prefill_s + self.handover_s + self.decode_s

    @property
    def began_at(self) -> float:
        return self.ended_at - self.total_s

    @property
    def first_token_s(self) -> float:
        return self.reading_s + self.router_wait_s + self.node_wait_s + self.prefill_s

    @property
    def token_s(self) -> float:
        """The mean time between two tokens; 0 for an answer of one token."""
        return (self.handover_s + self.decode_s) / max(self.output_tokens - 1, 1) if self.output_tokens > 1 else 0.0

    @property
    def is_whole(self) -> bool:
        """Whether it was answered to its end."""
        return self.output_tokens > 0 and self.finish not in ("abort", "error")


class Targets(msgspec.Struct, frozen=True):
    """The cluster's `slo`."""

    ttft_s: float
    inter_token_s: float

    def excess(self, account: RequestAccount) -> float:
        """Returns how many times as long as its target the request took, by the worse of both targets. For a
        request without a token, all of its wait counts."""
        return max(account.first_token_s / self.ttft_s, account.token_s / self.inter_token_s)


class SlowRequest(msgspec.Struct, frozen=True):
    account: RequestAccount
    excess: float
    cause: str
    advice: str = ""


class Trouble(msgspec.Struct, frozen=True):
    """Something that went wrong, and how often: requests refused or failed in the same way, requests that moved
    away from a node, or a node that stopped serving."""

    at: float  # time of day, of the last time
    what: str  # its kind: "refused", "failed", "moved" or "node"
    request_id: str  # of the last one; "" for a node
    status: int  # of the answer; 0 for a node
    code: str
    node: str  # "" where no node has to do with it
    text: str
    count: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        return (self.what, self.status, self.code, self.node)


class Moment(msgspec.Struct):
    """The figures of ten seconds."""

    began: float  # time of day
    ended: int = 0
    failed: int = 0  # of those that ended
    errors: int = 0  # answers that failed, with a status or in the middle
    refused: int = 0  # answers with a status from 400 on that are no errors of the server, and 503
    moved: int = 0  # times that a request went on at another node
    restarts: int = 0  # nodes that stopped serving and were started again
    first_in_time: int = 0
    tokens_in_time: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    worst_first_s: float = 0.0
    running: int = 0  # the most at once
    queued: int = 0


class RecentRequests:
    """The requests of the last ten minutes, summed up in moments of ten seconds."""

    def __init__(self, targets: Targets, time_of_day: Callable[[], float]) -> None:
        self.targets = targets
        self.now = time_of_day
        self._moments: deque[Moment] = deque(maxlen=int(WINDOW_S / BUCKET_S))
        self._slowest: deque[list[tuple[float, int, RequestAccount]]] = deque(maxlen=self._moments.maxlen)
        self._latest: deque[RequestAccount] = deque(maxlen=LATEST)
        self._count = 0  # breaks ties between equally slow requests
        self._troubles: dict[tuple[object, ...], Trouble] = {}  # the latest last
        # By node: "down" or "left_out", as the controller said last
        self._out: dict[str, str] = {}

    def answered(self, request_id: str, status: int, code: str, text: str) -> None:
        """Notes an answer that was refused or failed. A request that its client left is neither."""
        if status == Cancelled.http_status:
            return
        moment = self._moment()
        if 400 <= status < 500 or status == Unavailable.http_status:
            moment.refused += 1
            self._add(Trouble(self.now(), "refused", request_id, status, code, "", text))
            return
        moment.errors += 1
        known = (one for one in reversed(self._latest) if one.request_id == request_id)
        account = next(known, None)
        node = (account.decode_node or account.prefill_node) if account is not None else ""
        self._add(Trouble(self.now(), "failed", request_id, status, code, node, text))

    def pools_are(self, reports: Sequence[PoolReport]) -> None:
        """Notes nodes that have stopped serving since the controller's last report."""
        out = {name: ("down", why) for report in reports for name, why in report.down.items()}
        left_out = {name: ("left_out", why) for report in reports for name, why in report.left_out.items()}
        for name, (code, why) in (out | left_out).items():
            if self._out.get(name) != code:
                self._moment().restarts += code == "down"
                self._add(Trouble(self.now(), "node", "", 0, code, name, why))
        self._out = {name: code for name, (code, _) in (out | left_out).items()}

    def _add(self, one: Trouble) -> None:
        before = self._troubles.pop(one.key, None)
        count = one.count + (before.count if before is not None and one.at - before.at < WINDOW_S else 0)
        self._troubles[one.key] = msgspec.structs.replace(one, text=one.text[:TEXT_SHOWN], count=count)
        while len(self._troubles) > TROUBLES:
            del self._troubles[next(iter(self._troubles))]

    def troubles(self) -> list[Trouble]:
        """Returns what went wrong in the last ten minutes, the latest first."""
        since = self.now() - WINDOW_S
        return [one for one in reversed(self._troubles.values()) if one.at > since]

    def ended(self, account: RequestAccount) -> None:
        moment, targets = self._moment(), self.targets
        moment.ended += 1
        has_failed = account.finish == "error"
        moment.failed += has_failed
        if account.failovers and not has_failed:
            moment.moved += account.failovers
            text = f"it went on there, after {account.prefill_node or 'no node'} had read its prompt"
            self._add(Trouble(self.now(), "moved", account.request_id, 200, "moved", account.decode_node, text))
        moment.prompt_tokens += account.prompt_tokens
        moment.output_tokens += account.output_tokens
        if account.output_tokens and not has_failed:
            first_s = account.first_token_s
            moment.first_in_time += first_s <= targets.ttft_s
            moment.tokens_in_time += account.token_s <= targets.inter_token_s
            moment.worst_first_s = max(moment.worst_first_s, first_s)
        self._latest.append(account)
        if account.finish == "abort":
            return  # its client decided how long it took
        self._count += 1
        slowest, entry = self._slowest[-1], (targets.excess(account), self._count, account)
        if len(slowest) < SLOWEST:
            heapq.heappush(slowest, entry)
        elif entry[0] > slowest[0][0]:
            heapq.heapreplace(slowest, entry)

    def sample(self, running: int, queued: int) -> None:
        """Notes how many requests run and wait now. Called with every ping."""
        moment = self._moment()
        moment.running = max(moment.running, running)
        moment.queued = max(moment.queued, queued)

    def moments(self) -> list[Moment]:
        """Returns the last ten minutes, the oldest first, with empty moments for times without requests."""
        self._moment()
        return list(self._moments)

    def latest(self) -> list[RequestAccount]:
        return list(self._latest)

    def measured(self, within_s: float) -> list[MeasuredRequest]:
        """Returns the requests that were answered whole within the last `within_s`, of those that are shown one by one."""
        now = self.now()
        return [
            MeasuredRequest(one.request_id, now - one.ended_at, one.total_s, one.first_token_s, one.token_s)
            for one in self._latest
            if one.is_whole and now - one.ended_at <= within_s
        ]

    def slowest(self, count: int) -> list[SlowRequest]:
        self._moment()
        found = heapq.nlargest(count, (entry for slowest in self._slowest for entry in slowest))
        causes = [(account, excess, cause_of(account, self.targets)) for excess, _, account in found]
        return [SlowRequest(account, excess, cause, ADVICE.get(cause, "")) for account, excess, cause in causes]

    def _moment(self) -> Moment:
        began = self.now() // BUCKET_S * BUCKET_S
        if self._moments and began - self._moments[-1].began > WINDOW_S:
            self._moments.clear()
            self._slowest.clear()
        while not self._moments or self._moments[-1].began < began:
            self._moments.append(Moment(self._moments[-1].began + BUCKET_S if self._moments else began))
            self._slowest.append([])
        return self._moments[-1]


def parts_of(account: RequestAccount) -> Sequence[tuple[str, float]]:
    """Returns the names and lengths of a request's phases, in their order."""
    return (
        ("reading the request", account.reading_s),
        ("the router's line", account.router_wait_s),
        ("a node's line", account.node_wait_s),
        ("computing the prompt", account.prefill_s),
        ("the handover", account.handover_s),
        ("writing the answer", account.decode_s),
    )


def cause_of(account: RequestAccount, targets: Targets) -> str:
    """Returns in a few words what took most of a slow request's time."""
    if account.finish == "error":
        return "it failed"
    if account.failovers:
        return "it moved to another node"
    if account.preemptions:
        return "it lost its blocks and was computed again"
    first = account.first_token_s / targets.ttft_s >= account.token_s / targets.inter_token_s
    parts = parts_of(account)[:4] if first else parts_of(account)[4:]
    name, seconds = max(parts, key=lambda part: part[1])
    if not first and account.longest_gap_s > seconds / 2:
        return "one gap in its answer"
    return name
