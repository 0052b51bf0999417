"""Computes each pool's load from what its nodes report, look by look."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.cluster.pools.autoscaling.rules import PoolLoad
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters, NodeStatus

# With fewer tokens a step's fixed cost dominates, and the rate says little about how fast prompts are computed.
_MIN_PROMPT_TOKENS = 64
_WEIGHT = 0.3  # of the newest observation


@dataclass(slots=True)
class _Seen:
    at: float
    epoch: int
    counters: NodeCounters


@dataclass(frozen=True, slots=True)
class _Work:
    """What a node did between two looks."""

    busy: float
    step_s: float
    answering_s: float
    tokens_per_s: float | None  # of prompts
    written_per_s: float


class LoadMeter:
    """Keeps the last `keep` looks at each pool."""

    def __init__(self, keep: int) -> None:
        self._seen: dict[str, _Seen] = {}
        self._rates: dict[Role, float] = {}  # prompt tokens per second that one node computes
        self._keep = keep
        self.history: dict[Role, deque[PoolLoad]] = {}

    def look(self, now: float, statuses: Sequence[NodeStatus], router_wait_s: float = 0.0) -> None:
        """`router_wait_s` is the longest wait in any router for room on a node that decodes."""
        # Decode nodes compute prompts themselves where no other node does it for them.
        alone = not any(status.role.reads_prompts and status.role.hands_over for status in statuses)
        for role in Role:
            mine = [status for status in statuses if status.role is role]
            if mine:
                load = self._load(now, role, mine, alone, router_wait_s)
                self.history.setdefault(role, deque(maxlen=self._keep)).append(load)
        known = {status.node_id for status in statuses}
        self._seen = {node_id: seen for node_id, seen in self._seen.items() if node_id in known}

    def _load(
        self, now: float, role: Role, statuses: Sequence[NodeStatus], alone: bool, router_wait_s: float
    ) -> PoolLoad:
        works = [work for status in statuses if (work := self._work(now, status)) is not None]
        for work in works:
            if work.tokens_per_s is not None:
                before = self._rates.get(role, work.tokens_per_s)
                self._rates[role] = (1 - _WEIGHT) * before + _WEIGHT * work.tokens_per_s
        # What is left of the prompts that a node computes is no wait where none is behind them.
        waiting = sum(status.waiting_tokens for status in statuses if status.waiting > status.loading)
        rate = self._rates.get(role)
        stepping = [work.step_s for work in works if work.step_s > 0]
        return PoolLoad(
            at=now,
            nodes=len(statuses),
            reads_prompts=role.reads_prompts or (alone and role.writes_answers),
            writes_tokens=role.writes_answers,
            queue_s=waiting / (rate * len(statuses)) if rate else 0.0,
            busy=_mean(work.busy for work in works),
            blocks=_mean(
                1 - (status.room_blocks + status.idle_blocks) / max(1, status.total_blocks) for status in statuses
            ),
            step_s=_mean(stepping),
            answering_s=_mean(work.answering_s for work in works if work.answering_s > 0),
            fixed_s=_mean(
                costs.saved_s
                for status in statuses
                if (costs := status.totals.step_costs) is not None and costs.rows_seen
            ),
            written_per_s=sum(work.written_per_s for work in works),
            wait_s=max(router_wait_s, _mean(status.oldest_wait_s for status in statuses))
            if role.writes_answers
            else 0.0,
        )

    def _work(self, now: float, status: NodeStatus) -> _Work | None:
        """Returns None at the first look at an incarnation."""
        before, counters = self._seen.get(status.node_id), status.totals
        self._seen[status.node_id] = _Seen(now, status.epoch, counters)
        if before is None or before.epoch != status.epoch or now <= before.at:
            return None
        # A pool has the size that users need. What runs when nothing else does makes do with what they leave.
        used_s, tokens = (now - then for now, then in zip(counters.reading, before.counters.reading, strict=True))
        used_s = max(0.0, used_s)
        steps, token_s = counters.steps - before.counters.steps, used_s
        steps -= counters.idle_steps - before.counters.idle_steps
        written = counters.output_tokens - before.counters.output_tokens
        written -= counters.idle_tokens_written - before.counters.idle_tokens_written
        answering = counters.decode_steps - before.counters.decode_steps
        answering_s = counters.decode_seconds - before.counters.decode_seconds
        if written < steps:
            # Some steps read a prompt while the node had no answer to write: no one waited for a token.
            steps, token_s = answering, answering_s
        return _Work(
            # A step that is still running counts with its age: `step_seconds` grows only when it ends.
            busy=min(1.0, max(used_s, status.step_age_s) / (now - before.at)),
            step_s=token_s / steps if steps > 0 else 0.0,
            answering_s=answering_s / answering if answering > 0 else 0.0,
            tokens_per_s=tokens / used_s if tokens >= _MIN_PROMPT_TOKENS and used_s > 0 else None,
            written_per_s=max(written, 0) / (now - before.at),
        )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
