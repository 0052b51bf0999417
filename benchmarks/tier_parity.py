"""Whether tiers evict what vLLM's would, and how fast: random operations through both, compared one by one.

    python -m benchmarks.tier_parity --vllm DIR [--runs N] [--json FILE]

DIR is an environment with vLLM 0.32 (`vllm/v1/kv_offload`), msgspec and xxhash. Compared is what both have: which keys LRU and ARC find, which they
evict and in which order, with keys that are being read or written and keys that are protected, what ARC remembers, and its target. They differ in
when a request touches its keys, which is left out.

Then both managers do the same work, one request at a time: look its prefix up, load what is there, store the rest.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.lib.harness import parser_of, report, run
from tandem.kvtransfer.config import EvictionPolicy
from tandem.kvtransfer.offload.manager import SlotManager
from tandem.kvtransfer.offload.policies import POLICIES, ArcPolicy

OPERATIONS = 300
SLOTS = 2000
REQUESTS = 2000
PREFIX = 128  # chunks per request
REPEATS = 5


class Parity(msgspec.Struct):
    operations: int = 0  # compared
    our_us: dict[str, float] = {}  # per request, by policy
    their_us: dict[str, float] = {}


class Both:
    """One policy of Tandem's and of vLLM's, behind the same calls."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
        from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
        from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

        self.capacity = capacity
        self.busy = [0] * capacity
        self.ours = POLICIES[policy](capacity, self.busy)
        self.theirs: Any = (ARCCachePolicy if policy is EvictionPolicy.ARC else LRUCachePolicy)(capacity)
        self._status: Any = ChunkStatus
        self._context: Any = ReqContext("r")
        self.chunks: dict[bytes, Any] = {}
        self.free = list(range(capacity))

    def insert(self, key: bytes) -> None:
        slot = self.free.pop()
        self.busy[slot] = -1
        self.ours.insert(key, slot)
        self.chunks[key] = self._status(slot)
        self.theirs.insert(key, self.chunks[key])

    def set_busy(self, key: bytes, count: int) -> None:
        chunk = self.chunks[key]
        before, chunk.ref_cnt = chunk.ref_cnt, count
        self.busy[chunk.chunk_id] = count
        if count == 0 != before:
            self.theirs.mark_evictable(key)
        elif before == 0 != count:
            self.theirs.mark_non_evictable(key)

    def touch(self, keys: list[bytes]) -> None:
        self.ours.touch(keys)
        self.theirs.touch(keys, self._context)

    def evict(self, count: int, protected: set[bytes]) -> None:
        ours, theirs = self.ours.evict(count, protected), self.theirs.evict(count, protected)
        given_up = None if theirs is None else [(key, chunk.chunk_id) for key, chunk in theirs]
        assert ours == given_up, f"we give up {ours}, they {given_up}"
        for key, slot in ours or []:
            self.free.append(slot)
            del self.chunks[key]

    def remove(self, key: bytes) -> None:
        self.ours.remove(key)
        self.theirs.remove(key)
        self.free.append(self.chunks.pop(key).chunk_id)

    def compare(self, keys: list[bytes]) -> None:
        for key in keys:
            chunk = self.theirs.get(key)
            assert self.ours.get(key) == (None if chunk is None else chunk.chunk_id), key
        if isinstance(self.ours, ArcPolicy):
            lists = ("recent", "t1"), ("frequent", "t2"), ("gone_recent", "b1"), ("gone_frequent", "b2")
            for here, there in lists:
                assert list(getattr(self.ours, here)) == list(getattr(self.theirs, there)), here
            assert self.ours.target == self.theirs.target_t1_size


def compare(seed: int, policy: EvictionPolicy) -> int:
    draw = random.Random(seed)
    both = Both(policy, draw.choice([3, 8, 30]))
    keys = [b"%032d" % number for number in range(3 * both.capacity)]
    for _ in range(OPERATIONS):
        present = list(both.chunks)
        match draw.randrange(7):
            case 0 | 1 if both.free:
                absent = [key for key in keys if key not in both.chunks]
                both.insert(draw.choice(absent))
            case 2 if present:
                key = draw.choice(present)
                both.set_busy(key, draw.choice([0, 0, 0, 1, 2]))
            case 3 if present and draw.random() < 0.2:
                idle = [key for key in present if both.chunks[key].ref_cnt <= 0]
                if idle:
                    both.remove(draw.choice(idle))
            case 4:
                both.evict(draw.randrange(1, 4), set(draw.sample(keys, 3)))
            case _:
                first = draw.randrange(len(keys))
                both.touch(keys[first : first + draw.randrange(1, 6)])
        both.compare(keys)
    return OPERATIONS


def prefixes() -> list[list[bytes]]:
    """Returns requests that share a prefix with earlier ones and then differ."""
    draw = random.Random(5)
    made: list[list[bytes]] = []
    for number in range(REQUESTS):
        shared = made[draw.randrange(len(made))][: draw.randrange(PREFIX)] if made and draw.random() < 0.6 else []
        made.append([*shared, *(b"%016d%016d" % (number, i) for i in range(PREFIX - len(shared)))])
    return made


def run_ours(policy: EvictionPolicy, requests: list[list[bytes]]) -> None:
    manager = SlotManager(SLOTS, policy)
    for keys in requests:
        manager.touch(keys)
        found = keys[: manager.lookup(keys)]
        manager.complete_load(manager.prepare_load(found))
        room = manager.prepare_store(keys)
        assert room is not None
        manager.complete_store(room, written=True)
        manager.line_up(keys)


def run_theirs(policy: EvictionPolicy, requests: list[list[bytes]]) -> None:
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    manager: Any = CPUOffloadingManager(SLOTS, policy.value)
    for number, hashes in enumerate(requests):
        context = ReqContext(str(number))
        keys = [make_offload_key(key, 0) for key in hashes]
        manager.on_new_request(context)
        found = 0
        for key in keys:
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            found += 1
        manager.prepare_load(keys[:found], context)
        manager.complete_load(keys[:found], context)
        room = manager.prepare_store(keys, context)
        assert room is not None
        manager.complete_store(room.keys_to_store, context)
        manager.on_request_finished(context)


def measure(work: Callable[[EvictionPolicy, list[list[bytes]]], None], policy: EvictionPolicy) -> float:
    """Returns the microseconds per request."""
    requests, seconds = prefixes(), []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work(policy, requests)
        seconds.append(time.perf_counter() - started)
    return median(seconds) / REQUESTS * 1e6


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="an environment that has vLLM 0.32")
    parser.add_argument("--runs", type=int, default=500)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        root = Path(__file__).parents[1]
        python = str(options.vllm / "bin" / "python")
        environment = {**os.environ, "PYTHONPATH": str(root), "VLLM_LOGGING_LEVEL": "ERROR"}
        os.execve(python, [python, "-m", "benchmarks.tier_parity", *sys.argv[1:]], environment)
    parity = Parity()
    for policy in EvictionPolicy:
        for seed in range(options.runs):
            try:
                parity.operations += compare(seed, policy)
            except AssertionError as error:
                return report(options, parity, f"{policy.value}, run {seed}: {error}", failed=True)
        parity.our_us[policy.value] = measure(run_ours, policy)
        parity.their_us[policy.value] = measure(run_theirs, policy)
    said = [f"{parity.operations} operations, the same decisions"]
    for name, ours in parity.our_us.items():
        theirs = parity.their_us[name]
        beside = f"vLLM's {theirs:.0f} µs: {theirs / ours:.1f} ×"
        said.append(f"{name}: {ours:.0f} µs for a request of {PREFIX} chunks, {beside}")
    return report(options, parity, *said)


if __name__ == "__main__":
    run(main)
