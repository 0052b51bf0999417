"""Whether a cluster stays as it was: half an hour of everything that clients do, on two prefill and two decode nodes.

    python -m benchmarks.soak
    python -m benchmarks.soak --kill-every 120
    python -m benchmarks.soak --minutes 3

A third of the clients ask what `tandem chaos` asks, greedy and seeded, whose answers are known from the quiet cluster. The others send chats and
completions, short and long, streamed and not, with several choices, stop strings, logprobs and grammars, and go away at any moment. Fails on an
error that was not provoked, on an answer that differs, on memory, descriptors or threads that grow, and on blocks that do not become free again.
With --kill-every `tandem chaos` kills a node that often, and none of this may change. Writes soak.json and soak.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import httpx
import msgspec
from rich.table import Table

from benchmarks.lib.harness import parser_of, report, run, say
from benchmarks.lib.processes import Family, adopt_orphans
from benchmarks.lib.servers import RunningSystem, model_folder, running, tandem_system
from benchmarks.lib.tables import table_of
from tandem.base.errors import TandemError, Unavailable
from tandem.cluster.chaos.probes import Probes
from tandem.cluster.saving import results_folder
from tandem.loadgen.vocabulary import TextVocabulary, load_tokenizer

OURS = ("ray::PrefillActor", "ray::DecodeActor", "ray::RouterActor", "ray::ControllerActor", "tandem")
_NODES = ("--prefill", "2", "--decode", "2")
_NODE_COUNT = 4
# float32, and so little memory for KV that blocks are evicted and requests are preempted all the time.
_SETTINGS = ("--dtype", "float32", "--kv-memory", "256MiB", "--max-model-len", "2560")
_WHOLE_WITHIN_S, _QUIET_WITHIN_S = 120.0, 60.0
_ASK_EVERY_S, _LOOK_EVERY_S, _SAY_EVERY_S = 0.25, 2.0, 10.0
_REPORTED_S = 1.0  # a node's report must be newer than the last answer; nodes report four times a second
_A_REQUEST_S = 300.0
_MIB = 1 << 20


# --- what is asked


class Question(msgspec.Struct, frozen=True):
    body: dict[str, Any]
    kinds: tuple[str, ...]
    leave_after_s: float | None = None  # the client goes away then

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


class Questions:
    """`words` are about one token each: exact lengths do not matter here."""

    def __init__(self, words: Sequence[str], model: str, seed: int) -> None:
        self._words, self._model, self._random = words, model, random.Random(seed)

    def draw(self) -> Question:
        rng = self._random
        prompt = rng.choices((rng.randint(4, 64), rng.randint(100, 500), rng.randint(900, 1600)), (70, 24, 6))[0]
        is_chat, is_stream, leaves = rng.random() < 0.4, rng.random() < 0.6, rng.random() < 0.18
        body = self.body(prompt, is_chat) | {"max_tokens": rng.randint(1, 64), "temperature": rng.choice((0, 0.7, 1.0))}
        kinds = ["chat" if is_chat else "completion", "long" if prompt >= 900 else "short"]
        extra = rng.random()
        if extra < 0.1:
            body |= {"n": 2}
            kinds.append("n=2")
        elif extra < 0.2:
            body |= {"stop": [" the", "\n\n"]}
            kinds.append("stop")
        elif extra < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
            kinds.append("logprobs")
        elif extra < 0.38 and is_chat:
            body |= {"response_format": {"type": "json_object"}}
            kinds.append("json")
        if is_stream or leaves:
            body |= {"stream": True}
        if not leaves:
            return Question(body, (*kinds, "stream" if is_stream else "whole"))
        # Long enough that the client goes away in its middle; an answer that follows a grammar ends with it.
        body |= {"max_tokens": 200} | ({} if "response_format" in body else {"ignore_eos": True})
        # Many go away early, some much later, so that every phase is covered.
        return Question(body, ("gone away from",), rng.expovariate(1.0))

    def body(self, tokens: int, is_chat: bool) -> dict[str, Any]:
        text = " ".join(self._random.choices(self._words, k=tokens))
        asked = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        return {"model": self._model, "max_tokens": 2, **asked}


class WrongAnswer(Exception):
    """The answer is not what was asked for. Failures are counted by `kind`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


async def ask(http: httpx.AsyncClient, question: Question) -> bool:
    """Returns whether the client stayed until the end. Raises WrongAnswer."""
    ends: list[str] = []
    try:
        async with asyncio.timeout(question.leave_after_s):
            async for choice in _choices(http, question):
                ends += [choice["finish_reason"]] if choice.get("finish_reason") else []
    except TimeoutError:
        return False
    except httpx.HTTPError as error:
        raise WrongAnswer(type(error).__name__, str(error)) from error
    if len(ends) != question.body.get("n", 1) or not set(ends) <= {"stop", "length"}:
        raise WrongAnswer("finish", f"finish reasons {ends} of {question.body.get('n', 1)} choices")
    return True


async def _choices(http: httpx.AsyncClient, question: Question) -> Any:
    async with http.stream("POST", question.path, json=question.body) as response:
        if response.status_code != 200:
            raise WrongAnswer(f"http_{response.status_code}", (await response.aread()).decode(errors="replace"))
        if "stream" not in question.body:
            for choice in msgspec.json.decode(await response.aread())["choices"]:
                yield choice
            return
        done = False
        async for line in response.aiter_lines():
            done |= line == "data: [DONE]"
            if line.startswith("data: {"):
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    raise WrongAnswer("stream_error", line[6:])
                for choice in event["choices"]:
                    yield choice
        if not done:
            raise WrongAnswer("truncated", "the stream ended without [DONE]")


class MixedLoad:
    def __init__(self, url: str, questions: Questions, users: int) -> None:
        self.by_kind, self.failures = Counter[str](), Counter[str]()
        self.examples: dict[str, str] = {}  # the first failure of each kind
        self._url, self._questions, self._users = url, questions, users

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._users)
        return httpx.AsyncClient(base_url=self._url, timeout=_A_REQUEST_S, trust_env=False, limits=limits)

    async def fill(self) -> None:
        """Fills every node's KV cache several times over: what is touched for the first time is no growth."""
        async with self.client() as http:
            for _ in range(4):
                bodies = [self._questions.body(1500, is_chat=False) for _ in range(4)]
                await asyncio.gather(*(ask(http, Question(body, ())) for body in bodies))

    async def run(self, ending: asyncio.Event) -> None:
        async with self.client() as http, asyncio.TaskGroup() as group:
            for _ in range(self._users):
                group.create_task(self._user(http, ending))

    async def _user(self, http: httpx.AsyncClient, ending: asyncio.Event) -> None:
        while not ending.is_set():
            question = self._questions.draw()
            try:
                stayed = await ask(http, question)
            except WrongAnswer as failure:
                self.failures[failure.kind] += 1
                if self.examples.setdefault(failure.kind, str(failure)[:300]) == str(failure)[:300]:
                    say(f"failed, {failure.kind}: {failure}"[:400])
                continue
            # One that is short may end before its client goes away.
            self.by_kind.update(question.kinds if stayed or question.leave_after_s is not None else ())


# --- whether processes grow (Linux only)

# The most that a process may gain within one run, the rest for memory; and the KV cache of a node that replaced another one.
MOST_GAINED = {"memory": 24.0 * _MIB, "descriptors": 6.0, "threads": 3.0}
MEMORY_SHARE, FIRST_TOUCH = 0.04, 256.0 * _MIB
WARM_UP = 1 / 3  # the share of a series that is its beginning: caches fill, and pages are touched for the first time
FEWEST_SAMPLES = 9
YOUNG = 1 / 3  # a process that ran for less of the run is not judged: it may still fill up

Figures = dict[str, float]
"""Of one process, by the names of MOST_GAINED; memory of its own in bytes, without cached files, which the system can take back."""


class Growth(msgspec.Struct, frozen=True):
    """One process after its beginning: the middle values, and what the straight lines through them gain from start to end."""

    process: str
    was_there: bool  # from the beginning, so that it had touched everything before anything was counted
    middle: Figures
    gained: Figures

    def broken(self) -> list[str]:
        extra = MEMORY_SHARE * self.middle["memory"] + (0 if self.was_there else FIRST_TOUCH)
        too_much = [
            name for name, most in MOST_GAINED.items() if self.gained[name] > most + (extra if name == "memory" else 0)
        ]
        said = {name: f"{self.gained[name]:.0f} {name}" for name in too_much}
        if "memory" in said:
            said["memory"] = f"{self.gained['memory'] / _MIB:.0f} MiB of memory"
        return [f"{self.process}: {what}" for what in said.values()]


def look_at(process: int) -> Figures | None:
    """Returns None if the process has ended."""
    folder = Path("/proc") / str(process)
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        kib = sum(int(fields.get(name, "0").split()[0]) for name in ("RssAnon", "RssShmem"))
        descriptors = sum(1 for _ in (folder / "fd").iterdir())
        return {"memory": kib * 1024.0, "descriptors": float(descriptors), "threads": float(fields["Threads"])}
    except (OSError, KeyError, ValueError, IndexError):
        return None


def title_of(process: int) -> str:
    """Returns the title as Ray sets it, which is longer than the kernel's name, without what the process is doing at the moment."""
    try:
        words = (Path("/proc") / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    title = words[0].decode(errors="replace")
    if title.startswith("ray::"):
        title = title.partition(".")[0]
    return "tandem serve" if b"tandem.cluster.cli" in words and b"serve" in words else title


def growth_of(process: str, samples: Sequence[tuple[float, Figures]], *, was_there: bool = True) -> Growth | None:
    """`samples` are times with figures. Returns None if there are too few of them."""
    settled = samples[int(len(samples) * WARM_UP) :]
    if len(settled) < FEWEST_SAMPLES:
        return None
    times = [at for at, _ in settled]
    series = {name: [figures[name] for _, figures in settled] for name in MOST_GAINED}
    middle = {name: median(values) for name, values in series.items()}
    return Growth(process, was_there, middle, {name: gained(times, values) for name, values in series.items()})


def gained(times: Sequence[float], values: Sequence[float]) -> float:
    """Returns what the least-squares line gains from the first moment to the last, so that a single peak at the end is no growth."""
    return linear_regression(times, values).slope * (times[-1] - times[0])


class ProcessWatch:
    """Observes all processes of the cluster."""

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[float, Figures]]] = {}
        self._titles: dict[int, str] = {}  # the latest: Ray names a process when it knows the process's purpose
        self._times: list[float] = []

    def look(self, processes: Sequence[int], at_s: float) -> None:
        self._times.append(at_s)
        for process in processes:
            if (figures := look_at(process)) is not None:
                self._samples.setdefault(process, []).append((at_s, figures))
                self._titles[process] = title_of(process) or self._titles.get(process, "")

    def growths(self) -> list[Growth]:
        """Returns the growth of each process that ran long enough, by title and number."""
        first, last = self._times[0], self._times[-1]
        found = (
            growth_of(f"{self._titles[process][:40]} {process}", samples, was_there=samples[0][0] == first)
            for process, samples in self._samples.items()
            if samples[-1][0] - samples[0][0] >= (last - first) * YOUNG
        )
        return sorted((growth for growth in found if growth is not None), key=lambda growth: growth.process)


# --- the cluster


def is_quiet(node: dict[str, Any]) -> bool:
    """Whether a node of `/cluster` serves, has no request and every block back."""
    busy = ("running", "waiting", "transfers", "held_blocks", "quarantined_blocks")
    return (
        node["state"] == "ready" and node.get("unusable") is None and not any(node.get(name) for name in busy)
        and node["free_blocks"] == node["total_blocks"] > 0
    )  # fmt: skip


async def until_quiet(http: httpx.AsyncClient, within_s: float) -> str:
    """Waits until all nodes are there and quiet. Returns what is left of requests if they are not in time, or ""."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(_ASK_EVERY_S)
        try:
            nodes = (await http.get("/cluster")).raise_for_status().json()["nodes"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise Unavailable(f"the router does not show its cluster: {error}") from error
        waited = time.monotonic() - began
        if waited > _REPORTED_S and len(nodes) == _NODE_COUNT and all(map(is_quiet, nodes)):
            return ""
        if waited > within_s:
            busy = [node for node in nodes if not is_quiet(node)] or nodes
            return f"not quiet {within_s:.0f} s after the last answer: {busy}"


async def chaos(*words: str, folder: Path) -> dict[str, Any]:
    """Runs `tandem chaos` on the cluster, and returns what it says as JSON."""
    command = ("-m", "tandem.cluster.cli", "chaos", "--blow", "kill", "--to", "prefill", "--to", "decode", "-o", "json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--traffic", "own", "--out", str(folder), *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        raise
    try:
        return dict(json.loads(said))
    except ValueError as error:
        raise Unavailable(f"tandem chaos ended with status {process.returncode}") from error


async def kill_every(seconds: float, minutes: float, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Returns what became of each node that was killed."""
    often = ("--every", f"{seconds:g}", "--minutes", f"{minutes:g}", "--seed", str(seed))
    address = (await chaos(*often, folder=folder))["address"]  # what it says before it does anything
    found = await chaos("--address", address, "--yes", *often, folder=folder)
    if found["failure"]:
        raise Unavailable(found["failure"])
    return list(found["blows"])


# --- the verdict


class SoakVerdict(msgspec.Struct):
    minutes: float
    by_kind: dict[str, int]  # how many requests of each kind the mixed load had answered
    failures: dict[str, int]
    examples: dict[str, str]
    checked: int  # answers that are known
    wrong: list[str]
    kills: list[dict[str, Any]]
    growths: list[Growth]
    left_over: str = ""  # what was not given back at the end; "" if nothing
    faults: list[str] = []


def judge(soaked: SoakVerdict) -> list[str]:
    """Returns the faults, one sentence each; [] if all is well."""
    faults = [] if soaked.by_kind else ["nothing was answered"]
    for kind, count in sorted(soaked.failures.items()):
        faults.append(f"{count} requests failed, {kind}: {soaked.examples.get(kind, '')}")
    if not soaked.checked:
        faults.append("no answer was one that is known")
    if soaked.wrong:
        faults.append(f"{len(soaked.wrong)} wrong answers, the first: {soaked.wrong[0]}")
    faults += [f"not whole again: {kill['name']}" for kill in soaked.kills if kill["whole_after_s"] is None]
    faults += [soaked.left_over] if soaked.left_over else []
    ours = (growth for growth in soaked.growths if growth.process.startswith(OURS))
    return faults + [f"grew while it served: {what}" for growth in ours for what in growth.broken()]


def shown(soaked: SoakVerdict) -> Iterator[Table | str]:
    yield (
        f"{soaked.minutes:.1f} minutes: {soaked.checked} known answers, {len(soaked.wrong)} of them wrong; "
        f"{sum(soaked.failures.values())} requests failed"
    )
    yield ", ".join(f"{count} {kind}" for kind, count in sorted(soaked.by_kind.items()))
    if times := [kill["whole_after_s"] for kill in soaked.kills if kill["whole_after_s"] is not None]:
        yield f"{len(times)} nodes killed; whole again after {median(times):.1f} s (median), {max(times):.1f} s at most"
    rows = []
    for growth in soaked.growths:
        row: dict[str, Any] = {"process": growth.process}
        for name in MOST_GAINED:
            unit = _MIB if name == "memory" else 1
            row[f"{name} MiB" if name == "memory" else name] = f"{growth.middle[name] / unit:.0f}"
            row[f"{name} gained"] = f"{growth.gained[name] / unit:+.1f}"
        rows.append(row)
    yield table_of("After the first third: the middle, and what was gained", rows)
    for fault in soaked.faults:
        yield f"✗ {fault}"
    if not soaked.faults:
        yield "✓ nothing failed, nothing was wrong, nothing grew, every block came back"


def main() -> int:
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
    model, folder = model_folder(options.model), results_folder(options.out)
    words = TextVocabulary(load_tokenizer(model)).words
    adopt_orphans()
    system = tandem_system("tandem", "Tandem 2P+2D", model, *_NODES, *_SETTINGS)
    with running(system, folder / "server") as started:
        say(f"{system.title}: ready after {started.ready_s:.1f} s")
        soaked = asyncio.run(soak(options, started, words, folder))
    soaked.faults = judge(soaked)
    return report(options, soaked, *shown(soaked), failed=bool(soaked.faults), width=140)


async def soak(options: argparse.Namespace, started: RunningSystem, words: Sequence[str], folder: Path) -> SoakVerdict:
    url, known_users = started.system.url, max(1, options.users // 3)
    mixed = MixedLoad(url, Questions(words, started.model, options.seed), max(1, options.users - known_users))
    probes = Probes(lambda: url, None, started.model, options.seed, known_users, salted=False)
    watch, ending, left_over = ProcessWatch(), asyncio.Event(), ""
    kills: list[dict[str, Any]] = []
    async with mixed.client() as http:
        if left := await until_quiet(http, _WHOLE_WITHIN_S):
            raise Unavailable(left)
        say("filling every cache, and asking in peace what will be asked again")
        await mixed.fill()
        await probes.learn()
        watching = asyncio.create_task(_watch(watch, started.family, mixed, probes))
        loads = [asyncio.create_task(load.run(ending)) for load in (mixed, probes)]
        began = time.monotonic()
        try:
            if options.kill_every is not None:
                kills = await kill_every(options.kill_every, options.minutes, options.seed, folder / "chaos")
            await asyncio.sleep(max(0.0, options.minutes * 60 - (time.monotonic() - began)))
        except TandemError as error:
            left_over = str(error)
        ending.set()
        await asyncio.gather(*loads)
        minutes = (time.monotonic() - began) / 60
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        left_over = left_over or await until_quiet(http, _QUIET_WITHIN_S)
    counts = probes.counts
    failures = Counter(mixed.failures) + Counter(counts.failed) + Counter(counts.lost)
    failures += Counter({"refused": counts.refused})
    return SoakVerdict(
        minutes, dict(mixed.by_kind), dict(failures), counts.examples | mixed.examples, counts.right + len(counts.wrong),
        counts.wrong, kills, watch.growths(), left_over,
    )  # fmt: skip


async def _watch(watch: ProcessWatch, family: Family, mixed: MixedLoad, probes: Probes) -> None:
    began, said = time.monotonic(), 0.0
    while True:
        at, counts = time.monotonic() - began, probes.counts
        watch.look([os.getpid(), *family.members()], at)
        if at - said >= _SAY_EVERY_S:
            said, failed = at, sum(mixed.failures.values()) + counts.requests - counts.right - len(counts.wrong)
            say(f"{at / 60:.1f} min: {counts.right} right, {len(counts.wrong)} wrong, {failed} failed or under way")
        await asyncio.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    run(main)
