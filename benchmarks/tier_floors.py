"""The figures of `benchmarks.tiers` and their floors: whether each floor is held or missed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import tier_parity
from tandem.kvtransfer.config import EvictionPolicy

LOADED_TOKENS = 2048


class Served(msgspec.Struct):
    p50_s: float  # time to first token
    p99_s: float
    computed: float  # the share of the prompts' tokens that was computed
    found: dict[str, float]  # for each tier, the share found of what was looked for in it


class TierFigures(msgspec.Struct):
    step_us: dict[str, float] = {}  # medians
    compute_s: float = 0.0  # the time to the prompt's first token without a tier
    load_s: dict[str, float] = {}  # the time to the prompt's first token from each tier
    copy_s: dict[str, float] = {}  # the copies alone
    memcpy_s: float = 0.0  # memcpy of the same bytes
    loaded_bytes: int = 0
    found: dict[str, float] = {}  # in the replayed trace: the share of prompt tokens that were not computed
    served: dict[str, Served] = {}  # the trace's first requests, by a real engine
    managers: tier_parity.Parity | None = None  # compared with vLLM's


# How a step with a tier compares with one without, loading a prefix from host memory with memcpy and with computing it, and what host memory
# and a disk find with what an unlimited device finds.
MOST_OF_STEP = 1.05
LEAST_OF_MEMCPY = 0.8
LEAST_FASTER = 10.0
LEAST_OF_ALL_HITS = 0.95


class Floor(msgspec.Struct):
    what: str
    figure: str
    floor: str
    held: bool | None  # None: this run did not measure it


def floors(figures: TierFigures) -> list[Floor]:
    alone = figures.step_us["no tier"]
    step = max(each for name, each in figures.step_us.items() if name != "no tier") / alone
    rate = figures.memcpy_s / figures.copy_s["cpu"]
    faster = figures.compute_s / figures.load_s["cpu"]
    prefix = f"{LOADED_TOKENS} tokens from host memory"
    found = [
        Floor("a step with a tier", f"{step:.3f} ×", f"at most {MOST_OF_STEP:g}", step <= MOST_OF_STEP),
        Floor(
            f"{prefix}, of memcpy's rate",
            f"{rate:.2f}",
            f"at least {LEAST_OF_MEMCPY:g}",
            rate >= LEAST_OF_MEMCPY,
        ),
        Floor(
            f"{prefix}, beside computing them",
            f"{faster:.1f} × faster",
            f"at least {LEAST_FASTER:g}",
            faster >= LEAST_FASTER,
        ),
    ]
    what, floor = "host memory and disk, of an infinite cache's hits", f"at least {LEAST_OF_ALL_HITS:g}"
    if figures.found:
        share = figures.found["cpu, arc, and disk"] / figures.found["a device with room for all"]
        found.append(Floor(what, f"{share:.3f}", floor, share >= LEAST_OF_ALL_HITS))
    else:
        found.append(Floor(what, "needs --trace", floor, None))
    for policy in EvictionPolicy:
        what, floor = f"{policy.value}, a request's operations beside vLLM's", "at least as fast"
        if figures.managers is None:
            found.append(Floor(what, "needs --vllm: vLLM is not installed here", floor, None))
        else:
            ours, theirs = figures.managers.our_us[policy.value], figures.managers.their_us[policy.value]
            found.append(Floor(what, f"{theirs / ours:.1f} × faster", floor, ours <= theirs))
    return found


def show_floors(found: Sequence[Floor], console: Console) -> None:
    table = Table(box=None)
    for column in ("", "", "floor", ""):
        table.add_column(column)
    for each in found:
        verdict = {True: "held", False: "missed", None: "not measured"}[each.held]
        table.add_row(each.what, each.figure, each.floor, verdict)
    console.print(table)
