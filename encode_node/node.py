"""An encoder node. Prefill and aggregated nodes ask it for the rows of images; routers ping it and get its status.

One thread encodes one question after another, so an image that two nodes ask for is encoded once. A question whose time is over is dropped,
because its asker has encoded the image itself by then. Every other question is answered until the node ends, with rows or with a refusal.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tandem.base.errors import (
    ConfigurationError,
    InternalError,
    InvalidRequest,
    NodeLost,
    TandemError,
    Unavailable,
)
from tandem.encode_node.rows import RowsCache, messages_of
from tandem.engine.cache.encoder_cache import EncoderInput
from tandem.engine.model.runner import ModelRunner
from tandem.machine.resources import bind, core_quota
from tandem.node.config import NodeConfig
from tandem.node.node import Progress
from tandem.node.routers import Routers
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.encoding import Encode, EncodingRefused, ToAsker
from tandem.wire.images import digest_of_image, rows_name
from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import NodeInfo, NodeState, Role, new_epoch
from tandem.wire.requests import (
    Ask,
    Holding,
    NodeCounters,
    NodeStatus,
    Ping,
    Submit,
    TokenBatch,
    TokenChunk,
    ToNode,
)
from tandem.wire.sampling import FinishReason
from tandem.wire.sockets import Inbox, Outbox
from tandem.wire.tracing import ClockReading

if TYPE_CHECKING:
    from tandem.engine.model.vision.alone import LoneTower

logger = logging.getLogger(__name__)

# The most questions that may wait; more are refused. Their files are in memory, and their askers wait for seconds only.
MOST_QUESTIONS = 64


class _QueuedQuestion(NamedTuple):
    question: Encode
    at: float


class EncodeNode:
    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.epoch = new_epoch()
        self._state = NodeState.STARTING
        self._detail = ""
        self._channel: NumberedChannel | None = None
        self._routers: Routers | None = None
        self._inbox: Inbox[Encode] | None = None
        self._outbox: Outbox | None = None
        self._tower: LoneTower | None = None
        self._content = ""
        self._cache = RowsCache(config.engine.cache.encoder_tokens)
        self._questions: queue.Queue[_QueuedQuestion | None] = queue.Queue()
        self._worker: threading.Thread | None = None
        self._at_rest = threading.Condition()
        self._ended: Counter[str] = Counter()  # ended questions by outcome
        self._unanswered = 0  # questions that wait or are being answered
        self._begun: float | None = None  # when the current question was begun
        self._forgets = threading.Event()  # set: the worker empties the cache before its next question
        # Written by the worker thread only.
        self._made = self._found = self._sent = self._steps = 0
        self._busy_s = 0.0

    # --- called by the process that holds the node (node.hosting)

    def start(
        self,
        progress: Progress | None = None,
        runner: ModelRunner | None = None,
        *,
        model_folder: str | None = None,
        adapters: Mapping[str, str] | None = None,
        draft_folder: str | None = None,
        keepers: Sequence[str] = (),
    ) -> NodeInfo:
        # Imported here: the cluster imports nodes for their configuration, and must not import torch.
        from tandem.engine.model.vision.alone import load_tower

        if runner is not None:
            raise ConfigurationError("an encoder node cannot take over a model that another node has loaded")
        config = self.config
        model = config.engine.model
        if model_folder is not None:
            model = msgspec.structs.replace(model, path=model_folder)
        self._tower = tower = load_tower(model, config.engine.scheduler.max_model_len, progress)
        self._content = tower.info.content
        self._outbox = Outbox()
        self._channel = channel = NumberedChannel(config.host, self.epoch, name=f"{config.node_id}-inbox")
        timeouts = config.timeouts
        self._routers = Routers(
            channel,
            self.status,
            lost=lambda reply_to: None,
            period_s=timeouts.status_period_s,
            silence_s=timeouts.router_silence_s,
            clock=time.monotonic,
        )
        self._inbox = Inbox(config.host, Encode, self._on_question, name=f"{config.node_id}-images")
        self._state = NodeState.READY
        self._worker = threading.Thread(target=self._work, name="encoder", daemon=True)
        self._worker.start()
        self._routers.start()
        channel.listen(self._receive, begun=self._begin_line, replaced=lambda endpoint: None)
        return NodeInfo(
            node_id=config.node_id,
            role=Role.ENCODE,
            epoch=self.epoch,
            request_endpoint=channel.endpoint,
            peer_endpoint=self._inbox.endpoint,
            model=tower.info.name,
            max_model_len=tower.info.max_model_len,
            block_size=config.engine.cache.block_size,
            content=self._content,
            tokenizer=tower.info.tokenizer,
        )

    def status(self) -> NodeStatus:
        failure, begun = self.failure, self._begun
        unanswered = self._unanswered
        is_busy = begun is not None
        return NodeStatus(
            node_id=self.config.node_id,
            role=Role.ENCODE,
            epoch=self.epoch,
            state=self._state if failure is None else NodeState.FAILED,
            free_blocks=0,
            total_blocks=0,
            running=int(is_busy),
            waiting=max(0, unanswered - is_busy),
            waiting_tokens=0,
            transfers=0,
            held_blocks=0,
            step_age_s=time.monotonic() - begun if begun is not None else 0.0,
            counters=NodeCounters(
                requests_started=sum(self._ended.values()) + unanswered,
                requests_finished=dict(self._ended),
                encoder_tokens=self._made,
                encoder_tokens_reused=self._found,
                encoder_tokens_sent=self._sent,
                steps=self._steps,
                step_seconds=self._busy_s,
                malformed_frames=self._malformed(),
                line_gaps=self._channel.gaps if self._channel is not None else 0,
            ),
            detail=failure or "",
        )

    def _malformed(self) -> int:
        return sum(each.malformed for each in (self._channel, self._inbox) if each is not None)

    def routers_heard(self) -> list[str]:
        return self._routers.known if self._routers is not None else []

    @property
    def failure(self) -> str | None:
        if self._detail:
            return self._detail
        for each, who in ((self._channel, "its routers"), (self._inbox, "who asks for rows")):
            if each is not None and each.died is not None:
                return f"the thread that listens to {who} has died: {each.died}"
        return None

    def drain(self, timeout_s: float) -> bool:
        """Refuses new questions. Returns whether every question was answered in time and the node has not failed."""
        if self._state is NodeState.READY:
            self._state = NodeState.DRAINING
        with self._at_rest:
            return self._at_rest.wait_for(lambda: not self._unanswered, timeout_s) and self.failure is None

    def reset_cache(self, timeout_s: float) -> bool:
        """Empties the cache before the next question. Cached rows are found by their image's content, so they cannot be wrong."""
        self._forgets.set()
        return True

    def set_adapters(
        self, folders: Mapping[str, str], kept: Collection[str], timeout_s: float
    ) -> dict[str, str]:
        """Does nothing: adapters change nothing that this node computes."""
        return {}

    def release(self) -> ModelRunner:
        raise Unavailable(f"{self.config.node_id} has only a vision tower, so its role cannot change")

    def stop(self) -> None:
        """Idempotent."""
        if self._inbox is not None:
            self._inbox.close()
        if self._worker is not None:
            self._questions.put(None)
            self._worker.join(5)
        if self._routers is not None:
            self._routers.stop()
        if self._outbox is not None:
            self._outbox.close()
        if self._channel is not None:
            self._channel.close()

    # --- routers (the channel's thread)

    def _receive(self, message: ToNode) -> None:
        routers = self._routers
        if routers is None:
            return
        is_new = routers.heard(message.reply_to)
        match message:
            case Ping():
                if is_new:
                    routers.tell_status(message.reply_to)
                if message.asked_at is not None:
                    reading = ClockReading(
                        self.config.node_id, self.epoch, message.asked_at, time.monotonic()
                    )
                    routers.tell(message.reply_to, reading)
            case Ask():
                self._hold_nothing(message.reply_to)
            case Submit():
                refusal = InvalidRequest(f"{self.config.node_id} encodes images, and runs no requests")
                chunk = TokenChunk(
                    message.request_id,
                    len(message.output_token_ids),
                    [],
                    FinishReason.ERROR,
                    error=refusal.to_wire(),
                )
                routers.tell(message.reply_to, TokenBatch(self.config.node_id, self.epoch, [chunk]))
            case _:
                pass  # a message about a request, of which this node has none

    def _begin_line(self, reply_to: str) -> None:
        if self._routers is not None:
            self._routers.heard(reply_to)
            self._routers.tell_status(reply_to)
            self._hold_nothing(reply_to)

    def _hold_nothing(self, reply_to: str) -> None:
        if self._routers is not None and self._channel is not None:
            position = self._channel.received(reply_to)
            self._routers.tell(reply_to, Holding(self.config.node_id, self.epoch, *position, requests={}))

    # --- questions (the inbox's thread)

    def _on_question(self, question: Encode) -> None:
        why = self._refusal(question)
        if why is not None:
            self._refuse(question, why)
            return
        with self._at_rest:
            self._unanswered += 1
        self._questions.put(_QueuedQuestion(question, time.monotonic()))

    def _refusal(self, question: Encode) -> str | None:
        name = self.config.node_id
        if self._state is not NodeState.READY:
            return f"{name} is {self._state.value}"
        if question.epoch != self.epoch:
            return f"{name} is another incarnation than the one that was asked"
        if question.model != self._content:
            return f"{name} serves another model"
        if self._unanswered >= MOST_QUESTIONS:
            return f"{name} has {MOST_QUESTIONS} images in its line"
        return None

    # --- the worker

    def _work(self) -> None:
        if self.config.cores and core_quota() is None:
            # The threads that compute with this one start with the first image and inherit its cores.
            bind([threading.get_native_id()], self.config.cores)
        while (asked := self._questions.get()) is not None:
            try:
                self._answer(asked)
            except Exception as error:
                # A failure of the tower would recur with every image, so the node fails and the controller starts another.
                logger.exception("the vision tower failed")
                self._detail = f"{type(error).__name__}: {error}"
                self._state = NodeState.FAILED
                self._refuse(asked.question, f"{self.config.node_id} has failed")
            finally:
                self._begun = None
                with self._at_rest:
                    self._unanswered -= 1
                    self._at_rest.notify_all()

    def _answer(self, asked: _QueuedQuestion) -> None:
        question, self._begun = asked.question, time.monotonic()
        if self._state is NodeState.FAILED:
            self._refuse(question, f"{self.config.node_id} has failed")
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
            self._busy_s += time.monotonic() - self._begun
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
            for one, rows in zip(missing, self._encode(missing), strict=True):
                self._made += rows.count
                self._cache.keep(cached_as[one.identifier], rows)
                found[one.identifier] = rows
        for name, part in zip(names, question.parts, strict=True):
            if found[name].count != part.length:
                raise InvalidRequest(
                    f"a part of the image has {found[name].count} rows, but the question expects {part.length}"
                )
        return {name: found[name] for name in names}

    def _encode(self, missing: list[EncoderInput]) -> list[PromptEmbeds]:
        if self._tower is None:
            raise InternalError(f"{self.config.node_id} got a question before its tower was loaded")
        return self._tower.encode(missing)

    def _count(self, ending: str) -> None:
        with self._at_rest:
            self._ended[ending] += 1

    def _refuse(self, question: Encode, why: str) -> None:
        self._count("refused")
        self._send(question.reply_to, EncodingRefused(question.question, why))

    def _send(self, reply_to: str, message: ToAsker) -> None:
        if self._outbox is None:
            return
        try:
            self._outbox.send(reply_to, message)
        except NodeLost as error:
            logger.warning("rows were not sent: %s", error)  # the asker encodes the image itself
