"""The last ten minutes in a router: how many requests were as fast as `slo` wants, how long its line was, and which were slowest, and why.

Every request is noted once, at its end, in a few additions. What is kept has a bound whatever the load. On the event loop only.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

WINDOW_S = 600.0
BUCKET_S = 10.0
LATEST = 200  # requests that are shown one by one
SLOWEST = 8  # of each bucket


class RequestAccount(msgspec.Struct, frozen=True):
    """Where one request's time went, as its router saw it. The parts follow one another and add up to the whole."""

    request_id: str
    ended_at: float  # time of day
    reading_s: float  # checked, rendered, tokenized
    router_wait_s: float  # for a place
    node_wait_s: float  # in the line of the node that read the prompt
    prefill_s: float  # to the first token; with all that was tried before, where it moved
    handover_s: float  # until the decode node began; tokens do not wait for all of it
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
        return (
            self.reading_s
            + self.router_wait_s
            + self.node_wait_s
            + self.prefill_s
            + self.handover_s
            + self.decode_s
        )

    @property
    def first_token_s(self) -> float:
        return self.reading_s + self.router_wait_s + self.node_wait_s + self.prefill_s

    @property
    def token_s(self) -> float:
        """Between two of its tokens, on average; 0 for an answer of one."""
        return (
            (self.handover_s + self.decode_s) / max(self.output_tokens - 1, 1)
            if self.output_tokens > 1
            else 0.0
        )


class Targets(msgspec.Struct, frozen=True):
    """What users are to feel: the cluster's `slo`."""

    ttft_s: float
    inter_token_s: float

    def excess(self, account: RequestAccount) -> float:
        """How many times as long as wanted, in what was worse. A request without a token has missed by all that it waited."""
        return max(account.first_token_s / self.ttft_s, account.token_s / self.inter_token_s)


class SlowRequest(msgspec.Struct, frozen=True):
    account: RequestAccount
    excess: float
    cause: str


class Moment(msgspec.Struct):
    """Ten seconds."""

    began: float  # time of day
    ended: int = 0
    failed: int = 0
    first_in_time: int = 0
    tokens_in_time: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    worst_first_s: float = 0.0
    running: int = 0  # most at once
    queued: int = 0


class RecentRequests:
    def __init__(self, targets: Targets, time_of_day: Callable[[], float]) -> None:
        self.targets = targets
        self.now = time_of_day
        self._moments: deque[Moment] = deque(maxlen=int(WINDOW_S / BUCKET_S))
        self._slowest: deque[list[tuple[float, int, RequestAccount]]] = deque(maxlen=self._moments.maxlen)
        self._latest: deque[RequestAccount] = deque(maxlen=LATEST)
        self._count = 0  # decides between two that are equally slow

    def ended(self, account: RequestAccount) -> None:
        moment, targets = self._moment(), self.targets
        moment.ended += 1
        moment.failed += account.finish == "error"
        moment.prompt_tokens += account.prompt_tokens
        moment.output_tokens += account.output_tokens
        if account.output_tokens:
            moment.first_in_time += account.first_token_s <= targets.ttft_s
            moment.tokens_in_time += account.token_s <= targets.inter_token_s
            moment.worst_first_s = max(moment.worst_first_s, account.first_token_s)
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
        """How many there are now; called a few times a second."""
        moment = self._moment()
        moment.running = max(moment.running, running)
        moment.queued = max(moment.queued, queued)

    def moments(self) -> list[Moment]:
        """The last ten minutes, the oldest first. Times without any request are there, too."""
        self._moment()
        return list(self._moments)

    def latest(self) -> list[RequestAccount]:
        return list(self._latest)

    def slowest(self, count: int) -> list[SlowRequest]:
        self._moment()
        found = heapq.nlargest(count, (entry for slowest in self._slowest for entry in slowest))
        return [SlowRequest(account, excess, cause_of(account, self.targets)) for excess, _, account in found]

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
    """The names of what the time went to, in the order in which it did."""
    return (
        ("reading the request", account.reading_s),
        ("the router's line", account.router_wait_s),
        ("a node's line", account.node_wait_s),
        ("computing the prompt", account.prefill_s),
        ("the handover", account.handover_s),
        ("writing the answer", account.decode_s),
    )


def cause_of(account: RequestAccount, targets: Targets) -> str:
    """In a few words, what a slow request lost most of its time to."""
    if account.failovers:
        return "it moved to another node"
    if account.preemptions:
        return "it lost its blocks and was computed again"
    if not account.output_tokens and account.finish == "error":
        return "it failed"
    first = account.first_token_s / targets.ttft_s >= account.token_s / targets.inter_token_s
    parts = parts_of(account)[:4] if first else parts_of(account)[4:]
    name, seconds = max(parts, key=lambda part: part[1])
    if not first and account.longest_gap_s > seconds / 2:
        return "one gap in its answer"
    return name
