"""A prefill and a decode engine in two processes on one device with NIXL between them, compared with one engine that does both.

On one card the two share its processors. So this shows that the answers are the same, how long a handover takes after a prompt's last chunk, and
that long prompts do not pause other answers. It does not show how much faster two cards are.
"""

from __future__ import annotations

import importlib.util
import statistics
import threading
import time
from pathlib import Path

import msgspec

from benchmarks.gpu_report import Dtype, Report
from benchmarks.lib.engines import greedy, random_prompts, request_of
from benchmarks.lib.processes import Remote
from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.wire.endpoints import key_of
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import KVTransferParams, TransferRole

_PATIENCE_S = 60.0  # for answers
_LONGEST_WAIT_S = 0.2
HANDOVER_MS = 5.0  # of 4,096 tokens, after the last chunk: docs/gpu.md


class Ask(msgspec.Struct, frozen=True):
    name: str
    prompt: list[int]
    tokens: int
    after_s: float = 0.0  # how long after the others it is sent


class Told(msgspec.Struct):
    """One request's tokens and their times, on CLOCK_MONOTONIC, which all processes of a machine share."""

    asked: float
    tokens: list[int] = msgspec.field(default_factory=list)
    times: list[float] = msgspec.field(default_factory=list)


class Plan(msgspec.Struct, frozen=True):
    model: ModelConfig
    cache: CacheConfig
    scheduling: SchedulerConfig
    native: bool


def missing() -> str | None:
    """Returns what the two processes need and this machine lacks; None if nothing."""
    absent = [name for name in ("nixl", "zmq") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def drive(
    engine: Engine,
    asks: list[Ask],
    wake: threading.Event | None = None,
    transfers: dict[str, KVTransferParams] | None = None,
) -> dict[str, Told]:
    """Runs steps until all requests are answered and nothing is held for a peer. `wake` is set when a transfer has gone on."""
    began, told, wake = time.monotonic(), dict[str, Told](), wake or threading.Event()
    waiting, left = sorted(asks, key=lambda ask: ask.after_s), {ask.name for ask in asks}
    while left or engine.scheduler.has_work():
        now = time.monotonic()
        if now > began + _PATIENCE_S:
            raise TimeoutError(f"not answered: {', '.join(sorted(left))}")
        while waiting and now >= began + waiting[0].after_s:
            ask = waiting.pop(0)
            told[ask.name] = Told(now)
            transfer = (transfers or {}).get(ask.name)
            engine.add_request(request_of(ask.name, ask.prompt, greedy(ask.tokens), transfer=transfer))
        wake.clear()
        result = engine.step()
        now = time.monotonic()
        for update in result.updates:
            if update.error is not None:
                raise RuntimeError(f"{update.request_id}: {update.error}")
            known = told[update.request_id]
            known.tokens += update.token_ids
            known.times += [now] * len(update.token_ids)
            if update.finish is not None:
                left.discard(update.request_id)
        if not result.progressed and not result.ask_again:
            next_ask = waiting[0].after_s + began - now if waiting else _LONGEST_WAIT_S
            wake.wait(max(0.0, min(_LONGEST_WAIT_S, next_ask)))
    return told


class PairedEngine:
    """One of the two engines, in a process of its own."""

    def __init__(self, name: str, epoch: int, plan: Plan) -> None:
        from tandem.kvtransfer.base import ConnectorContext
        from tandem.kvtransfer.config import TransferConfig
        from tandem.kvtransfer.registry import find_connector

        cache, config = plan.cache, plan.scheduling
        runner = load_runner(plan.model, cache, config, native=plan.native)
        self._wake = threading.Event()
        context = ConnectorContext(name, epoch, "127.0.0.1", cache.block_size, TransferConfig(), self._wake.set)
        planner, mover = find_connector("nixl")(context)
        info = runner.info
        scheduler = Scheduler(config, cache, info.groups, info.num_blocks, info.max_model_len, connector=planner)
        self._engine = Engine(scheduler, runner, mover, ahead=config.plans_ahead(info.device))
        self._address = PeerAddress(name, epoch, mover.peer_endpoint)

    def address(self) -> PeerAddress:
        return self._address

    def meet(self, peer: PeerAddress) -> None:
        from tandem.wire.sockets import admit  # needs ZMQ, as the connector does

        self._peer = peer
        admit([key_of(peer.endpoint)])

    def run(self, asks: list[Ask], role: TransferRole) -> dict[str, Told]:
        transfers = {ask.name: KVTransferParams(f"t-{ask.name}", role, self._peer) for ask in asks}
        return drive(self._engine, asks, self._wake, transfers)


class Pair:
    def __init__(self, plan: Plan) -> None:
        self._engines = [Remote(PairedEngine, name, epoch, plan) for epoch, name in enumerate(("prefill", "decode"), 1)]
        addresses = [engine.call("address") for engine in self._engines]
        for engine, peer in zip(self._engines, reversed(addresses), strict=True):
            engine.call("meet", peer)

    def run(self, asks: list[Ask]) -> tuple[dict[str, Told], dict[str, Told]]:
        prefill, decode = self._engines
        prefill.begin("run", [msgspec.structs.replace(ask, tokens=1) for ask in asks], TransferRole.PRODUCE)
        decode.begin("run", asks, TransferRole.CONSUME)
        return prefill.result(), decode.result()

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()


def prompts(vocab: int, lengths: list[int], tokens: int, apart_s: float, begins_with: str) -> list[Ask]:
    return [
        Ask(f"{begins_with}{index}", random_prompts(1, length, vocab, index)[0], tokens, index * apart_s)
        for index, length in enumerate(lengths)
    ]


def felt(told: dict[str, Told], first: dict[str, Told] | None = None) -> dict[str, float]:
    """Returns what users of these requests experience. `first` has the reports of the first tokens."""
    firsts = [1e3 * (known.times[0] - known.asked) for known in (first or told).values()]
    gaps = [
        1e3 * (after - before)
        for known in told.values()
        for before, after in zip(known.times, known.times[1:], strict=False)
    ]
    begun = min(known.asked for known in told.values())
    ended = max(known.times[-1] for known in told.values())
    count = sum(len(known.tokens) for known in told.values())
    return {
        "ttft_ms_p50": statistics.median(firsts),
        "gap_ms_p50": statistics.median(gaps),
        "gap_ms_p99": statistics.quantiles(gaps, n=100)[98],
        "tokens_per_s": count / (ended - begun),
    }


def compare_pair(
    plan: Plan, alone: dict[str, Told], load: dict[str, Told], singles: list[Ask], loaded: list[Ask], report: Report
) -> int:
    """`alone` and `load` are one engine's answers to the same requests: each sent by itself, and all of `loaded` together. Returns how
    many of `singles` got the same answers from two engines."""
    pair = Pair(plan)
    try:
        pair.run([msgspec.structs.replace(singles[0], name="warm-up")])
        num_same = 0
        for ask in singles:
            ahead, behind = pair.run([ask])
            computed, begun = ahead[ask.name].times[0], behind[ask.name].times[0]
            same = behind[ask.name].tokens == alone[ask.name].tokens
            num_same += same
            # What of the handover did not overlap with the prompt.
            report.row(
                f"handover of {len(ask.prompt)} tokens",
                ms_after_the_last_chunk=1e3 * (begun - computed),
                expected_ms=HANDOVER_MS,
                prompt_ms=1e3 * (computed - ahead[ask.name].asked),
                same_answer=same,
            )
        ahead, behind = pair.run(loaded)
        report.row("one engine", **felt(load))
        report.row("two engines", **felt(behind, ahead))
        return num_same
    finally:
        pair.close()


def plan_of(path: Path, dtype: Dtype, device: str, kv_bytes: int, *, native: bool, asks: list[Ask]) -> Plan:
    scheduling = SchedulerConfig(
        max_num_seqs=max(8, len(asks)),
        max_num_batched_tokens=2048,
        max_model_len=max(len(ask.prompt) + ask.tokens for ask in asks) + 16,
        step_target_ms=0,
    )
    cache = CacheConfig(prefix_caching=False, memory_bytes=kv_bytes)
    return Plan(ModelConfig(path=str(path), dtype=dtype, device=device), cache, scheduling, native)
