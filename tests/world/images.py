"""Images and encoder nodes of a schedule: the product's service, cache, desk and account of rows; a tower whose rows are a function of the
image's file stands in for a vision tower. A row changes the KV of its placeholder as a token does. Encoder nodes are killed, stopped and
slow. Drawn from a generator of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tandem.encode_node.service import EncodeService, RowsCache
from tandem.engine.model.lone_tower import TowerInfo
from tandem.engine.scheduling.output import EncoderInput
from tandem.node.config import NodeConfig, NodeTimeouts
from tandem.node.encoders import part
from tandem.node.encoders.part import ClientSurroundings
from tandem.node.wings import PartContext, ServicePart
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature, TiledImages, digest_of_image
from tandem.wire.listening import Listener
from tandem.wire.nodes import NodeInfo, Role
from tests.world.line import WorldLine
from tests.world.network import Network
from tests.world.process import Process, Timer

if TYPE_CHECKING:
    from tests.world.schedule import Schedule

SHARE = 0.3
PLACEHOLDER = 49_999
ROW_SIZE = 2  # numbers of 32 bits
RULES = TiledImages(tile=8, longest=8, is_cut=False, tokens=6, token_id=PLACEHOLDER)
ROWS_KEPT = 30  # of a node, and of an encoder node
ROWS_OF_A_STEP = 12
BEFORE, LONGEST = 20, 50  # tokens of a prompt before its images, and without them
LOOKS = 300  # whether an encoder node works, before it is killed all the same
TIMEOUTS = NodeTimeouts(encoder_s=2.0)


def _drawing(seed: int) -> random.Random:
    return random.Random(f"images {seed}")


def happen_in(seed: int) -> bool:
    return _drawing(seed).random() < SHARE


def rows_of(file: bytes, part: int, length: int) -> list[int]:
    """The right rows of a part of an image, each as the number that it is to the world's model."""
    return [
        int.from_bytes(hashlib.blake2b(file + bytes([part, row]), digest_size=7).digest(), "big")
        for row in range(length)
    ]


def numbers_of(rows: PromptEmbeds) -> list[int]:
    return [int(number) for number in np.frombuffer(rows.data, np.uint64)]


class WorldTower:
    """A `LoneTower`, and the tower of a node that reads prompts."""

    info = TowerInfo("world", "world", "", 140)

    def __init__(self, took: Callable[[float], None]) -> None:
        self._took = took
        self.takes_s = 0.02

    def encode(self, inputs: Sequence[EncoderInput]) -> list[PromptEmbeds]:
        self._took(self.takes_s * len(inputs))
        return [
            PromptEmbeds("float32", ROW_SIZE, np.array(rows_of(one.file, one.part, one.length), np.uint64).tobytes())
            for one in inputs
        ]


class NodeImages:
    """The rows that a node's model has, by the names of their parts."""

    def __init__(self, took: Callable[[float], None]) -> None:
        self._tower = WorldTower(took)
        self._rows: dict[str, list[int]] = {}

    def take(self, inputs: Sequence[EncoderInput], forgotten: Sequence[str]) -> None:
        for identifier in forgotten:
            del self._rows[identifier]
        for one in inputs:
            rows = one.rows if one.rows is not None else self._tower.encode([one])[0]
            self._rows[one.identifier] = numbers_of(rows)

    def forget_all(self) -> None:
        self._rows.clear()

    def row(self, part: MediaFeature, position: int) -> int:
        return self._rows[part.identifier][position - part.offset]


class _Outbox:
    def __init__(self, network: Network, process: Process, after_s: Callable[[], float]) -> None:
        self._network, self._process, self._after_s = network, process, after_s

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        self._network.send(self._process, endpoint, msgspec.msgpack.encode(message), self._after_s())

    def forget(self, endpoint: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Inbox:
    died = None

    def __init__(self, network: Network, process: Process, kind: Any, on_message: Callable[[Any], None]) -> None:
        self.malformed = 0
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._on_message = on_message
        self.endpoint = network.open(process, self._receive)

    def _receive(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError:
            self.malformed += 1
            return
        self._on_message(message)

    def close(self) -> None:
        pass


@dataclasses.dataclass
class _Probe:
    network: Network
    process: Process

    def look(self, endpoint: str) -> Listener:
        return self.network.listener(self.process, endpoint)

    def close(self) -> None:
        pass


@dataclasses.dataclass
class AskingWing:
    """The wing of a node that asks encoder nodes, over the world's network."""

    network: Network
    process: Process
    after_s: Callable[[], float]

    def make(self, context: PartContext) -> ServicePart | None:
        network, process = self.network, self.process
        return part.make(
            context,
            ClientSurroundings(
                lambda host, kind, on_message, name: _Inbox(network, process, kind, on_message),
                lambda: _Outbox(network, process, self.after_s),
                lambda clock: _Probe(network, process),
            ),
        )


class WorldEncoder:
    def __init__(self, process: Process, network: Network, epoch: int) -> None:
        self.process = process
        self._step_s = 0.0  # of the question under way: its messages leave so much later
        self.tower = WorldTower(self._took)
        self._line = line = WorldLine(network, process, epoch, lambda: self._step_s)
        self.service = EncodeService(
            NodeConfig(node_id=process.name, role=Role.ENCODE),
            epoch,
            self.tower,
            RowsCache(ROWS_KEPT),
            line,
            process.clock,
            open_inbox=lambda host, kind, on_message, name: _Inbox(
                network, process, kind, lambda message: self._asked(on_message, message)
            ),
            open_outbox=lambda: _Outbox(network, process, lambda: self._step_s),
        )
        line.deliver, line.begun = self.service.receive, self.service.line_begun
        line.replaced = self.service.router_replaced
        self._free_at = 0.0
        self._turns = Timer(process, self._turn)
        Timer(process, self._report).within(0.1)
        self.info = NodeInfo(
            node_id=process.name,
            role=Role.ENCODE,
            epoch=epoch,
            request_endpoint=line.endpoint,
            peer_endpoint=self.service.endpoint,
            model="world",
            max_model_len=140,
            block_size=4,
            content="world",
        )

    def _took(self, seconds: float) -> None:
        self._step_s += seconds

    def _asked(self, on_message: Callable[[Any], None], message: Any) -> None:
        on_message(message)
        self._turns.within(max(0.0, self._free_at - self.process.loop.time()))

    def _turn(self) -> float | None:
        self._step_s = 0.0
        self.service.turn(0.0)
        took, self._step_s = self._step_s, 0.0
        self._free_at = self.process.loop.time() + took
        return None if self.is_quiet else took

    def _report(self) -> float:
        self.service.report()
        return 0.25

    @property
    def is_quiet(self) -> bool:
        status = self.service.status()
        return not (status.running or status.waiting)


@dataclasses.dataclass(frozen=True)
class Shown:
    """A prompt with images: as it is sent, and as the world's model reads it."""

    prompt: list[int]
    media: list[MediaFeature]
    files: list[bytes]
    read: list[int]


class Images:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._rng = rng = _drawing(schedule.outcome.seed)
        self.exist = rng.random() < SHARE
        self._files = [f"image {number} of {schedule.outcome.seed}".encode() for number in range(4)]
        self._parts = [rng.randint(1, 2) for _ in self._files]
        self.encoders: dict[str, WorldEncoder] = {}
        self._count = rng.choice([0, 1, 1, 2]) if self.exist else 0
        self._epochs = rng.randrange(1, 1 << 40)

    # ── prompts ──

    def shown(self, label: str, text: list[int]) -> Shown:
        """The prompt, perhaps with one or two images in it."""
        rng = random.Random(f"{self._schedule.outcome.seed} {label} images")
        if not self.exist or rng.random() < 0.4:
            return Shown(text, [], [], text)
        before, after = text[:BEFORE], text[BEFORE:LONGEST]
        prompt, read, media, files = [*before], [*before], list[MediaFeature](), list[bytes]()
        for image in range(rng.choice([1, 1, 2])):
            number = rng.randrange(len(self._files))
            file = self._files[number]
            files.append(file)
            for index in range(self._parts[number]):
                name = f"{digest_of_image(file)}/{index}"
                media.append(MediaFeature(name, len(prompt), RULES.tokens, image, index))
                prompt += [PLACEHOLDER] * RULES.tokens
                read += rows_of(file, index, RULES.tokens)
                prompt.append(image)
                read.append(image)
        return Shown([*prompt, *after], media, files, [*read, *after])

    # ── encoder nodes ──

    def start(self) -> None:
        for number in range(self._count):
            if self._schedule.has(name := f"encode-{number}"):
                self._start(name)

    def _start(self, name: str) -> None:
        rng, schedule = self._rng, self._schedule
        process = Process(schedule.loop, name, rng.choice(schedule.machines), rate=schedule.clocks.rate())
        self._epochs += 1
        self.encoders[name] = WorldEncoder(process, schedule.network, self._epochs)
        schedule.joined(process)

    def begin(self, faults_s: float) -> None:
        for _ in range(self._rng.randint(0, 4) if self.encoders else 0):
            self._schedule.loop.call_later(self._rng.uniform(0.0, faults_s), self._fault)

    def _fault(self) -> None:
        rng, schedule = self._rng, self._schedule
        name = rng.choice(list(self.encoders))
        encoder, kind = self.encoders[name], rng.choice(["kill", "stop", "slow"])
        lasts = rng.choice([0.5, 3.0, 8.0])
        if not encoder.process.is_alive:
            return
        if kind == "kill":
            self._kill(name, encoder, 0)
        elif kind == "stop":
            schedule.note(f"{name} is stopped for {lasts:.1f} s")
            encoder.process.stop()
            schedule.loop.call_later(lasts, schedule.go_on, encoder.process)
        else:
            encoder.tower.takes_s = rng.choice([0.3, 3.0])
            schedule.note(f"{name} takes {encoder.tower.takes_s} s for a part of an image, for {lasts:.1f} s")
            schedule.loop.call_later(lasts, self._as_usual, encoder)

    def _kill(self, name: str, encoder: WorldEncoder, looks: int) -> None:
        """It ends while it has a question, if one comes in time."""
        schedule = self._schedule
        if encoder.is_quiet and looks < LOOKS:
            schedule.loop.call_later(0.01, self._kill, name, encoder, looks + 1)
        elif encoder.process.is_alive:
            schedule.note(f"{name} is killed")
            encoder.process.end()
            schedule.loop.call_later(self._rng.uniform(0.1, 2.0), schedule.tell_members)
            schedule.loop.call_later(self._rng.uniform(0.5, 6.0), self._restart, name)

    def _restart(self, name: str) -> None:
        self._start(name)
        self._schedule.tell_members()

    def _as_usual(self, encoder: WorldEncoder) -> None:
        encoder.tower.takes_s = 0.02

    def heal(self) -> None:
        for encoder in self.encoders.values():
            self._as_usual(encoder)
            self._schedule.go_on(encoder.process)

    @property
    def living(self) -> list[WorldEncoder]:
        return [encoder for encoder in self.encoders.values() if encoder.process.is_alive]

    @property
    def are_quiet(self) -> bool:
        return all(encoder.is_quiet for encoder in self.living)
