"""The service of an encoder node.

One thread encodes one question after another, so an image that two nodes ask for is encoded once. A question whose time is over is dropped,
because its asker has encoded the image itself by then. Every other question is answered until the node ends, with rows or with a refusal.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from tandem.base.errors import ConfigurationError, InvalidRequest, NodeLost, TandemError
from tandem.engine.scheduling.output import EncoderInput
from tandem.engine.scheduling.state import SchedulerStats
from tandem.machine.resources import bind, core_quota
from tandem.node.config import NodeConfig
from tandem.node.lifecycle import NodeLifecycle
from tandem.node.requests import failed_chunk
from tandem.node.routers import Receiver, RouterLine
from tandem.node.status import gauges
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.encoding import MOST_BYTES, Encode, EncodedRows, EncodingRefused, ToAsker, checksum
from tandem.wire.images import digest_of_image, rows_name
from tandem.wire.nodes import NodeState
from tandem.wire.requests import NodeCounters, NodeStatus, Submit, TokenBatch, ToNode
from tandem.wire.sockets import Inbox, Outbox

if TYPE_CHECKING:
    from tandem.engine.model.lone_tower import LoneTower


class RowsCache:
    """Rows by the name of their part, which stands for its content and the cache salt of the request. The least recently used rows make room for new ones."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is in rows, each of which is one token of a prompt."""
        self.capacity = capacity
        self.used = 0
        self._rows: OrderedDict[str, PromptEmbeds] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, identifier: str) -> PromptEmbeds | None:
        rows = self._rows.get(identifier)
        if rows is not None:
            self._rows.move_to_end(identifier)
        return rows

    def keep(self, identifier: str, rows: PromptEmbeds) -> None:
        """Keeps the rows, unless they are more than the whole cache holds."""
        if identifier in self._rows or rows.count > self.capacity:
            return
        while self.used + rows.count > self.capacity:
            _, oldest = self._rows.popitem(last=False)
            self.used -= oldest.count
        self._rows[identifier] = rows
        self.used += rows.count

    def clear(self) -> None:
        self._rows.clear()
        self.used = 0


def messages_of(
    question: int, model: str, identifier: str, rows: PromptEmbeds, most_bytes: int = MOST_BYTES
) -> Iterator[EncodedRows]:
    """Yields a part's rows in order, in messages of at most `most_bytes`."""
    together = max(1, most_bytes // rows.row_bytes)
    for first in range(0, rows.count, together):
        begin, end = first * rows.row_bytes, (first + together) * rows.row_bytes
        some = msgspec.structs.replace(rows, data=rows.data[begin:end])
        yield EncodedRows(question, model, identifier, first, some, checksum(model, identifier, first, some))


logger = logging.getLogger(__name__)

# The most questions that may wait; more are refused. Their files are in memory, and their askers wait for seconds only.
MOST_QUESTIONS = 64


class _QueuedQuestion(NamedTuple):
    question: Encode
    at: float


class QuestionInbox(Receiver, Protocol):
    """What the service needs of an Inbox."""

    endpoint: str

    def close(self) -> None: ...


class AnswerOutbox(Protocol):
    """What the service needs of an Outbox."""

    def send(self, endpoint: str, message: ToAsker) -> None: ...
    def close(self) -> None: ...


class EncodeService(NodeLifecycle):
    def __init__(
        self,
        config: NodeConfig,
        epoch: int,
        tower: LoneTower,
        cache: RowsCache,
        line: RouterLine,
        clock: Callable[[], float] = time.monotonic,
        *,
        open_inbox: Callable[..., QuestionInbox] = Inbox,
        open_outbox: Callable[[], AnswerOutbox] = Outbox,
    ) -> None:
        super().__init__(config, epoch, line, clock)
        self._tower = tower
        self._content = tower.info.content
        self._cache = cache
        self._outbox = open_outbox()
        self._questions: queue.Queue[_QueuedQuestion | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, name="encoder", daemon=True)
        self._at_rest = threading.Condition()
        self._started = 0  # questions that came
        self._ended: Counter[str] = Counter()  # ended questions by outcome
        self._unanswered = 0  # questions that wait or are being answered
        self._begun: float | None = None  # when the current question was begun
        self._forgets = threading.Event()  # set: the worker empties the cache before its next question
        # Written by the worker thread only.
        self._made = self._found = self._sent = self._steps = 0
        self._busy_s = 0.0
        self._inbox = open_inbox(config.host, Encode, self._on_question, name=f"{config.node_id}-images")
        self._receivers.append((self._inbox, "who asks for rows"))

    @property
    def endpoint(self) -> str:
        """Where other nodes ask."""
        return self._inbox.endpoint

    def start(self) -> None:
        self._worker.start()
        super().start()

    def status(self) -> NodeStatus:
        now, begun, unanswered = self._clock(), self._begun, self._unanswered
        is_busy = begun is not None
        stats = SchedulerStats(running=int(is_busy), waiting=max(0, unanswered - is_busy))
        return self._reported(
            **gauges(stats, now),
            transfers=0,
            step_age_s=now - begun if begun is not None else 0.0,
            counters=NodeCounters(
                requests_started=self._started,
                requests_finished=dict(self._ended),
                encoder_tokens=self._made,
                encoder_tokens_reused=self._found,
                encoder_tokens_sent=self._sent,
                steps=self._steps,
                step_seconds=self._busy_s,
                malformed_frames=self.malformed_frames,
                line_gaps=self._line.gaps,
            ),
        )

    def _come_to_rest(self, timeout_s: float) -> bool:
        with self._at_rest:
            return self._at_rest.wait_for(lambda: not self._unanswered, timeout_s)

    def reset_cache(self, timeout_s: float) -> bool:
        """Empties the cache before the next question. Cached rows are found by their image's content, so they cannot be wrong."""
        self._forgets.set()
        return True

    def stop(self) -> None:
        """Idempotent."""
        self._inbox.close()
        if self._worker.is_alive():
            self._questions.put(None)
            self._worker.join(5)
        super().stop()
        self._outbox.close()

    # --- routers (the channel's thread)

    def _take(self, message: ToNode) -> None:
        """Refuses a request. This node has no requests, so it ignores messages about them."""
        if isinstance(message, Submit):
            refusal = InvalidRequest(f"{self._config.node_id} encodes images, and runs no requests")
            chunk = failed_chunk(message, refusal.to_wire())
            self._routers.tell(message.reply_to, TokenBatch(self._config.node_id, self._epoch, [chunk]))

    def _list_requests(self, reply_to: str) -> None:
        self._tell_holding(reply_to, self._line.received(reply_to), {})

    # --- questions (the inbox's thread)

    def _on_question(self, question: Encode) -> None:
        # A drain that waits for what is unanswered must not miss a question that was taken before it.
        with self._at_rest:
            self._started += 1
            why = self._refusal(question)
            if why is None:
                self._unanswered += 1
        if why is None:
            self._questions.put(_QueuedQuestion(question, self._clock()))
        else:
            self._refuse(question, why)

    def _refusal(self, question: Encode) -> str | None:
        name = self._config.node_id
        if (state := self._condition.state) is not NodeState.READY:
            return f"{name} is {state.value}"
        if question.epoch != self._epoch:
            return f"{name} is another incarnation than the one that was asked"
        if question.model != self._content:
            return f"{name} serves another model"
        if self._unanswered >= MOST_QUESTIONS:
            return f"{name} has {MOST_QUESTIONS} images in its line"
        return None

    # --- the worker

    def _work(self) -> None:
        if self._config.cores and core_quota() is None:
            # The threads that compute with this one start with the first image and inherit its cores.
            try:
                bind([threading.get_native_id()], self._config.cores)
            except ConfigurationError as error:
                logger.exception("the encoder's thread could not be bound")
                self._condition.fail(error)  # questions are refused, and the controller starts another node
        while self.turn():
            pass

    def turn(self, timeout_s: float | None = None) -> bool:
        """Answers the next question, for which it waits up to `timeout_s`; None: without a limit. Returns False once the service stops."""
        try:
            asked = self._questions.get(timeout_s != 0.0, timeout_s)
        except queue.Empty:
            return True
        if asked is None:
            return False
        try:
            self._answer(asked)
        except Exception as error:
            # A failure of the tower would recur with every image, so the node fails and the controller starts another.
            logger.exception("the vision tower failed")
            self._condition.fail(error)
            self._refuse(asked.question, f"{self._config.node_id} has failed")
        finally:
            self._begun = None
            with self._at_rest:
                self._unanswered -= 1
                self._at_rest.notify_all()
        return True

    def _answer(self, asked: _QueuedQuestion) -> None:
        question, self._begun = asked.question, self._clock()
        if self._condition.state is NodeState.FAILED:
            self._refuse(question, f"{self._config.node_id} has failed")
            return
        if self._begun - asked.at > question.timeout_s:
            self._count("late")
            return
        if self._forgets.is_set():
            self._forgets.clear()
            self._cache.clear()
        try:
            rows = self._rows_of(question)
        except TandemError as error:
            self._refuse(question, str(error))
            return
        finally:
            self._busy_s += self._clock() - self._begun
        for identifier, some in rows.items():
            for message in messages_of(question.question, self._content, identifier, some):
                self._send(question.reply_to, message)
            self._sent += some.count
        self._count("sent")

    def _rows_of(self, question: Encode) -> dict[str, PromptEmbeds]:
        """Returns the rows of the question's parts in its order. Their names are computed from the file itself, not taken from the
        question."""
        digest = digest_of_image(question.file)
        if digest != question.digest:
            raise InvalidRequest("the image's digest is not the one in the question")
        names = [f"{digest}/{part.part}" for part in question.parts]
        cached_as = {name: rows_name(name, question.salt) for name in names}
        found = {name: rows for name in names if (rows := self._cache.find(cached_as[name])) is not None}
        self._found += sum(rows.count for rows in found.values())
        missing = [
            EncoderInput(name, question.file, part.part, part.length, part.columns)
            for name, part in zip(names, question.parts, strict=True)
            if name not in found
        ]
        if missing:
            self._steps += 1
            for one, rows in zip(missing, self._tower.encode(missing), strict=True):
                self._made += rows.count
                self._cache.keep(cached_as[one.identifier], rows)
                found[one.identifier] = rows
        for name, part in zip(names, question.parts, strict=True):
            if found[name].count != part.length:
                raise InvalidRequest(
                    f"a part of the image has {found[name].count} rows, but the question expects {part.length}"
                )
        return {name: found[name] for name in names}

    def _count(self, ending: str) -> None:
        with self._at_rest:
            self._ended[ending] += 1

    def _refuse(self, question: Encode, why: str) -> None:
        self._count("refused")
        self._send(question.reply_to, EncodingRefused(question.question, why))

    def _send(self, reply_to: str, message: ToAsker) -> None:
        try:
            self._outbox.send(reply_to, message)
        except NodeLost as error:
            logger.warning("rows were not sent: %s", error)  # the asker encodes the image itself
