"""The cluster of a soak: what its router reports, whether its processes grow (Linux only), and a node that is killed now and then."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import httpx
import msgspec

from tandem.base.errors import DeadlineExceeded, Unavailable

_ASK_EVERY_S = 0.25
# A node's report must be newer than the last answer; nodes report four times a second.
_REPORTED_S = 1.0


class NodeLook(msgspec.Struct, frozen=True):
    node_id: str
    incarnation: str
    state: str
    unusable: str | None = None
    free_blocks: int = 0
    total_blocks: int = 0
    running: int = 0
    waiting: int = 0
    transfers: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0

    @property
    def is_quiet(self) -> bool:
        return self.free_blocks == self.total_blocks > 0 and not (
            self.running or self.waiting or self.transfers or self.held_blocks or self.quarantined_blocks
        )


class _Cluster(msgspec.Struct, frozen=True):
    nodes: list[NodeLook]


def is_whole(nodes: Sequence[NodeLook], count: int) -> bool:
    return len(nodes) == count and all(node.state == "ready" and node.unusable is None for node in nodes)


class SoakCluster:
    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False)

    async def nodes(self) -> list[NodeLook]:
        try:
            response = await self._http.get("/cluster")
            return msgspec.json.decode(response.raise_for_status().content, type=_Cluster).nodes
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise Unavailable(f"the router does not show its cluster: {error}") from error

    async def until_quiet(self, count: int, within_s: float) -> list[NodeLook]:
        """Waits until all nodes are there, every block is free and no request is running."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            nodes = await self.nodes()
            waited = time.monotonic() - began
            if waited > _REPORTED_S and is_whole(nodes, count) and all(node.is_quiet for node in nodes):
                return nodes
            if waited > within_s:
                busy = [node for node in nodes if not node.is_quiet]
                raise DeadlineExceeded(f"not quiet {within_s:.0f} s after the last answer: {busy or nodes}")

    async def close(self) -> None:
        await self._http.aclose()


# The share of a series that is its beginning: caches fill, and pages are touched for the first time.
WARM_UP = 1 / 3
FEWEST_SAMPLES = 9
# A process that ran for a smaller share of the run is not judged: it cannot be told whether it fills up or grows.
YOUNG = 1 / 3


class ProcessSample(msgspec.Struct, frozen=True):
    at_s: float
    memory: int  # bytes of the process's own memory, without cached files, which the system can take back
    descriptors: int
    threads: int


class Growth(msgspec.Struct, frozen=True):
    """One process's memory after its beginning: its middle value, and what the straight line through it gains from start to end."""

    process: str
    was_there: bool  # from the beginning, so that it had touched everything before anything was counted
    seconds: float
    memory: float
    memory_grew: float
    descriptors: float
    descriptors_grew: float
    threads: float
    threads_grew: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """What something that does not grow may gain within one run."""

    memory: float = 24 * 2**20
    memory_share: float = 0.04
    descriptors: float = 6.0
    threads: float = 3.0
    first_touch: float = 256 * 2**20  # the KV cache of a node that replaced another one

    def broken(self, growth: Growth) -> list[str]:
        found = []
        memory = self.memory + self.memory_share * growth.memory
        if growth.memory_grew > memory + (0 if growth.was_there else self.first_touch):
            found.append(f"{growth.process}: {growth.memory_grew / 2**20:.0f} MiB of memory")
        if growth.descriptors_grew > self.descriptors:
            found.append(f"{growth.process}: {growth.descriptors_grew:.0f} descriptors")
        if growth.threads_grew > self.threads:
            found.append(f"{growth.process}: {growth.threads_grew:.0f} threads")
        return found


def look_at(process: int, at_s: float) -> ProcessSample | None:
    """Returns None if the process has ended."""
    folder = Path("/proc") / str(process)
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
        kib = sum(int(fields.get(name, "0").split()[0]) for name in ("RssAnon", "RssShmem"))
        return ProcessSample(at_s, kib * 1024, descriptors, int(fields["Threads"]))
    except (OSError, KeyError, ValueError, IndexError):
        return None


def title_of(process: int) -> str:
    """Returns the process's title as Ray sets it, which is longer than the kernel's name, without what the process is doing at the moment."""
    try:
        words = (Path("/proc") / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    title = words[0].decode(errors="replace")
    if title.startswith("ray::"):
        title = title.partition(".")[0]
    return "tandem serve" if b"tandem.cluster.cli" in words and b"serve" in words else title


def growth_of(process: str, samples: Sequence[ProcessSample], *, was_there: bool = True) -> Growth | None:
    """Returns None if the process did not run long enough to be judged."""
    settled = list(samples)[int(len(samples) * WARM_UP) :]
    if len(settled) < FEWEST_SAMPLES:
        return None
    times = [sample.at_s for sample in settled]

    def series(name: str) -> list[float]:
        return [float(getattr(sample, name)) for sample in settled]

    return Growth(
        process,
        was_there,
        times[-1] - times[0],
        median(series("memory")),
        gained(times, series("memory")),
        median(series("descriptors")),
        gained(times, series("descriptors")),
        median(series("threads")),
        gained(times, series("threads")),
    )


def gained(times: Sequence[float], values: Sequence[float]) -> float:
    """Returns what the least-squares line gains from the first moment to the last, so that a single peak at the end is no growth."""
    middle, level = fmean(times), fmean(values)
    spread = sum((time - middle) ** 2 for time in times)
    if spread == 0:
        return 0.0
    slope = sum((t - middle) * (v - level) for t, v in zip(times, values, strict=True)) / spread
    return slope * (times[-1] - times[0])


class ProcessWatch:
    """Observes all processes of the cluster."""

    def __init__(self) -> None:
        self._samples: dict[int, list[ProcessSample]] = {}
        # The latest: Ray names a process when it knows the process's purpose
        self._titles: dict[int, str] = {}
        self._began: float | None = None
        self._ended = 0.0

    def look(self, processes: Sequence[int], at_s: float) -> None:
        if self._began is None:
            self._began = at_s
        self._ended = at_s
        for process in processes:
            sample = look_at(process, at_s)
            if sample is not None:
                self._samples.setdefault(process, []).append(sample)
                self._titles[process] = title_of(process) or self._titles.get(process, "")

    def growths(self) -> list[Growth]:
        """Returns the growth of each process that ran long enough, by title and number."""
        began = self._began or 0.0
        youngest = (self._ended - began) * YOUNG
        found = (
            growth_of(f"{self._titles[process][:40]} {process}", samples, was_there=samples[0].at_s == self._began)
            for process, samples in self._samples.items()
            if samples[-1].at_s - samples[0].at_s >= youngest
        )
        return sorted((growth for growth in found if growth is not None), key=lambda growth: growth.process)


VICTIMS = ("ray::PrefillActor", "ray::DecodeActor")
WHOLE_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.25


class Kill(msgspec.Struct, frozen=True):
    at_s: float
    victim: str
    whole_after_s: float


class Killer:
    def __init__(self, view: SoakCluster, processes: Callable[[], list[int]], every_s: float, seed: int) -> None:
        self.kills: list[Kill] = []
        self._view = view
        self._processes = processes
        self._every_s = every_s
        self._random = random.Random(seed)
        self._began = time.monotonic()

    async def run(self) -> None:
        """Runs until it is cancelled. Raises DeadlineExceeded if a killed node has no successor in time."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.kill_one()

    async def kill_one(self) -> None:
        victims = [process for process in self._processes() if title_of(process).startswith(VICTIMS)]
        victim = self._random.choice(sorted(victims))
        title = title_of(victim)
        before = {node.incarnation for node in await self._view.nodes()}
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            nodes = await self._view.nodes()
            if is_whole(nodes, len(before)) and {node.incarnation for node in nodes} != before:
                break
            if time.monotonic() - killed > WHOLE_WITHIN_S:
                raise DeadlineExceeded(f"{title} was killed and has no successor after {WHOLE_WITHIN_S:.0f} s")
        self.kills.append(Kill(killed - self._began, title, time.monotonic() - killed))
