"""Whether a cluster stays as it was: half an hour of everything that clients do, on two prefill and two decode nodes.

    python -m benchmarks.soak
    python -m benchmarks.soak --kill-every 120
    python -m benchmarks.soak --minutes 3

Chats and completions, short and long, streamed and not, greedy, seeded and neither, several choices, stop strings, logprobs, and clients that go
away at any moment. Fails on an error that was not provoked, on an answer that differs from the quiet cluster's, on memory, descriptors or threads
that grow, and on blocks that do not become free again. With --kill-every a node is killed that often, and none of this may change. Writes
soak.json and soak.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from statistics import median

import msgspec
from rich.table import Table

from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.processes import Family, adopt_orphans
from benchmarks.lib.servers import RunningSystem, model_folder, running, tandem_system
from benchmarks.lib.tables import table_of
from benchmarks.soaking.cluster import Bounds, Growth, Kill, Killer, ProcessWatch, SoakCluster
from benchmarks.soaking.requests import AnswerTally, SoakLoad, SoakQuestions
from tandem.base.errors import TandemError
from tandem.cluster.saving import results_folder
from tandem.loadgen.vocabulary import TextVocabulary, load_tokenizer

OURS = ("ray::PrefillActor", "ray::DecodeActor", "ray::RouterActor", "ray::ControllerActor", "tandem")


class SoakVerdict(msgspec.Struct):
    minutes: float
    answered: int
    aborted: int
    tokens: int
    by_kind: dict[str, int]
    failures: dict[str, int]
    examples: dict[str, str]
    checked: int
    wrong: list[str]
    kills: list[Kill]
    growths: list[Growth]
    left_over: str = ""  # what was not given back at the end; "" if nothing
    faults: list[str] = []


def judge(soaked: SoakVerdict, bounds: Bounds | None = None) -> list[str]:
    """Returns the faults, one sentence each; [] if all is well."""
    bounds = bounds or Bounds()
    faults = []
    if not soaked.answered:
        faults.append("nothing was answered")
    for kind, count in sorted(soaked.failures.items()):
        faults.append(f"{count} requests failed, {kind}: {soaked.examples.get(kind, '')}")
    if soaked.answered and not soaked.checked:
        faults.append("no answer was one that is known")
    if soaked.wrong:
        faults.append(f"{len(soaked.wrong)} wrong answers, the first: {soaked.wrong[0]}")
    if soaked.left_over:
        faults.append(soaked.left_over)
    for growth in soaked.growths:
        if growth.process.startswith(OURS):
            faults += [f"grew while it served: {what}" for what in bounds.broken(growth)]
    return faults


def tallied(tally: AnswerTally) -> dict[str, object]:
    """Returns the fields of a verdict that come from a tally."""
    return {name: getattr(tally, name) for name in SoakVerdict.__struct_fields__ if hasattr(tally, name)}


_MIB = 2**20
_COLUMNS = {
    "process": "{process}",
    "minutes": "{minutes:.1f}",
    "memory MiB": "{memory:.0f}",
    "gained": "{memory_grew:+.1f}",
    "descriptors": "{descriptors:.0f}",
    "gained ": "{descriptors_grew:+.1f}",
    "threads": "{threads:.0f}",
    "gained  ": "{threads_grew:+.1f}",
}


def shown(soaked: SoakVerdict) -> Iterator[Table | str]:
    yield (
        f"{soaked.minutes:.1f} minutes: {soaked.answered} answers ({soaked.tokens} tokens), "
        f"{soaked.aborted} gone away from, {sum(soaked.failures.values())} failed; "
        f"{soaked.checked} answers were known, {len(soaked.wrong)} of them wrong"
    )
    yield ", ".join(f"{count} {kind}" for kind, count in sorted(soaked.by_kind.items()))
    if soaked.kills:
        times = [kill.whole_after_s for kill in soaked.kills]
        after = f"whole again after {median(times):.1f} s (median), {max(times):.1f} s at most"
        yield f"{len(soaked.kills)} nodes killed; {after}"
    rows = [
        msgspec.structs.asdict(growth)
        | {"minutes": growth.seconds / 60, "memory": growth.memory / _MIB, "memory_grew": growth.memory_grew / _MIB}
        for growth in sorted(soaked.growths, key=lambda growth: growth.process)
    ]
    yield table_of("After the first third: the middle, and what was gained", rows, _COLUMNS)
    for fault in soaked.faults:
        yield f"✗ {fault}"
    if not soaked.faults:
        yield "✓ nothing failed, nothing was wrong, nothing grew, every block came back"


_NODES = ("--prefill", "2", "--decode", "2")
_NODE_COUNT = 4
_WHOLE_WITHIN_S = 120.0
# float32, and so little memory for KV that blocks are evicted and requests are preempted all the time.
_SETTINGS = ("--dtype", "float32", "--kv-memory", "256MiB", "--max-model-len", "2560")
_QUIET_WITHIN_S = 60.0
_LOOK_EVERY_S = 2.0
_SAY_EVERY_S = 10.0


def _parse() -> argparse.Namespace:
    parser = parser_of(__doc__, out="results/soak")
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="of load (%(default)s)")
    parser.add_argument("--kill-every", type=float, metavar="S", help="kill a node every S seconds")
    parser.add_argument("--users", type=int, default=8, metavar="N", help="clients at once (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args()
    for name in ("minutes", "kill_every", "users"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    return options


def main() -> int:
    options = _parse()
    model = model_folder(options.model)
    folder = results_folder(options.out)
    words = TextVocabulary(load_tokenizer(model)).words
    adopt_orphans()
    system = tandem_system("tandem", "Tandem 2P+2D", model, *_NODES, *_SETTINGS)
    with running(system, folder / "server") as started:
        say(f"{system.title}: ready after {started.ready_s:.1f} s")
        questions = SoakQuestions(words, started.model, options.seed)
        soaked = asyncio.run(_soak(options, started, questions))
    soaked.faults = judge(soaked)
    return report(options, soaked, *shown(soaked), failed=bool(soaked.faults), width=140)


async def _soak(options: argparse.Namespace, started: RunningSystem, questions: SoakQuestions) -> SoakVerdict:
    load = SoakLoad(started.system.url, questions, options.users)
    view, watch = SoakCluster(started.system.url), ProcessWatch()
    await view.until_quiet(_NODE_COUNT, _WHOLE_WITHIN_S)
    say("filling every cache: what is touched for the first time is no growth")
    await load.fill()
    say("asking in peace what will be asked again")
    await load.learn()
    helpers = [asyncio.create_task(_watch(watch, started.family, load))]
    killer: Killer | None = None
    if options.kill_every is not None:
        killer = Killer(view, lambda: list(started.family.members()), options.kill_every, options.seed)
        helpers.append(asyncio.create_task(killer.run()))
    left_over = ""
    began = time.monotonic()
    try:
        await load.run(options.minutes * 60)
        for helper in helpers:
            if helper.done():  # neither ends by itself
                left_over = f"what watched or killed ended by itself: {helper.exception()}"
            helper.cancel()
        minutes = (time.monotonic() - began) / 60
        try:
            await view.until_quiet(_NODE_COUNT, _QUIET_WITHIN_S)
        except TandemError as error:
            left_over = str(error)
    finally:
        for helper in helpers:
            helper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*helpers, return_exceptions=True)
        await view.close()
    return SoakVerdict(
        minutes=minutes,
        kills=killer.kills if killer is not None else [],
        growths=watch.growths(),
        left_over=left_over,
        **tallied(load.tally),  # type: ignore[arg-type]
    )


async def _watch(watch: ProcessWatch, family: Family, load: SoakLoad) -> None:
    began, said = time.monotonic(), 0.0
    while True:
        at = time.monotonic() - began
        watch.look([os.getpid(), *family.members()], at)
        # Reported at once: no one should wait half an hour to learn that it will fail, and why.
        while load.tally.news:
            say(f"{at / 60:.1f} min: {load.tally.news.pop(0)}")
        if at - said >= _SAY_EVERY_S:
            said = at
            tally = load.tally
            say(
                f"{at / 60:.1f} min: {tally.answered} answered, {tally.aborted} gone away from, "
                f"{sum(tally.failures.values())} failed, {len(tally.wrong)} wrong"
            )
        await asyncio.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    run(main)
