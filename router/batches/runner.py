"""Answers the lines of jobs with what is idle, and reads and writes jobs' files.

Any router process with the store's folder works on any job. Each takes a few lines at a time, so every line is answered by
one process, and by another one if that dies. Answers are kept in the store as they come, each once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from tandem.api.batches.lines import answer_line as written
from tandem.api.batches.lines import line_id
from tandem.api.batches.messages import result_line
from tandem.base.errors import TandemError
from tandem.router.batches.estimate import tokens_of
from tandem.router.batches.job_files import read_job, write_job
from tandem.router.batches.line_exchange import LineAnswer, LineConnection, answer_line
from tandem.router.batches.store import LEASE_S, BatchStore, ClaimedLine, LineResult
from tandem.router.batches.store_thread import StoreThread
from tandem.router.http.errors import error_body
from tandem.router.http.services import Services

logger = logging.getLogger(__name__)

TURN_S = 1.0  # between two looks at the store while nothing happens here
AFTER_FAILURE_S = 5.0
GROUP = 32  # lines claimed, and answers kept, in one transaction
MOST_ATTEMPTS = 5  # of a line that fails by no fault of its own; then its error is its answer
RETRIED = frozenset({499, 500, 502, 503, 504})
GATHER_S = 0.02  # lines that end within this time are kept, and followed by others, in one transaction
HOUSEKEEPING_S = 600.0
STOP_S = 5.0  # for the store, when the router ends


class BatchRunner:
    """`start`, then `stop`. Between them two tasks run: one keeps this process's lease, one works."""

    def __init__(self, services: Services, thread: StoreThread) -> None:
        self._services = services
        self._thread = thread
        self._news = asyncio.Event()
        self._running: dict[asyncio.Task[None], ClaimedLine] = {}
        self._answered: list[LineResult] = []
        self._given_back: list[tuple[ClaimedLine, bool]] = []  # and whether the attempt had begun
        self._keeping = asyncio.Lock()  # the end of the router may come while a turn keeps these
        self._job_task: asyncio.Task[None] | None = None
        self._stopping = False
        self._wait_until = 0.0  # no line is begun before: nodes had no room for one
        self._cleaned_at = time.monotonic()
        self._look_at = 0.0  # when to look for jobs that came, ended or were cancelled elsewhere

    def start(self) -> None:
        self._services.tasks.keep("batches", self._work)
        self._services.tasks.keep("batches' lease", self._keep_lease)

    def wake(self) -> None:
        """A job came, or was cancelled."""
        self._look_at = 0.0
        self._news.set()

    async def stop(self) -> None:
        """Ends what runs. Other processes, or this one's successor, answer the lines that are left."""
        self._stopping = True
        try:
            async with asyncio.timeout(STOP_S):
                await self._let_go()
        except (TandemError, TimeoutError) as error:
            why = str(error) or f"the disk has not answered for {STOP_S:g} s"
            logger.warning("batches: lines are given back only when the lease ends: %s", why)

    async def _let_go(self) -> None:
        """Ends what runs, keeps what is answered, and gives the rest back."""
        running = [*self._running, *([self._job_task] if self._job_task is not None else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if await self._is_used():
            await self._keep()
            await self._thread.do(BatchStore.give_back_all)

    async def _is_used(self) -> bool:
        """Whether anything was ever stored. The file system is only asked until this process has opened the store."""
        place = self._thread.store.place
        return place.is_open or await self._thread.do(lambda _: place.exists)

    async def _keep_lease(self) -> None:
        while not self._stopping:
            if await self._is_used():
                try:
                    await self._thread.do(BatchStore.renew)
                except TandemError as error:
                    logger.warning("batches: the lease is not renewed: %s", error)
            await asyncio.sleep(LEASE_S / 6)
        await asyncio.Event().wait()  # a task of `keep` ends with the router

    async def _work(self) -> None:
        """Runs for as long as the router does. A fault that ended it before has left lines that are claimed and not
        answered, so they are given back first."""
        await self._let_go()
        while True:
            if not self._stopping and await self._is_used():
                try:
                    await self._turn()
                except TandemError as error:  # such as a full disk: what is answered stays here, and is kept later
                    logger.warning("batches: %s", error)
                    await asyncio.sleep(AFTER_FAILURE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    await self._news.wait()
                    await asyncio.sleep(GATHER_S)
            self._news.clear()

    async def _turn(self) -> None:
        await self._keep()
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + TURN_S
            await self._look_after_jobs(now)
        await self._begin_some()

    async def _look_after_jobs(self, now: float) -> None:
        do = self._thread.do
        await do(BatchStore.end_overdue)
        await self._drop_unwanted()
        if self._job_task is None and (job := await do(BatchStore.take_job)) is not None:
            work = read_job if job.status == "validating" else write_job
            self._job_task = asyncio.create_task(work(self._thread, job, self._services.config.limits.body_bytes))
            self._job_task.add_done_callback(self._on_job_done)
        if now > self._cleaned_at + HOUSEKEEPING_S:
            self._cleaned_at = now
            await do(lambda store: store.files.forget_expired())

    def _on_job_done(self, task: asyncio.Task[None]) -> None:
        self._job_task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            bug = error if not isinstance(error, TandemError) else None
            logger.error("batches: work on a job's files failed, and is tried again: %s", error, exc_info=bug)
            self._look_at = time.monotonic() + AFTER_FAILURE_S
            return
        self.wake()

    async def _begin_some(self) -> None:
        """Claims lines for what is idle now, and starts them."""
        if self._stopping or self._services.draining or time.monotonic() < self._wait_until:
            return
        room = min(GROUP, self._services.dispatcher.idle_room() - len(self._running))
        if room <= 0:
            return
        lines = await self._thread.do(lambda store: store.claim(room))
        if lines:
            self._news.set()  # there may be room for more
        while lines:
            line, data = lines.pop(0)
            work = self._answer(line, LineConnection(data))
            del data
            task = asyncio.create_task(work, name=f"{line.job}/{line.number}")
            self._running[task] = line
            task.add_done_callback(self._on_line_done)
            await asyncio.sleep(0)  # one at a time, so that requests get their turns in between

    def _on_line_done(self, task: asyncio.Task[None]) -> None:
        line = self._running.pop(task, None)
        if line is not None and not task.cancelled() and (error := task.exception()) is not None:
            logger.error("batches: %s: a bug", task.get_name(), exc_info=error)
            body = error_body("internal error; the router's log has it", 500, "internal_error")
            self._take(line, LineAnswer(500, body, "", begun=True))
        self._news.set()

    async def _answer(self, line: ClaimedLine, connection: LineConnection) -> None:
        self._take(line, await self._answer_of(line, connection))

    async def _answer_of(self, line: ClaimedLine, connection: LineConnection) -> LineAnswer:
        handler = self._services.handlers.get(line.endpoint)
        tenant = self._services.keys.named(line.owner)
        if handler is None:
            return _refused(404, "not_found", f"this server has nothing at {line.endpoint}")
        if tenant is None and (line.owner or self._services.keys.required):
            return _refused(401, "invalid_api_key", "the batch's key is none of this server's any more")
        if connection.asks_for_a_stream:
            return _refused(400, "invalid_request", "stream: the lines of a batch are answered whole; leave it out")
        return await answer_line(self._services, handler, line.endpoint, connection, tenant)

    def _take(self, line: ClaimedLine, answer: LineAnswer) -> None:
        if answer.status in RETRIED and line.attempts < MOST_ATTEMPTS:
            self._given_back.append((line, answer.begun))
            if not answer.begun:
                self._wait_until = time.monotonic() + TURN_S / 2
            return
        self._services.metrics.batch_lines.inc("answered" if answer.status == 200 else "failed")
        if line.form == "anthropic":
            text = result_line(line.custom_id, answer.status, answer.body)
        else:
            name = line_id(line.job, line.number)
            text = written(name, line.custom_id, answer.status, answer.request_id, answer.body)
        self._answered.append(LineResult(line, answer.status == 200, text, tokens_of(answer.body)))

    async def _keep(self) -> None:
        """Writes what has been answered since the last turn. After a failure it is still here."""
        async with self._keeping:
            while self._answered:
                some = self._answered[:GROUP]
                await self._thread.do(lambda store, some=some: store.record(some))  # type: ignore[misc]
                del self._answered[: len(some)]
            while self._given_back:
                back = self._given_back[:GROUP]
                await self._thread.do(lambda store, back=back: store.give_back(back))  # type: ignore[misc]
                del self._given_back[: len(back)]

    async def _drop_unwanted(self) -> None:
        """Ends the lines of jobs that were cancelled, or whose time is over."""
        jobs = list({line.job for line in self._running.values()})
        if not jobs:
            return
        unwanted = await self._thread.do(lambda store: store.unwanted(jobs))
        for task, line in list(self._running.items()):
            if line.job in unwanted:
                task.cancel()


def _refused(status: int, code: str, why: str) -> LineAnswer:
    return LineAnswer(status, error_body(why, status, code), "", begun=False)
