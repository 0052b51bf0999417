"""Encoder nodes beside prefill nodes, over real sockets: the answers are those of `generate`, even if an encoder node fails."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.decode_node.node import DecodeRules
from tandem.encode_node.node import EncodeNode
from tandem.encode_node.service import RowsCache, messages_of
from tandem.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.multi import create_connector
from tandem.node.config import NodeConfig, NodeTimeouts
from tandem.node.engine_node import EngineNode
from tandem.node.requests import RoleRules
from tandem.prefill_node.node import PrefillRules
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.encoding import Encode, EncodedRows, EncodingRefused, ToAsker, WantedPart
from tandem.wire.images import digest_of_image
from tandem.wire.nodes import NodeInfo, NodeState, PeerAddress, Role
from tandem.wire.requests import KVTransferParams, Submit, TransferRole
from tandem.wire.sampling import FinishReason, SamplingParams
from tandem.wire.sockets import Inbox, Outbox
from tests.engine.model.tiny import save
from tests.engine.model.tiny_vision import QWEN3_VL, SMOLVLM, VisionFamily, prompt_of, reference, smolvlm
from tests.node.test_roles import FakeChannel
from tests.pictures import picture
from tests.waiting import until

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
NEW_TOKENS = 6
ROUTER = "tcp://router:1"
ONE, OTHER = picture(1), picture(2)
PROMPTS: dict[str, list[str | bytes]] = {
    "one": ["User:", ONE, "What is this?"],
    "other": ["User:", OTHER, "What is this?"],
    "two": ["Compare ", OTHER, " with ", ONE, "."],
    "text": ["Hello, what do you see?"],
}


@dataclasses.dataclass
class Served:
    node: EngineNode
    channel: FakeChannel
    info: NodeInfo
    family: VisionFamily

    def submit(
        self,
        request_id: str,
        name: str,
        encoder: PeerAddress | None,
        transfer: KVTransferParams | None = None,
        images: list[bytes] | None = None,
        salt: str | None = None,
    ) -> None:
        tokens, media, files = prompt_of(PROMPTS[name], self.family)
        self.channel.receive(Submit(
            request_id, ROUTER, prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True), timeout_s=PATIENCE_S,
            transfer=transfer, cache_salt=salt, media=media, images=images or files,
            encoders=[encoder] * len(files) if encoder is not None else []
        ))  # fmt: skip

    def answers(self, *request_ids: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {each: [] for each in request_ids}
        left = set(request_ids)
        while left:
            chunk = self.channel.chunks.get(timeout=PATIENCE_S)
            assert chunk.error is None, chunk.error
            answer = found[chunk.request_id]
            answer += chunk.token_ids[max(0, len(answer) - chunk.start) :]
            if chunk.finish is not None:
                left.discard(chunk.request_id)
        return found

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.info.node_id, self.info.epoch, self.info.peer_endpoint)

    def counter(self, name: str) -> int:
        return int(getattr(self.node.status().counters, name))


def engine_config(path: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(path), dtype="float32", threads=1),
        cache=CacheConfig(block_size=4, memory_bytes=4 << 20, hash_seed="t"),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=48, max_encoder_tokens=16),
        debug=True,
    )


class House:
    """Starts nodes, and ends them."""

    def __init__(self, path: Path, answers: dict[str, list[int]], family: VisionFamily = SMOLVLM) -> None:
        self.path, self.expected, self.family = path, answers, family
        self._numbers = itertools.count()
        self._started: list[EngineNode | EncodeNode] = []

    def serve(self, rules: RoleRules, transfer: TransferConfig | None = None, encoder_s: float = 30.0) -> Served:
        channels: list[FakeChannel] = []

        def open_channel(host: str, epoch: int, *, name: str) -> FakeChannel:
            channels.append(FakeChannel(host, epoch))
            return channels[-1]

        config = NodeConfig(
            f"{rules.role.value}-{next(self._numbers)}",
            rules.role,
            engine=engine_config(self.path),
            transfer=transfer,
            timeouts=NodeTimeouts(encoder_s=encoder_s),
        )
        node = EngineNode(config, rules, open_channel, create_connector)
        self._started.append(node)
        info = node.start()
        return Served(node, channels[0], info, self.family)

    def encoder(self) -> tuple[EncodeNode, PeerAddress]:
        node = EncodeNode(NodeConfig(f"encode-{next(self._numbers)}", Role.ENCODE, engine=engine_config(self.path)))
        self._started.append(node)
        info = node.start()
        return node, PeerAddress(info.node_id, info.epoch, info.peer_endpoint)

    def close(self) -> None:
        for node in self._started:
            node.stop()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    path = smolvlm(tmp_path_factory.mktemp("encoders"))
    return path, dict(zip(PROMPTS, reference(path, list(PROMPTS.values()), NEW_TOKENS), strict=True))


@pytest.fixture
def house(seen: tuple[Path, dict[str, list[int]]]) -> Iterator[House]:
    made = House(*seen)
    with contextlib.closing(made):
        yield made


def test_an_image_is_encoded_once_for_all_nodes_that_read_prompts(house: House) -> None:
    encoder, where = house.encoder()
    readers = [house.serve(DecodeRules(Role.AGGREGATED)) for _ in range(2)]
    for reader in readers:
        for name in PROMPTS:
            reader.submit(name, name, where)
        assert reader.answers(*PROMPTS) == house.expected
    tokens = sum(part.length for name in ("one", "other") for part in prompt_of(PROMPTS[name])[1])
    until(lambda: encoder.status().counters.requests_finished.get("sent", 0) >= 4)
    counters = encoder.status().counters
    assert counters.encoder_tokens == tokens
    assert counters.encoder_tokens_reused >= tokens
    for reader in readers:
        until(lambda reader=reader: reader.counter("encoder_tokens_received") == tokens)  # type: ignore[misc]
        assert reader.counter("encoder_tokens") == 0
        assert reader.node.status().counters.encoder_fallbacks == {}


def test_rows_are_kept_apart_by_the_cache_salt_everywhere(house: House) -> None:
    encoder, where = house.encoder()
    reader, other = (house.serve(DecodeRules(Role.AGGREGATED)) for _ in range(2))
    tokens = sum(part.length for part in prompt_of(PROMPTS["one"])[1])
    for count, (node, salt) in enumerate([(reader, "a"), (reader, "b"), (other, "a"), (reader, "a")]):
        request_id = f"r{count}"
        node.submit(request_id, "one", where, salt=salt)
        assert node.answers(request_id) == {request_id: house.expected["one"]}
    until(lambda: encoder.status().counters.requests_finished.get("sent", 0) == 3)
    counters = encoder.status().counters
    assert counters.encoder_tokens == 2 * tokens, "once for each salt"
    assert counters.encoder_tokens_reused == tokens, "the other node's request had a salt that was met before"
    until(lambda: reader.counter("encoder_tokens_received") == 2 * tokens)


def test_rows_for_several_layers_come_from_an_encoder_node(tmp_path: Path) -> None:
    path = QWEN3_VL.save(tmp_path)
    expected = reference(path, list(PROMPTS.values()), NEW_TOKENS, QWEN3_VL)
    with contextlib.closing(House(path, dict(zip(PROMPTS, expected, strict=True)), QWEN3_VL)) as house:
        _, where = house.encoder()
        reader = house.serve(DecodeRules(Role.AGGREGATED))
        for name in PROMPTS:
            reader.submit(name, name, where)
        assert reader.answers(*PROMPTS) == house.expected
        until(lambda: reader.counter("encoder_tokens_received") > 0)
        assert reader.counter("encoder_tokens") == 0
        assert reader.node.status().counters.encoder_fallbacks == {}


def test_encoder_prefill_and_decode_node(house: House) -> None:
    _, where = house.encoder()
    transfer = TransferConfig(connector="nixl")
    prefill, decode = house.serve(PrefillRules(), transfer), house.serve(DecodeRules(Role.DECODE), transfer)
    for name in PROMPTS:
        consume = KVTransferParams(f"t-{name}", TransferRole.CONSUME, prefill.address)
        produce = KVTransferParams(f"t-{name}", TransferRole.PRODUCE, decode.address)
        decode.submit(name, name, None, consume)
        prefill.submit(name, name, where, produce)
    assert decode.answers(*PROMPTS) == house.expected
    prefill.answers(*PROMPTS)
    until(lambda: prefill.counter("encoder_tokens_received") > 0)
    assert prefill.counter("encoder_tokens") == decode.counter("encoder_tokens") == 0


def test_an_encoder_node_that_ends_loses_no_request(house: House) -> None:
    encoder, where = house.encoder()
    reader = house.serve(DecodeRules(Role.AGGREGATED))
    encoder.stop()  # before it is asked, and after a router has chosen it
    for name in PROMPTS:
        reader.submit(name, name, where)
    assert reader.answers(*PROMPTS) == house.expected
    assert set(reader.node.status().counters.encoder_fallbacks) <= {"gone", "left_out"}
    until(lambda: reader.counter("encoder_tokens") > 0)


@contextlib.contextmanager
def silent() -> Iterator[tuple[queue.SimpleQueue[Encode], PeerAddress]]:
    """An encoder node that takes questions, and never answers."""
    questions: queue.SimpleQueue[Encode] = queue.SimpleQueue()
    inbox = Inbox("127.0.0.1", Encode, questions.put, name="silent")
    try:
        yield questions, PeerAddress("encode-9", 1, inbox.endpoint)
    finally:
        inbox.close()


def test_an_encoder_node_that_dies_with_a_question_is_noticed_before_the_deadline(house: House) -> None:
    reader = house.serve(DecodeRules(Role.AGGREGATED), encoder_s=10 * PATIENCE_S)
    with silent() as (questions, where):
        reader.submit("two", "two", where)
        asked = {questions.get(timeout=PATIENCE_S).digest for _ in range(2)}
        assert asked == {digest_of_image(ONE), digest_of_image(OTHER)}
    assert reader.answers("two") == {"two": house.expected["two"]}
    assert reader.node.status().counters.encoder_fallbacks == {"gone": 2}


def test_a_prompt_that_waits_for_rows_stops_no_other(house: House) -> None:
    reader = house.serve(DecodeRules(Role.AGGREGATED), encoder_s=10 * PATIENCE_S)
    with silent() as (questions, where):
        reader.submit("one", "one", where)
        assert questions.get(timeout=PATIENCE_S).digest == digest_of_image(ONE)
        reader.submit("text", "text", None)
        reader.submit("other", "other", None)
        assert reader.answers("text", "other") == {name: house.expected[name] for name in ("text", "other")}
    assert reader.answers("one") == {"one": house.expected["one"]}


def test_a_frozen_encoder_node_is_waited_for_once(house: House) -> None:
    reader = house.serve(DecodeRules(Role.AGGREGATED), encoder_s=0.5)
    with silent() as (questions, where):
        reader.submit("one", "one", where)
        assert reader.answers("one") == {"one": house.expected["one"]}
        assert reader.node.status().counters.encoder_fallbacks == {"late": 1}
        reader.submit("other", "other", where)  # within ten seconds
        assert reader.answers("other") == {"other": house.expected["other"]}
        assert reader.node.status().counters.encoder_fallbacks == {"late": 1, "left_out": 1}
        assert questions.qsize() == 1


@pytest.mark.parametrize("wrong", ["model", "checksum", "identifier", "width", "refused", "too many"])
def test_rows_that_are_not_what_was_asked_for_are_never_used(house: House, wrong: str) -> None:
    outbox = Outbox()
    reader = house.serve(DecodeRules(Role.AGGREGATED))

    def lie(question: Encode) -> None:
        identifier = f"{question.digest}/{question.parts[0].part}"
        width = 32 if wrong != "width" else 16
        count = question.parts[0].length + (wrong == "too many")
        rows = PromptEmbeds("float32", width, b"\0" * 4 * width * count)
        name = identifier if wrong != "identifier" else "0" * 40 + "/0"
        answer: ToAsker
        model = question.model if wrong != "model" else "another"
        answer = next(messages_of(question.question, model, name, rows))
        if wrong == "checksum":
            answer = msgspec.structs.replace(answer, checksum=b"0" * 16)
        if wrong == "refused":
            answer = EncodingRefused(question.question, "no")
        outbox.send(question.reply_to, answer)

    liar = Inbox("127.0.0.1", Encode, lie, name="liar")
    try:
        reader.submit("one", "one", PeerAddress("encode-9", 1, liar.endpoint))
        assert reader.answers("one") == {"one": house.expected["one"]}
        why = "refused" if wrong == "refused" else "wrong"
        assert reader.node.status().counters.encoder_fallbacks == {why: 1}
    finally:
        liar.close()
        outbox.close()


def test_a_file_that_is_no_image_is_the_clients_mistake_and_no_others(house: House) -> None:
    encoder, where = house.encoder()
    reader = house.serve(DecodeRules(Role.AGGREGATED))
    tokens, media, _ = prompt_of(PROMPTS["one"])
    broken = b"no image"
    named = [msgspec.structs.replace(part, identifier=f"{digest_of_image(broken)}/{part.part}") for part in media]
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    reader.channel.receive(Submit(
        "b", ROUTER, PATIENCE_S, prompt_token_ids=tokens, sampling=sampling, media=named, images=[broken],
        encoders=[where]
    ))  # fmt: skip
    chunk = reader.channel.chunks.get(timeout=PATIENCE_S)
    assert chunk.finish is FinishReason.ERROR
    assert chunk.error is not None
    assert chunk.error.code == "invalid_image"
    reader.submit("one", "one", where)
    assert reader.answers("one") == {"one": house.expected["one"]}
    assert encoder.status().state is NodeState.READY


def test_what_is_asked_of_another_node_or_model_is_refused_and_a_drain_answers_what_has_come(house: House) -> None:
    encoder, where = house.encoder()
    answers: queue.SimpleQueue[ToAsker] = queue.SimpleQueue()
    inbox: Inbox[ToAsker] = Inbox("127.0.0.1", ToAsker, answers.put, name="asker")
    outbox = Outbox()
    reader = house.serve(DecodeRules(Role.AGGREGATED))
    _, media, _ = prompt_of(PROMPTS["one"])
    parts = [WantedPart(part.part, part.length) for part in media]

    def ask(**changed: object) -> ToAsker:
        question = Encode(
            1, inbox.endpoint, where.epoch, reader.info.content, digest_of_image(ONE), ONE, parts, PATIENCE_S
        )
        outbox.send(where.endpoint, msgspec.structs.replace(question, **changed))
        return answers.get(timeout=PATIENCE_S)

    try:
        assert isinstance(ask(), EncodedRows)
        for _ in media[1:]:
            answers.get(timeout=PATIENCE_S)
        for changed, said in (
            ({"epoch": where.epoch + 1}, "another incarnation"),
            ({"model": "another"}, "another model"),
            ({"digest": "0" * 40}, "not the one in the question"),
        ):
            refused = ask(**changed)
            assert isinstance(refused, EncodingRefused)
            assert said in refused.reason
        assert encoder.drain(PATIENCE_S)
        refused = ask()
        assert isinstance(refused, EncodingRefused)
        assert "draining" in refused.reason
        reader.submit("two", "two", where)
        assert reader.answers("two") == {"two": house.expected["two"]}
    finally:
        inbox.close()
        outbox.close()


def test_a_model_that_reads_no_images_has_nothing_for_encoder_nodes(tmp_path: Path) -> None:
    node = EncodeNode(NodeConfig("encode-0", Role.ENCODE, engine=engine_config(save("llama", tmp_path))))
    with pytest.raises(ConfigurationError, match=r"set pools\.encode to 0"):
        node.start()


def test_rows_leave_in_pieces_and_the_longest_unused_make_room() -> None:
    def rows(count: int) -> PromptEmbeds:
        return PromptEmbeds("float32", 2, bytes(range(count * 8)))

    pieces = list(messages_of(1, "m", "a/0", rows(7), most_bytes=24))
    assert [(each.first, each.rows.count) for each in pieces] == [(0, 3), (3, 3), (6, 1)]
    assert b"".join(each.rows.data for each in pieces) == rows(7).data
    cache = RowsCache(10)
    for name, count in (("a", 4), ("b", 4)):
        cache.keep(name, rows(count))
    assert cache.find("a") is not None
    cache.keep("c", rows(4))
    assert cache.find("b") is None
    assert cache.find("a") is not None
    cache.keep("d", rows(11))
    assert cache.find("d") is None
    assert cache.used == 8
