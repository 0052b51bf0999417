"""Asks encoder nodes for the rows of images in this node's prompts.

The step thread asks and checks the deadlines. The inbox's thread receives the rows, checks them against the question, and delivers
each part to the step thread once it is complete. If no rows come, for any reason, this node encodes the image itself. An encoder
node that is gone or late is not asked again for `LEFT_OUT_S`, because each of its images would wait in vain.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tandem.base.errors import NodeLost
from tandem.engine.core import Engine
from tandem.engine.request import Request
from tandem.node.status import copied
from tandem.node.wings import PartContext, ServicePart
from tandem.wire.embeds import TYPES, PromptEmbeds
from tandem.wire.encoding import Encode, EncodedRows, EncodingRefused, ToAsker, WantedPart, checksum
from tandem.wire.images import MediaFeature
from tandem.wire.listening import Listener, ListenerProbe
from tandem.wire.nodes import PeerAddress
from tandem.wire.requests import Submit
from tandem.wire.sockets import Inbox, Outbox

logger = logging.getLogger(__name__)

LEFT_OUT_S = 10.0  # an encoder node that gave no answer is not asked for this long
LOOK_S = 0.25  # how often to probe whether the encoder nodes that owe rows still listen


@dataclasses.dataclass(slots=True, frozen=True)
class RowsCame:
    """The rows of one part of an image; None: no rows will come, so encode the part here."""

    identifier: str
    rows: PromptEmbeds | None


@dataclasses.dataclass(slots=True)
class _Question:
    encoder: PeerAddress
    due: float
    lengths: dict[str, int]  # how many rows each incomplete part has, by identifier
    pieces: dict[str, list[bytes]]  # the rows of these parts that have arrived
    names: dict[str, str]  # each part's name here, which contains the salt


class RowsInbox(Protocol):
    """What the client needs of an Inbox."""

    endpoint: str

    def close(self) -> None: ...


class QuestionOutbox(Protocol):
    """What the client needs of an Outbox."""

    def send(self, endpoint: str, message: Encode) -> None: ...
    def forget(self, endpoint: str) -> None: ...
    def close(self) -> None: ...


class Listeners(Protocol):
    """What the client needs of a ListenerProbe."""

    def look(self, endpoint: str) -> Listener: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class ClientSurroundings:
    """How the client reaches encoder nodes."""

    open_inbox: Callable[..., RowsInbox] = Inbox
    open_outbox: Callable[[], QuestionOutbox] = Outbox
    open_probe: Callable[[Callable[[], float]], Listeners] = ListenerProbe  # it is given the node's clock


OVER_SOCKETS = ClientSurroundings()


class EncoderClient:
    def __init__(
        self,
        host: str,
        name: str,
        *,
        model: str,
        dtype: str,
        width: int,
        patience_s: float,
        deliver: Callable[[RowsCame], None],
        clock: Callable[[], float],
        surroundings: ClientSurroundings,
    ) -> None:
        """`model`: the digest of the model's content. `dtype`, `width`: what its rows must have. `deliver` is called from the step thread
        and from the inbox's thread."""
        self._model, self._dtype, self._width = model, dtype, width
        self._patience_s = patience_s
        self._deliver = deliver
        self._clock = clock
        self._questions: dict[int, _Question] = {}
        # (node id, epoch) -> the time until which it is not asked
        self._left_out: dict[tuple[str, int], float] = {}
        self._next_look: float | None = None
        self._lock = threading.Lock()
        self.fallbacks: Counter[str] = Counter()  # images that this node encodes itself, by the reason
        self._probe = surroundings.open_probe(clock)
        self._outbox = surroundings.open_outbox()
        self._inbox = surroundings.open_inbox(host, ToAsker, self._receive, name=f"{name}-rows")

    # --- the step thread

    def ask_for(
        self,
        parts: Iterable[MediaFeature],
        encoders: Sequence[PeerAddress],
        images: Sequence[bytes],
        salt: str | None = None,
    ) -> None:
        """Asks for parts of a request's images; `encoders[i]` is asked for the parts of `images[i]`. The parts have the names of
        their rows, which contain the request's `salt`."""
        wanted: defaultdict[int, list[MediaFeature]] = defaultdict(list)
        for part in parts:
            wanted[part.image].append(part)
        for image, of_image in wanted.items():
            digest = of_image[0].identifier.rpartition("/")[0]
            self.ask(encoders[image], digest, images[image], of_image, salt)

    def ask(
        self, encoder: PeerAddress, digest: str, file: bytes, parts: Sequence[MediaFeature], salt: str | None = None
    ) -> None:
        """Asks one encoder node for parts of one image. Each part gets exactly one RowsCame, by the deadline."""
        now = self._clock()
        question = secrets.randbits(62)
        with self._lock:
            is_left_out = self._left_out.get((encoder.node_id, encoder.epoch), now) > now
            if not is_left_out:
                self._questions[question] = _Question(
                    encoder,
                    now + self._patience_s,
                    {f"{digest}/{part.part}": part.length for part in parts},
                    {f"{digest}/{part.part}": [] for part in parts},
                    {f"{digest}/{part.part}": part.identifier for part in parts},
                )
                self._next_look = self._next_look or now + LOOK_S
        if is_left_out:
            self._fall_back([part.identifier for part in parts], "left_out")
            return
        wanted = [WantedPart(part.part, part.length, part.columns) for part in parts]
        message = Encode(
            question, self._inbox.endpoint, encoder.epoch, self._model, digest, file, wanted, self._patience_s, salt
        )
        try:
            self._outbox.send(encoder.endpoint, message)
        except NodeLost:
            self._end(question, "gone")

    def look(self, now: float) -> None:
        """Gives up the questions that are late, and those to encoder nodes that no longer listen."""
        if self._next_look is None:
            return  # the usual case: no question is open
        with self._lock:
            late = [number for number, one in self._questions.items() if one.due <= now]
            looks = self._next_look is not None and self._next_look <= now
            waited_for = {one.encoder for one in self._questions.values()} if looks else set()
        for number in late:
            self._end(number, "late")
        for encoder in waited_for:
            if self._probe.look(encoder.endpoint) in (Listener.REFUSES, Listener.DOES_NOT_ANSWER):
                self._give_up(encoder)
        with self._lock:
            if looks or not self._questions:
                self._next_look = now + LOOK_S if self._questions else None

    def seconds_until_due(self, now: float) -> float | None:
        if self._next_look is None:
            return None
        with self._lock:
            dues = [one.due for one in self._questions.values()]
            if self._next_look is not None:
                dues.append(self._next_look)
        return max(min(dues) - now, 0.0) if dues else None

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()
        self._probe.close()

    # --- any thread

    def _give_up(self, encoder: PeerAddress) -> None:
        with self._lock:
            numbers = [number for number, one in self._questions.items() if one.encoder == encoder]
        for number in numbers:
            self._end(number, "gone")
        self._outbox.forget(encoder.endpoint)

    def _end(self, number: int, why: str) -> None:
        with self._lock:
            question = self._questions.pop(number, None)
            if question is None:
                return
            encoder = question.encoder
            if why in ("late", "gone"):
                self._left_out[encoder.node_id, encoder.epoch] = self._clock() + LEFT_OUT_S
        logger.warning("encoder node %s: no rows came (%s): encoding here", encoder.node_id, why)
        self._fall_back([question.names[each] for each in question.lengths], why)

    def _fall_back(self, identifiers: Sequence[str], why: str) -> None:
        self.fallbacks[why] += 1
        for identifier in identifiers:
            self._deliver(RowsCame(identifier, None))

    # --- the inbox's thread

    def _receive(self, message: ToAsker) -> None:
        if isinstance(message, EncodingRefused):
            logger.info("an encoder node refuses: %s", message.reason)
            self._end(message.question, "refused")
            return
        whole: PromptEmbeds | None = None
        with self._lock:
            question = self._questions.get(message.question)
            if question is None:
                return  # the question was given up before
            is_right = self._take(question, message)
            if is_right:
                whole = self._whole(question, message.identifier)
                if not question.lengths:
                    del self._questions[message.question]
        if not is_right:
            self._end(message.question, "wrong")
        elif whole is not None:
            self._deliver(RowsCame(question.names[message.identifier], whole))

    def _take(self, question: _Question, message: EncodedRows) -> bool:
        """Keeps the rows if they are this model's and the next rows of a part in question; returns False if they are not."""
        rows, length = message.rows, question.lengths.get(message.identifier)
        if (
            length is None
            or message.model != self._model
            or (rows.dtype, rows.width) != (self._dtype, self._width)
            or not rows.is_whole
            or message.checksum != checksum(message.model, message.identifier, message.first, rows)
        ):
            return False
        pieces = question.pieces[message.identifier]
        if message.first != self._count(pieces) or message.first + rows.count > length:
            return False
        pieces.append(rows.data)
        return True

    def _count(self, pieces: Sequence[bytes]) -> int:
        return sum(map(len, pieces)) // (self._width * TYPES[self._dtype])

    def _whole(self, question: _Question, identifier: str) -> PromptEmbeds | None:
        """Returns the part's rows and closes the part if it is complete, else None."""
        if self._count(question.pieces[identifier]) < question.lengths[identifier]:
            return None
        del question.lengths[identifier]
        return PromptEmbeds(self._dtype, self._width, b"".join(question.pieces.pop(identifier)))


def make(context: PartContext, surroundings: ClientSurroundings = OVER_SOCKETS) -> ServicePart | None:
    engine = context.engine
    if not isinstance(engine, Engine) or engine.info.images is None or engine.info.dtype not in TYPES:
        return None
    return EncodersPart(context, engine, surroundings)


class EncodersPart(ServicePart):
    def __init__(self, context: PartContext, engine: Engine, surroundings: ClientSurroundings) -> None:
        config, info = context.config, engine.info
        self._scheduler = engine.scheduler
        self._in_step = context.in_step
        self._client = EncoderClient(
            config.host,
            config.node_id,
            model=info.content,
            dtype=info.dtype,
            width=info.image_row_size,
            patience_s=config.timeouts.encoder_s,
            deliver=self._deliver,
            clock=context.clock,
            surroundings=surroundings,
        )

    def _deliver(self, came: RowsCame) -> None:
        self._in_step(lambda: self._scheduler.rows_came(came.identifier, came.rows))

    def admitted(self, request: Request, submit: Submit, now: float) -> None:
        if submit.encoders:
            parts = self._scheduler.expect_rows(submit.request_id)
            self._client.ask_for(parts, submit.encoders, submit.images, submit.cache_salt)

    def before_step(self, now: float) -> None:
        self._client.look(now)

    def seconds_until_due(self, now: float) -> float | None:
        return self._client.seconds_until_due(now)

    def count(self, counters: dict[str, Any]) -> None:
        counters["encoder_fallbacks"] = copied(self._client.fallbacks)

    def stop(self) -> None:
        self._client.close()
