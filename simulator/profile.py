"""Measures the costs of a node's steps, transfers and requests on a serving cluster with one node of each role.

Every figure comes from request traces, in which the nodes report when each step began and ended, and what it computed. So it measures
any node on any device, from anywhere, through the router's public API. No other client may use the cluster meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.simulator.beside import in_traffic
from tandem.simulator.costs import (
    DEFAULT_START_S,
    CostModel,
    CostTable,
    FitError,
    RequestCost,
    TransferCost,
    Width,
    line_through,
)
from tandem.simulator.profile_client import ProfileClient, ProfiledRequest, refuse_contexts
from tandem.wire.nodes import Role

REPEATS = 5
BATCH_TURNS = 2  # how often each batch is measured
STEPS = 40  # steps to measure of each batch, each time
MOST_TOKENS = 1024  # the longest answer to ask for, when a batch's last answer begins late
# Batches whose prompts take longer than this to compute are not measured: on a slow device they would take most of a profile's time.
LONGEST_PROMPTS_S = 120.0
FEWEST_TOGETHER = 4  # the fewest steps of a whole batch that make a measurement
FEWEST_TOKENS = 32  # the fewest prompt tokens in a step with prompts and decodes that count
BESIDE = 128  # prompt tokens of an answer that is decoded while other prompts are computed
# Traffic in which both nodes compute at once: tokens of prompts and answers, requests for each repeat, and the share of the time in which
# the busier node computes.
TRAFFIC_PROMPTS, TRAFFIC_ANSWER, TRAFFIC_REQUESTS, TRAFFIC_LOAD = (64, 128, 256, 512, 1024), 64, 40, 0.6

Say = Callable[[str, float], None]
"""Called with what is being measured, and the share of the whole profile that is done."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The points to measure. The points named `between` are measured only to find the error of the costs there."""

    prompts: tuple[int, ...] = (1, 16, 64, 128, 256, 512, 1024, 2048)
    prompts_between: tuple[int, ...] = (48, 192, 384, 768, 1536)
    before: tuple[int, ...] = (0, 1024, 3072)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batches_between: tuple[int, ...] = (3, 6, 12, 24)
    contexts: tuple[int, ...] = (64, 256, 1024, 3072)


QUICK = Grid((1, 64, 512, 1024), (256,), (0, 1024), (1, 4, 16), (8,), (64, 1024))


class Profiler:
    def __init__(
        self,
        client: ProfileClient,
        say: Say,
        *,
        repeats: int = REPEATS,
        grid: Grid | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._grid = grid or Grid()
        self._say = say
        self._repeats = repeats
        # Other prompts in every profile, because the cluster still has the last profile's in its cache
        self._rng = rng or random.Random()
        self._longest = 0
        # Prompts that are used again, and so are cached, where only the tokens after them are measured: computing them would take most
        # of a profile's time.
        self._beginnings: dict[int, list[int]] = {}  # by length
        self._batches: dict[int, list[list[int]]] = {}  # the largest batch so far, by context
        self._arrivals: list[tuple[int, float]] = []  # (prompt tokens, seconds until the first step)
        self._answers: list[float] = []

    async def measure(self, name: str) -> CostModel:
        nodes = await self._client.facts()
        roles = sorted(node.role.value for node in nodes)
        if roles not in (["aggregated"], ["decode", "prefill"]):
            raise ConfigurationError(
                "profile a cluster of one aggregated node, or of one prefill node and one decode node, not of "
                f"{', '.join(roles) or 'none'}"
            )
        refuse_contexts(nodes)
        widths = {Width(node.tensor_parallel, node.pipeline_parallel) for node in nodes}
        if len(widths) > 1:
            said = " and ".join(sorted(map(str, widths)))
            raise ConfigurationError(
                f"profile nodes of one width, not of {said}: each width has a file of its own, and tandem plan puts them together"
            )
        (width,) = widths
        self._longest = min(node.max_model_len for node in nodes)
        blocks = min(node.total_blocks for node in nodes) + 1  # and the null block
        block_size = nodes[0].block_size
        # The first request pays for everything that is built on demand
        await self._client.ask(self._prompt(64), 8)
        room = (blocks - 1) * block_size
        prefill, prefill_fit = await self._measure_prefill()
        decode, decode_fit = await self._measure_decode(room, prefill)
        fit = {"prefill": prefill_fit, "decode": decode_fit}
        transfer, bytes_per_token, mixed = TransferCost(), 0.0, 0.0
        if len(nodes) == 2:
            transfer, bytes_per_token, fit["handover"] = await self._measure_transfer()
        else:
            mixed, fit["mixed"] = await self._measure_mixed(prefill, decode)
        arrive, per_token = line_through(self._arrivals)
        costs = CostModel(
            name=name,
            max_model_len=self._longest,
            blocks=blocks,
            block_size=block_size,
            kv_bytes_per_token=bytes_per_token,
            prefill=prefill,
            decode=decode,
            transfer=transfer,
            request=RequestCost(arrive, per_token, max(0.0, statistics.median(self._answers))),
            mixed_saved_s=mixed,
            start_s=max(node.start_s for node in nodes) or DEFAULT_START_S,
            tensor_parallel=width.tensor_parallel,
            pipeline_parallel=width.pipeline_parallel,
            fit=fit,
        )
        return await self._measure_in_traffic(costs) if len(nodes) == 2 else costs

    def _prompt(self, tokens: int) -> list[int]:
        # Every vocabulary has these ids, and no control tokens among them: those are at its beginning.
        return [self._rng.randrange(1000, 30_000) for _ in range(tokens)]

    # --- reading

    async def _measure_prefill(self) -> tuple[CostTable, FitError]:
        sizes = [size for size in self._grid.prompts if size + 2 <= self._longest]
        contexts = [context for context in self._grid.before if context + sizes[-1] + 2 <= self._longest]
        between = [(size, 0) for size in self._grid.prompts_between if size < sizes[-1]]
        points = [(size, context) for context in contexts for size in sizes]
        found = await self._in_turns(
            [*points, *between],
            self._repeats,
            self._read,
            lambda size, context: f"reads {size} tokens after {context}",
            0.0,
            0.5,
        )
        table = CostTable(
            [float(size) for size in sizes],
            [float(context) for context in contexts],
            _never_less([[found[size, context] for context in contexts] for size in sizes]),
        )
        return table, FitError.of((table.at(*point), found[point]) for point in between)

    async def _in_turns(
        self,
        points: Sequence[tuple[int, int]],
        turns: int,
        measure: Callable[[int, int], Awaitable[list[float]]],
        what: Callable[[int, int], str],
        begin: float,
        end: float,
    ) -> dict[tuple[int, int], float]:
        """Measures all points once, then all again, and so on: a machine that is slower for some seconds spoils one measurement of a few
        points, and not all of one. Returns the medians. `begin` and `end`: which part of the profile this is."""
        found: dict[tuple[int, int], list[float]] = {point: [] for point in points}
        for turn in range(turns):
            for index, point in enumerate(points):
                done = (turn + index / len(points)) / turns
                self._say(what(*point), begin + (end - begin) * done)
                found[point] += await measure(*point)
        return {point: statistics.median(taken) for point, taken in found.items()}

    async def _read(self, size: int, context: int) -> list[float]:
        """The seconds of the step that computes the last `size` tokens of a prompt whose beginning is cached. If they do not fit into
        one step, the sum of the steps."""
        before = self._beginnings.setdefault(context, self._prompt(context))
        if before:
            await self._client.ask([*before, *self._prompt(1)], 1, traced=False)
        asked = await self._client.asked([*before, *self._prompt(size)], 1)
        steps = [step for step in asked.steps if step.reads]
        if not steps:
            raise Unavailable("a trace has no step that read its prompt")
        self._arrivals.append((context + size, steps[0].began - asked.record.began))
        self._answers.append(asked.seconds - (steps[-1].ended - asked.record.began))
        return [sum(step.seconds for step in steps)]

    # --- writing

    async def _measure_decode(self, room: int, prefill: CostTable) -> tuple[CostTable, FitError]:
        most = min(self._longest - STEPS - 8, 0.8 * room - 2 * STEPS)
        contexts = [context for context in self._grid.contexts if context <= most]
        if not contexts:
            raise ConfigurationError(
                f"requests of {self._longest} tokens, in a cache of {room}, are too short to measure what writing answers takes"
            )
        batches = [batch for batch in self._grid.batches if batch * (contexts[-1] + 2 * STEPS) <= 0.8 * room]
        between = [(batch, contexts[len(contexts) // 2]) for batch in self._grid.batches_between if batch < batches[-1]]
        points = [
            (batch, context)
            for context in contexts
            for batch in batches
            if batch in batches[:2] or batch * prefill.at(context, 0) <= LONGEST_PROMPTS_S
        ]
        found = await self._in_turns(
            [*points, *between],
            BATCH_TURNS,
            self._write,
            lambda batch, context: f"writes {batch} answers after {context} tokens",
            0.5,
            0.9,
        )
        _complete(found, batches, contexts)
        middle = STEPS / 2
        table = CostTable(
            [float(batch) for batch in batches],
            [context + middle for context in contexts],
            _never_less([[found[batch, context] for context in contexts] for batch in batches]),
        )
        pairs = ((table.at(batch, context + middle), found[batch, context]) for batch, context in between)
        return table, FitError.of(pairs)

    async def _write(self, batch: int, context: int) -> list[float]:
        """The mean time from one step's beginning to the next one's, of the steps in which the whole batch got a token. It is the mean
        because what a client waits for a token is one: a few steps of an answer take much longer than the others."""
        prompts = self._batches.setdefault(context, [])
        prompts += [self._prompt(context) for _ in range(batch - len(prompts))]
        # Cache the prompts first, so that the answers begin together. Two tokens, so that a decode node caches the prompt too.
        for prompt in prompts[:batch]:
            await self._client.ask(prompt, 2, traced=False)
        tokens = STEPS + 2 * batch
        while True:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._client.ask(prompt, tokens, traced=not index, stream=True))
                    for index, prompt in enumerate(prompts[:batch])
                ]
            asked = tasks[0].result()
            steps = [step for step in asked.steps if not step.reads] if asked is not None else []
            periods = [
                following.began - step.began
                for step, following in pairwise(steps)
                if step.tokens == 1 and step.beside == batch - 1 and following.beside == batch - 1
            ]
            if len(periods) >= FEWEST_TOGETHER:
                return [statistics.fmean(periods[:STEPS])]
            # The first answer ended before the last began, as over a slow link. Try again with longer answers.
            if 2 * tokens > min(MOST_TOKENS, self._longest - context):
                raise Unavailable(
                    f"{batch} answers of {tokens} tokens were not written together: does another client ask this "
                    "cluster, or is scheduler.max_num_seqs lower?"
                )
            tokens *= 2

    # --- both

    async def _measure_mixed(self, prefill: CostTable, decode: CostTable) -> tuple[float, FitError]:
        """Computes prompts in chunks while another answer is decoded, and returns by how much such a step is shorter than a prefill step and
        a decode step together (it reads the weights only once). A step is measured from its beginning to the next one's, like the
        decode steps, so that the time between two steps counts in both."""
        self._say("reads prompts beside an answer", 0.92)
        apart: list[tuple[float, float]] = []  # (seconds of two separate steps, seconds of the mixed step)
        for size in (256, 512, 1024, 2048):
            if size + 2 > self._longest:
                continue
            begun = asyncio.Event()
            stream = asyncio.create_task(
                self._client.ask(self._prompt(BESIDE), STEPS + size // 4, traced=False, stream=True, begun=begun)
            )
            await begun.wait()
            # Two tokens, because the second token's step shows when the prompt's last step was over.
            asked = await self._client.asked(self._prompt(size), 2)
            await stream
            context = 0
            for step, following in pairwise(asked.steps):
                if step.reads and step.beside and step.tokens >= FEWEST_TOKENS:
                    both = prefill.at(step.tokens, context) + decode.at(1, BESIDE)
                    apart.append((both, following.began - step.began))
                context += step.tokens if step.reads else 0
        saved = [both - seconds for both, seconds in apart]
        less = max(0.0, statistics.median(saved)) if saved else 0.0
        return less, FitError.of((max(both - less, 1e-9), seconds) for both, seconds in apart)

    async def _measure_in_traffic(self, costs: CostModel) -> CostModel:
        """Sends prompts of several lengths at random moments, as far as possible while answers are written."""
        lengths = [length for length in TRAFFIC_PROMPTS if length + TRAFFIC_ANSWER <= self._longest]
        if not lengths:
            return costs
        # Each length keeps the prefill node busy for as long as the others do.
        alone = [costs.prefill.at(length, 0) for length in lengths]
        answer_s = TRAFFIC_ANSWER * costs.decode.at(4, max(lengths)) / 4
        busy_s = max(statistics.harmonic_mean(alone), answer_s)
        requests = TRAFFIC_REQUESTS * self._repeats
        drawn = self._rng.choices(lengths, [1 / seconds for seconds in alone], k=requests)
        tasks: list[asyncio.Task[ProfiledRequest | None]] = []
        async with asyncio.TaskGroup() as group:
            for number, length in enumerate(drawn):
                self._say("serves traffic", 0.94 + 0.06 * number / requests)
                await self._client.pause(self._rng.expovariate(TRAFFIC_LOAD / busy_s))
                asked = self._client.ask(self._prompt(length), TRAFFIC_ANSWER, stream=True)
                tasks.append(group.create_task(asked))
        return in_traffic(costs, [each for task in tasks if (each := task.result())])

    # --- sending

    async def _measure_transfer(self) -> tuple[TransferCost, float, FitError]:
        """Measures from the end of the prompt's last step on the prefill node to the beginning of the first step on the decode node."""
        waits: list[tuple[int, float]] = []
        per_token = 0.0
        sizes = [size for size in (256, 512, 1024, 2048) if size + 8 <= self._longest]
        for index, size in enumerate(sizes):
            self._say(f"sends {size} tokens", 0.9 + 0.04 * index / len(sizes))
            for _ in range(self._repeats):
                asked = await self._client.asked(self._prompt(size), 4)
                reads = [step for step in asked.steps if step.reads and step.role == Role.PREFILL]
                writes = [step for step in asked.steps if not step.reads and step.role == Role.DECODE]
                moved = [part.transfer for part in asked.record.nodes if part.transfer is not None]
                if not reads or not writes or not moved:
                    continue  # the decode node computed the prompt itself
                waits.append((reads[-1].tokens, max(0.0, writes[0].began - reads[-1].ended)))
                per_token = max(per_token, moved[0].num_bytes / size)
        if not waits:
            raise Unavailable("no prompt was sent from the prefill node to the decode node")
        fixed, slope = line_through(waits)
        speed = per_token / slope if slope > 0 else 1e12
        pairs = ((fixed + slope * tokens, wait) for tokens, wait in waits if wait > 0)
        return TransferCost(fixed, speed), per_token, FitError.of(pairs)


def _complete(found: dict[tuple[int, int], float], batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Adds the batches that were not measured after some context: the line through the two largest that were measured there continues."""
    for context in contexts:
        known = [batch for batch in batches if (batch, context) in found]
        measured = CostTable([float(batch) for batch in known], [0.0], [[found[batch, context]] for batch in known])
        for batch in batches[len(known) :]:
            found[batch, context] = measured.at(batch, 0.0)


def _never_less(rows: list[list[float]]) -> list[list[float]]:
    """Makes the rows and columns ascending: more work never takes less time, and a measurement that says so is noise. Which of two such
    measurements is wrong is not known, so it takes the middle of what the greatest before and the least after would be."""
    height, width = range(len(rows)), range(len(rows[0]))
    return [
        [
            0.5 * max(rows[k][n] for k in range(i + 1) for n in range(j + 1))
            + 0.5 * min(rows[k][n] for k in height[i:] for n in width[j:])
            for j in width
        ]
        for i in height
    ]


async def profile(
    url: str, key: str | None, name: str, say: Say, *, repeats: int = REPEATS, grid: Grid | None = None
) -> CostModel:
    client = ProfileClient(url, key)
    try:
        return await Profiler(client, say, repeats=repeats, grid=grid).measure(name)
    except BaseExceptionGroup as group:
        errors = [error for error in group.exceptions if isinstance(error, TandemError)]
        raise errors[0] if errors else group from None
    finally:
        await client.close()
