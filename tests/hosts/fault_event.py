"""Injects one fault into a cluster that has requests in every phase, and judges each request's answer."""

from __future__ import annotations

import enum
import itertools
import json
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_cluster import RATES, FaultCluster, NotMended
from fault_table import Fault
from lab import Lab
from stalls import Stalls

LOAD = Path(__file__).with_name("fault_load.py")
LONGEST_GAP_S = 3.0
_BEGIN_S = 40.0  # how long requests may take to reach the phase in which the fault shall meet them
_OVER_S = 150.0  # how long the last answer may take after the fault's end
_SHORT, _LONG = 40, 600
_STREAM, _ANSWER = 250, 24
_LONGS = 6  # long prompts in one scene: before, during and after the fault
_SETTLED_S = 0.3  # from the fault's beginning to the requests of phase `during`


class Phase(enum.StrEnum):
    """How far a request was when the fault began."""

    QUEUED = "queued"  # it waited at a prefill node behind other prompts
    PROMPT = "prompt"  # its prompt was being computed
    TRANSFER = "transfer"  # its first token had come, and the next ones waited for its KV
    DECODE = "decode"  # it was in the middle of its answer
    DURING = "during"  # it came during the fault
    AFTER = "after"  # it came after the fault


@dataclass(frozen=True)
class Question:
    body: dict[str, Any]

    def key(self) -> str:
        return json.dumps(self.body, sort_keys=True)


class Questions:
    """The requests' prompts, the same each time, so that each has one right answer."""

    def __init__(self, vocabulary: int) -> None:
        rng = random.Random(5)
        self._prompts = {
            length: [[rng.randrange(8, vocabulary) for _ in range(length)] for _ in range(6)]
            for length in (_SHORT, _LONG)
        }

    def _make(self, length: int, number: int, tokens: int) -> Question:
        prompts = self._prompts[length]
        number %= len(prompts)
        body: dict[str, Any] = {
            "model": "model", "prompt": prompts[number], "max_tokens": tokens, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        sampling = {"temperature": 0.9, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0}
        return Question(body | sampling)

    def stream(self, number: int) -> Question:
        return self._make(_SHORT, number, _STREAM)

    def long(self, number: int) -> Question:
        return self._make(_LONG, number, _ANSWER)

    def short(self, number: int) -> Question:
        return self._make(_SHORT, number, _ANSWER)


@dataclass
class SentRequest:
    """One request and its answer."""

    question: Question
    sent: float
    times: list[float] = field(default_factory=list)
    ending: dict[str, Any] | None = None
    changed: Callable[[], None] = lambda: None

    @property
    def tokens(self) -> int:
        return len(self.times)


class LoadProcess:
    """The process of fault_load.py, which runs outside the hosts."""

    def __init__(self, lab: Lab, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._process = subprocess.Popen(
            lab.laptop_command(sys.executable, str(LOAD)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        self._asked: dict[str, SentRequest] = {}
        self._heard: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, question: Question, salt: str) -> SentRequest:
        name = str(len(self._asked))
        asked = self._asked[name] = SentRequest(question, time.monotonic())
        self._tell({"ask": name, "url": self._url, "body": question.body | {"cache_salt": salt}})
        return asked

    def leave(self, asked: SentRequest) -> None:
        self._tell({"leave": next(name for name, one in self._asked.items() if one is asked)})

    def wait(self, is_so: Callable[[], bool], until: float) -> bool:
        """Waits until the condition holds; checks it at each new event. Returns False if the time is up first."""
        while not is_so():
            left = until - time.monotonic()
            if left <= 0:
                return False
            try:
                self._heard.get(timeout=min(left, 1.0))
            except queue.Empty:
                assert self._process.poll() is None, "the load's process has ended"
        return True

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            asked = self._asked[news["id"]]
            if news["event"] == "token":
                asked.times.append(news["at"])
            else:
                asked.times, asked.ending = news["times"], news
            self._heard.put(None)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class Run:
    """The requests of one phase under one fault: one line of the results."""

    fault: str
    repetition: int
    rate: str
    phase: str
    requests: int
    right: int = 0
    typed_errors: int = 0
    faults: list[str] = field(default_factory=list)  # violations, a sentence each
    errors: list[str] = field(default_factory=list)  # the messages of typed errors
    longest_gap_s: float = 0.0
    over_s: float = 0.0  # the part of a gap that neither the quiet run nor the machine's stalls explain
    stalled_s: float = 0.0
    mended_s: float = 0.0  # from the fault's end until every block is free
    dropped_packets: int = 0

    @property
    def ok(self) -> bool:
        return not self.faults


class Reference:
    """The cluster's answers and times without a fault."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.lines: dict[str, float] = {}  # the longest wait of a phase of the quiet scene, by rate and phase


class Scene:
    def __init__(
        self,
        cluster: FaultCluster,
        load: LoadProcess,
        stalls: Stalls,
        questions: Questions,
        reference: Reference,
        kv_bytes: int,
    ) -> None:
        self._cluster = cluster
        self._load = load
        self._stalls = stalls
        self._questions = questions
        self._reference = reference
        self._kv_bytes = kv_bytes  # of one token
        self._salt = ""
        self._salts = 0
        self._crowd = 0  # how many long prompts came besides

    def keep_logs(self, folder: Path) -> None:
        self._cluster.keep_logs(folder)

    def without_ray(self) -> list[str]:
        return self._cluster.without_ray()

    def learn(self) -> None:
        """Asks each question without a fault, and keeps the answers."""
        questions = self._questions
        # All at once, because each takes seconds
        self._learn([questions.stream(number) for number in range(6)])
        for number in range(6):
            for question in (questions.long(number), questions.short(number)):
                self._learn([question])

    def _learn(self, questions: list[Question]) -> None:
        asked = [self._load.ask(question, "in peace") for question in questions]
        self._load.wait(lambda: all(one.ending for one in asked), time.monotonic() + 120)
        for one in asked:
            ending = one.ending or {"outcome": "hang"}
            assert ending["outcome"] == "whole", f"a question asked in peace is not answered: {ending}"
            self._reference.texts[one.question.key()] = ending["text"]

    def play(self, fault: Fault | None, repetition: int, rate: str) -> list[Run]:
        """Plays one scene. Without a fault it is the quiet scene, which measures how long the requests of each phase wait."""
        cluster, load, questions = self._cluster, self._load, self._questions
        self._salt = f"{fault.name if fault else 'quiet'}/{repetition}/{rate}/{time.time():.3f}"
        cluster.limit_links(rate)
        before = [self._ask(questions.stream(number)) for number in (repetition, repetition + 1)]
        load.wait(lambda: all(one.tokens >= 8 or one.ending for one in before), time.monotonic() + _BEGIN_S)
        longs = [self._ask(questions.long(repetition + number)) for number in range(4)]
        self._crowd = fault.crowd if fault else 0
        crowd = [self._ask(questions.long(number)) for number in range(self._crowd)]
        if repetition % 2 == 0:
            load.wait(lambda: any(one.tokens or one.ending for one in longs), time.monotonic() + _BEGIN_S)
        else:
            time.sleep(0.05 * (1 + repetition))  # a moment while the prompts are computed
        phases = {id(one): self._phase(one, longs) for one in [*before, *longs]}
        began = time.monotonic()
        dropped = 0
        late: list[SentRequest] = []
        if fault is not None:
            with self._fault(fault):
                time.sleep(min(_SETTLED_S, fault.seconds))
                late = self._meanwhile()
                if fault.leaving:
                    self._leave(crowd, repetition)
                time.sleep(max(0.0, began + fault.seconds - time.monotonic()))
                dropped = cluster.dropped_packets()
        else:
            time.sleep(_SETTLED_S)
            late = self._meanwhile()
        phases |= {id(one): Phase.DURING for one in late}
        ended = time.monotonic()
        after = [self._ask(questions.short(repetition)), self._ask(questions.long(repetition + 1))]
        phases |= {id(one): Phase.AFTER for one in after}
        everyone = [*before, *longs, *late, *after]
        load.wait(lambda: all(one.ending for one in [*everyone, *crowd]), ended + _OVER_S)
        for one in [*everyone, *crowd]:
            if one.ending is None:
                load.leave(one)
        audit, mended_s = self._audit(ended)
        runs = []
        for phase in Phase:
            requests = [one for one in everyone if phases[id(one)] is phase]
            if requests:
                run = Run(fault.name if fault else "", repetition, rate, phase.value, len(requests))
                run.mended_s, run.dropped_packets = mended_s, dropped
                run.faults += audit
                for one in requests:
                    self._judge(run, one, phase, fault, began)
                runs.append(run)
        self._judge_crowd(runs, crowd, fault)
        return runs

    def _ask(self, question: Question) -> SentRequest:
        """Asks with a salt of its own, so that no prefix cache has its prompt."""
        self._salts += 1
        return self._load.ask(question, f"{self._salt}/{self._salts}")

    def _meanwhile(self) -> list[SentRequest]:
        questions = self._questions
        return [self._ask(questions.short(0)), self._ask(questions.short(1)), self._ask(questions.long(4))]

    def _leave(self, crowd: list[SentRequest], seed: int) -> None:
        rng = random.Random(seed)
        for one in crowd:
            time.sleep(rng.uniform(0.0, 0.25))
            self._load.leave(one)

    @contextmanager
    def _fault(self, fault: Fault) -> Iterator[None]:
        try:
            fault.begin(self._cluster)
            yield
        finally:
            fault.end(self._cluster)

    def _phase(self, asked: SentRequest, longs: list[SentRequest]) -> Phase:
        if asked.tokens > 1 or asked.ending:
            return Phase.DECODE
        if asked.tokens == 1:
            return Phase.TRANSFER
        if asked in longs[2:]:
            return Phase.QUEUED
        return Phase.PROMPT

    def _audit(self, ended: float) -> tuple[list[str], float]:
        try:
            self._cluster.until_quiet()
            return [], time.monotonic() - ended
        except NotMended as error:
            return [str(error)], time.monotonic() - ended

    def _judge(self, run: Run, asked: SentRequest, phase: Phase, fault: Fault | None, began: float) -> None:
        ending = asked.ending or {"outcome": "hang", "detail": "no end"}
        outcome, detail = ending["outcome"], ending.get("detail", "")
        right = self._reference.texts[asked.question.key()]
        if outcome == "whole" and ending["text"] == right:
            run.right += 1
        elif outcome == "whole":
            run.faults.append(f"wrong: {ending['text'][:80]!r} instead of {right[:80]!r}")
        elif outcome in ("error", "refused"):
            run.typed_errors += 1
            run.errors.append(detail)
            if not right.startswith(ending["text"]):
                run.faults.append(f"wrong before its error: {ending['text'][:80]!r}")
        elif outcome == "connection" and fault is not None and fault.ends_connections:
            run.typed_errors += 1
            run.errors.append(detail)
        else:
            run.faults.append(f"{outcome}: {detail}")
        self._judge_gaps(run, asked, phase, fault, began)

    def _judge_gaps(self, run: Run, asked: SentRequest, phase: Phase, fault: Fault | None, began: float) -> None:
        """Judges each gap between tokens; the first gap begins when the request was sent. `_line` says how long a gap may be."""
        moments = [asked.sent, *asked.times, *([asked.ending["at"]] if asked.ending else [])]
        for number, (last, this) in enumerate(itertools.pairwise(moments)):
            if this < began and fault is not None:
                continue
            stalled = self._stalls.within(last, this)
            line = self._line(run.rate, number)
            over = this - last - stalled - line
            run.longest_gap_s = max(run.longest_gap_s, this - last)
            run.stalled_s = max(run.stalled_s, stalled)
            run.over_s = max(run.over_s, over)
            if fault is None:
                self._note_line(run.rate, number, this - last)
            elif fault.has_healthy_way and over > LONGEST_GAP_S:
                run.faults.append(
                    f"a gap of {this - last:.1f} s after {number} tokens ({line:.1f} s of it in line, "
                    f"{stalled:.1f} s the machine's)"
                )

    def _line(self, rate: str, number: int) -> float:
        """The time that this token waited in the quiet scene, and the link's time for the scene's long prompts once more, because the
        prompts of a lost node go over another node's link."""
        moving = _LONG * self._kv_bytes * 8 / RATES[rate]
        reading = self._reference.lines.get(f"{rate}/0", 0.0) / 2  # there are two prefill nodes
        crowd = self._crowd * (moving + reading) if number < 2 else 0.0
        return crowd + _LONGS * moving + self._reference.lines.get(f"{rate}/{min(number, 2)}", 0.0)

    def _note_line(self, rate: str, number: int, waited: float) -> None:
        """Notes the wait of first and second tokens; later tokens wait in no queue."""
        if number < 2:
            key = f"{rate}/{number}"
            self._reference.lines[key] = max(self._reference.lines.get(key, 0.0), waited)

    def _judge_crowd(self, runs: list[Run], crowd: list[SentRequest], fault: Fault | None) -> None:
        if not crowd or fault is None:
            return
        run = Run(fault.name, runs[0].repetition, runs[0].rate, "crowd", len(crowd), mended_s=runs[0].mended_s)
        for one in crowd:
            if one.ending is not None and one.ending["outcome"] == "left":
                run.right += 1
                right = self._reference.texts[one.question.key()]
                if not right.startswith(one.ending["text"]):
                    run.faults.append(f"wrong before its client left: {one.ending['text'][:80]!r}")
            else:
                self._judge(run, one, Phase.QUEUED, fault, one.sent)
        runs.append(run)
