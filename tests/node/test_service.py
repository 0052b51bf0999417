"""A node's service: which messages it sends for the messages that it gets, and which router gets a request's end."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec
import numpy as np
import pytest
import torch

from tandem.base.errors import ConfigurationError, InvalidLogits, NodeLost, WireError
from tandem.decode_node.node import DecodeRules
from tandem.engine.config import EngineConfig, ModelConfig, SchedulerConfig, SchedulingPolicy
from tandem.engine.core import Engine
from tandem.engine.model import adapter_book
from tandem.engine.model.adapters import Adapter
from tandem.engine.model.embeds import rows_of
from tandem.engine.model.runner import Grammars
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.node.config import NodeConfig, NodeTimeouts
from tandem.node.loop import Mailbox
from tandem.node.service import NodeService
from tandem.node.wings import wings
from tandem.prefill_node.node import PrefillRules
from tandem.wire.adapters import identity_of
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature, TiledImages
from tandem.wire.lines import Position
from tandem.wire.nodes import NodeState, PeerAddress, Role
from tandem.wire.pooling import Pooling, PoolingKind, VectorModel
from tandem.wire.requests import (
    Ask,
    Cancel,
    EndAnswer,
    Follow,
    Holding,
    KeepAnswer,
    KVTransferParams,
    NodeStatus,
    Ping,
    Recall,
    Recalled,
    Submit,
    TokenBatch,
    TokenChunk,
    TransferRole,
)
from tandem.wire.sampling import FinishReason, SamplingParams
from tandem.wire.tracing import ClockReading, NodeTrace
from tests.adapter_books import PLENTY, PlainBook
from tests.engine.engine_fakes import VECTOR, FakeRunner, make_scheduler, token_at
from tests.loops import PATIENCE_S
from tests.waiting import until

ROUTER = "tcp://router:1"


class SentBatches:
    """Records what the node sends, by endpoint."""

    def __init__(self) -> None:
        self.batches: queue.Queue[TokenBatch] = queue.Queue()
        self.statuses: queue.Queue[NodeStatus] = queue.Queue()
        self.gone: set[str] = set()
        self.forgotten: list[str] = []
        self.malformed = 0
        self.gaps = 0
        self.position = Position(1, 0)
        self.held: queue.Queue[Holding] = queue.Queue()
        self.recalled: queue.Queue[Recalled] = queue.Queue()
        self.traces: queue.Queue[NodeTrace] = queue.Queue()
        self.clocks: queue.Queue[ClockReading] = queue.Queue()
        self.died: str | None = None

    def send(self, endpoint: str, message: msgspec.Struct) -> None:
        if endpoint in self.gone:
            raise NodeLost(f"{endpoint} does not read")
        kept: dict[type, queue.Queue[Any]] = {
            TokenBatch: self.batches, NodeStatus: self.statuses, Holding: self.held, Recalled: self.recalled,
            NodeTrace: self.traces, ClockReading: self.clocks,
        }  # fmt: skip
        if type(message) in kept:
            kept[type(message)].put(message)

    def received(self, endpoint: str) -> Position:
        return self.position

    def forget(self, endpoint: str) -> None:
        self.forgotten.append(endpoint)

    def until_finished(self, request_id: str) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        while not chunks or chunks[-1].finish is None:
            batch = self.batches.get(timeout=PATIENCE_S)
            chunks += [chunk for chunk in batch.chunks if chunk.request_id == request_id]
        return chunks

    def status_where(self, condition) -> NodeStatus:
        while True:
            status = self.statuses.get(timeout=PATIENCE_S)
            if condition(status):
                return status


ENDLESS = SamplingParams(max_tokens=90_000, temperature=0, ignore_eos=True)
CANCELLED = WireError("cancelled", "the response was cancelled")


class Node:
    def __init__(
        self,
        rules,
        silence_s: float = 60.0,
        status_period_s: float = 0.02,
        grammars: Grammars | None = None,
        grammar_s: float = 10.0,
        ahead: bool = False,
        scheduler: SchedulerConfig | None = None,
        adapters: PlainBook | None = None,
        states_folder: str = "",
    ) -> None:
        # The context is so long that a request without a stop outlives any test.
        self.runner = FakeRunner(num_blocks=30_000, max_model_len=100_000)
        self.runner.adapters, self.runner.grammars = adapters, grammars
        self.outgoing = SentBatches()
        mailbox: Mailbox = Mailbox()
        timeouts = NodeTimeouts(status_period_s=status_period_s, router_silence_s=silence_s, grammar_s=grammar_s)
        self.engine = Engine(make_scheduler(self.runner, config=scheduler), self.runner, None, ahead=ahead, debug=True)
        self.service = NodeService(
            NodeConfig(
                node_id="n0",
                role=rules.role,
                timeouts=timeouts,
                engine=EngineConfig(model=ModelConfig(hidden_states_folder=states_folder)),
            ),
            epoch=7,
            rules=rules,
            engine=self.engine,
            mailbox=mailbox,
            line=self.outgoing,
            wings=wings(),
        )
        self.service.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.stop()

    def refusal(self, request_id: str = "r") -> WireError:
        """Why the request ended, with nothing said before."""
        [chunk] = self.outgoing.until_finished(request_id)
        assert (chunk.finish, chunk.token_ids) == (FinishReason.ERROR, [])
        assert chunk.error is not None
        return chunk.error

    def expect_served(self, request_id: str, **fields) -> None:
        self.submit(request_id, **fields)
        assert self.outgoing.until_finished(request_id)[-1].finish is FinishReason.LENGTH

    def submit(self, request_id: str = "r", prompt: int = 5, timeout_s: float = 60.0, **fields) -> None:
        sampling = fields.pop("sampling", SamplingParams(max_tokens=4, temperature=0))
        self.service.receive(
            Submit(
                request_id=request_id,
                reply_to=ROUTER,
                prompt_token_ids=fields.pop("prompt_token_ids", [10 + i % 1000 for i in range(prompt)]),
                sampling=sampling,
                timeout_s=timeout_s,
                **fields,
            )
        )


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(DecodeRules(Role.DECODE), ahead=request.param)
    yield made
    made.service.stop()


def test_tokens_come_back_in_order_with_their_indices(node: Node) -> None:
    node.submit(prompt=5)
    chunks = node.outgoing.until_finished("r")
    assert [(chunk.start, chunk.token_ids) for chunk in chunks] == [(i, [token_at(5 + i)]) for i in range(4)]
    assert chunks[-1].finish is FinishReason.LENGTH
    assert chunks[0].cached_tokens == 0


def test_a_request_that_moved_here_goes_on_where_it_was(node: Node) -> None:
    node.submit(prompt=5, output_token_ids=[105, 106], sampling=SamplingParams(max_tokens=4, temperature=0))
    chunks = node.outgoing.until_finished("r")
    assert [(chunk.start, chunk.token_ids) for chunk in chunks] == [(2, [107]), (3, [108])]


def test_a_cancelled_request_frees_its_blocks_and_says_nothing(node: Node) -> None:
    node.submit(sampling=ENDLESS, prompt=5)
    node.outgoing.batches.get(timeout=PATIENCE_S)
    node.service.receive(Cancel(reply_to=ROUTER, request_ids=["r", "never heard of"]))
    status = node.outgoing.status_where(lambda s: s.totals.requests_finished.get("abort") == 1)
    assert status.free_blocks == status.total_blocks
    assert status.running == 0


def test_only_its_own_router_can_cancel_a_request(node: Node) -> None:
    node.submit(prompt=5)
    node.service.receive(Cancel(reply_to="tcp://other:1", request_ids=["r"]))
    assert node.outgoing.until_finished("r")[-1].finish is FinishReason.LENGTH


def test_a_deadline_ends_a_request_with_a_typed_error(node: Node) -> None:
    node.submit(timeout_s=0.0, sampling=ENDLESS)
    chunk = node.outgoing.until_finished("r")[-1]
    assert chunk.error is not None
    assert chunk.error.code == "deadline_exceeded"


def test_an_emptied_cache_serves_no_later_request(node: Node) -> None:
    node.submit("a", prompt=200)
    node.outgoing.until_finished("a")
    node.submit("b", prompt=200)
    assert node.outgoing.until_finished("b")[0].cached_tokens > 0  # type: ignore[operator]
    assert node.service.reset_cache(PATIENCE_S)
    node.submit("c", prompt=200)
    assert node.outgoing.until_finished("c")[0].cached_tokens == 0


def test_a_reset_is_done_once_the_disk_has_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    is_on_disk = False
    monkeypatch.setattr(Scheduler, "has_forgotten", property(lambda _: is_on_disk))
    assert not node.service.reset_cache(0.0)
    asking = threading.Thread(target=lambda: done.put(node.service.reset_cache(PATIENCE_S)))
    done: queue.Queue[bool] = queue.Queue()
    asking.start()
    is_on_disk = True
    node.submit("a")  # as the tier's thread does, it has the node look again
    assert done.get(timeout=PATIENCE_S)
    asking.join()


def test_a_failed_step_answers_everybody_and_marks_the_node(node: Node) -> None:
    node.runner.error = RuntimeError("boom")
    node.service.receive(Ping(reply_to=ROUTER))
    node.submit()
    assert "boom" in node.refusal().message
    status = node.outgoing.status_where(lambda s: s.state is NodeState.FAILED)
    assert "boom" in status.detail
    node.submit("later")
    assert node.refusal("later").code
    assert node.service.failure is not None
    assert not node.service.drain(PATIENCE_S)
    assert node.service.status().state is NodeState.FAILED, "also when it is drained"


def test_the_status_of_a_node_that_rests_is_of_now(node: Node) -> None:
    """It counts everything that was sent before; a router that takes it for an old one goes on counting that as still to come."""
    assert node.service.status().age_s == 0.0
    node.submit("r", 10)
    node.outgoing.until_finished("r")
    until(lambda: node.service.status().age_s == 0.0)
    assert node.service.status().waiting == 0


def test_the_requests_of_a_router_that_fell_silent_are_aborted() -> None:
    with Node(DecodeRules(Role.DECODE), silence_s=1.0) as node:
        gate = threading.Event()
        node.service.receive(Ping(reply_to="tcp://watcher:1"))
        node.submit(sampling=ENDLESS, prompt=5)
        # Only the watcher goes on pinging; the request's router is silent.
        while not gate.wait(0.01):
            node.service.receive(Ping(reply_to="tcp://watcher:1"))
            status = node.service.status()
            if status.totals.requests_finished:
                gate.set()
        assert status.free_blocks == status.total_blocks
        assert node.outgoing.forgotten == [ROUTER], "a connection to it is left"


def test_a_background_answer_outlives_its_router_and_another_one_reads_it(node: Node) -> None:
    keep = KeepAnswer("answer", 1, b"note")
    node.submit("kept", prompt=5, sampling=SamplingParams(max_tokens=400, ignore_eos=True), keep=keep)
    node.submit("lost", prompt=5, sampling=ENDLESS)
    node.service.router_replaced(ROUTER)
    other = "tcp://other:1"
    node.service.receive(Recall(other, "answer"))
    assert node.outgoing.recalled.get(timeout=PATIENCE_S).keep == keep
    node.service.receive(Follow(other, "f", "answer", 0))
    chunks = node.outgoing.until_finished("f")
    assert [token for chunk in chunks for token in chunk.token_ids] == [token_at(5 + i) for i in range(400)]
    assert chunks[-1].finish is FinishReason.LENGTH
    assert node.service.drain(PATIENCE_S), "the other one has ended with its router"
    node.service.receive(Recall(other, "unknown"))
    assert node.outgoing.recalled.get(timeout=PATIENCE_S).keep is None


def test_a_background_answer_that_is_ended_elsewhere_is_told_to_its_router(node: Node) -> None:
    keep = KeepAnswer("answer", 1, b"")
    node.submit("kept", sampling=ENDLESS, keep=keep)
    node.service.receive(EndAnswer("tcp://other:1", "answer", forget=True, error=CANCELLED))
    error = node.outgoing.until_finished("kept")[-1].error
    assert error is not None
    assert error.code == "cancelled"
    node.service.receive(Recall("tcp://other:1", "answer"))
    assert node.outgoing.recalled.get(timeout=PATIENCE_S).keep is None
    assert node.service.drain(PATIENCE_S)


def test_an_attempt_that_was_given_up_gets_the_end_of_its_answer(node: Node) -> None:
    """Its router may go on elsewhere; what becomes of the answer, only the router can say."""
    node.submit("kept", sampling=ENDLESS, keep=KeepAnswer("answer", 1, b""))
    other = "tcp://other:1"

    def said(follower: str) -> str:
        node.service.receive(Follow(other, follower, "answer", 0))
        error = node.outgoing.until_finished(follower)[-1].error
        assert error is not None
        return error.code

    node.service.receive(Cancel(ROUTER, ["kept"]))
    assert said("before") == "unavailable"
    why = WireError("invalid_logits", "the model computed no number")
    node.service.receive(EndAnswer(ROUTER, "answer", forget=False, error=why))
    assert said("after") == "invalid_logits"
    node.service.receive(EndAnswer(other, "answer", forget=False, error=CANCELLED))
    assert said("cancelled") == "cancelled"


def test_the_requests_of_a_router_that_does_not_read_are_aborted(node: Node) -> None:
    node.outgoing.gone.add(ROUTER)
    node.submit(sampling=ENDLESS, prompt=5)
    assert node.service.drain(PATIENCE_S)
    assert node.service.status().running == 0


def test_a_node_that_hears_nobody_any_more_says_so_and_is_replaced(node: Node) -> None:
    node.service.receive(Ping(reply_to=ROUTER))
    node.outgoing.died = "OSError: out of memory"
    status = node.outgoing.status_where(lambda status: status.state is NodeState.FAILED)
    assert status.detail == node.service.failure == "it no longer hears its routers: OSError: out of memory"


def test_a_router_that_asks_is_told_which_of_its_requests_are_here_and_how_far_they_were_reported(node: Node) -> None:
    node.submit("long", sampling=ENDLESS)
    node.submit("moved", output_token_ids=[105, 106, 107], sampling=ENDLESS)
    node.service.receive(
        Submit(
            "another router's",
            "tcp://router:2",
            prompt_token_ids=[5],
            sampling=ENDLESS,
            timeout_s=60.0,
            output_token_ids=[],
        )
    )
    node.outgoing.position = Position(3, 14)
    node.service.receive(Ask(ROUTER))
    held = node.outgoing.held.get(timeout=PATIENCE_S)
    assert (held.node_id, held.epoch, held.line, held.number) == ("n0", 7, 3, 14)
    assert set(held.requests) == {"long", "moved"}
    assert held.requests["moved"] >= 3
    reported = {"long": 0, "moved": 3}
    while reported["long"] < held.requests["long"] or reported["moved"] < held.requests["moved"]:
        for chunk in node.outgoing.batches.get(timeout=PATIENCE_S).chunks:
            if chunk.request_id in reported:
                reported[chunk.request_id] = chunk.start + len(chunk.token_ids)


def test_where_a_line_begins_the_node_says_what_it_holds_without_being_asked(node: Node) -> None:
    node.submit("long", sampling=ENDLESS)
    node.service.line_begun(ROUTER)
    assert set(node.outgoing.held.get(timeout=PATIENCE_S).requests) == {"long"}


def test_the_requests_of_a_router_that_was_started_again_at_the_same_address_are_aborted(node: Node) -> None:
    node.submit("old", sampling=ENDLESS)
    node.service.router_replaced(ROUTER)
    node.service.receive(Ask(ROUTER))
    assert node.outgoing.held.get(timeout=PATIENCE_S).requests == {}


def test_a_draining_node_finishes_what_it_has_and_refuses_the_rest(node: Node) -> None:
    node.submit("old", sampling=SamplingParams(max_tokens=150, ignore_eos=True))
    node.outgoing.batches.get(timeout=PATIENCE_S)
    assert node.service.drain(PATIENCE_S)
    node.submit("new")
    assert node.refusal("new").code == "unavailable"


def transfer(role: TransferRole) -> KVTransferParams:
    return KVTransferParams("t", role, PeerAddress("n1", 1, "tcp://peer:1"))


@pytest.mark.parametrize(
    ("most", "said", "role", "ended", "asked", "finish"),
    [
        pytest.param(9, 0, TransferRole.PRODUCE, "length", 1, "handoff", id="one token, and then it is handed over"),
        pytest.param(9, 3, TransferRole.PRODUCE, "length", 4, "handoff", id="one more if it has moved"),
        pytest.param(1, 0, TransferRole.PRODUCE, "length", 1, "length", id="the last token allowed is the end"),
        pytest.param(4, 3, TransferRole.PRODUCE, "length", 4, "length", id="also if it has moved"),
        pytest.param(9, 0, TransferRole.PRODUCE, "stop", 1, "stop", id="a stop token is the end"),
        pytest.param(9, 0, None, "length", 9, "length", id="without a transfer it is an ordinary request"),
    ],
)
def test_a_prefill_node_samples_one_token(
    most: int, said: int, role: TransferRole | None, ended: str, asked: int, finish: str
) -> None:
    rules, sampling = PrefillRules(), SamplingParams(max_tokens=most)
    submit = Submit(
        "r", ROUTER, 1.0, prompt_token_ids=[1], sampling=sampling, output_token_ids=[5] * said,
        transfer=transfer(role) if role else None,
    )  # fmt: skip
    assert rules.sampling_for(submit).max_tokens == asked
    assert rules.finish_of(submit, TokenChunk("r", 0, [1], finish=FinishReason(ended))) == finish


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        pytest.param({"prompt": 100_001}, "context_length_exceeded", "100001", id="it can never run"),
        pytest.param(
            {"transfer": transfer(TransferRole.PRODUCE)}, "invalid_request", "", id="decode nodes do not send"
        ),
        pytest.param({"prompt_token_ids": [5, 2000]}, "invalid_request", "2000", id="no token of the model"),
        pytest.param({"prompt_token_ids": [-1]}, "invalid_request", "2000", id="no token"),
        pytest.param({"output_token_ids": [9, 2**31]}, "invalid_request", "2000", id="no token that was said"),
        pytest.param(
            {"sampling": SamplingParams(hidden_states="x")},
            "invalid_request",
            "model.hidden_states_folder",
            id="no folder",
        ),
    ],
)
def test_what_this_node_cannot_do_is_refused_with_the_reason(node: Node, fields: dict, code: str, says: str) -> None:
    node.submit(**fields)
    error = node.refusal()
    assert error.code == code
    assert says in error.message
    node.expect_served("next")


def test_a_request_that_the_model_fails_ends_alone_and_is_counted(node: Node) -> None:
    node.runner.failing["bad"] = InvalidLogits("no number")
    node.submit("bad")
    assert node.refusal("bad") == InvalidLogits("no number").to_wire()
    node.expect_served("good")
    node.service.receive(Ping(reply_to=ROUTER))
    status = node.outgoing.status_where(lambda status: status.totals.model_errors == 1)
    assert status.state is NodeState.READY


VECTORS = VectorModel(Pooling(PoolingKind.LAST), size=8)


def with_vectors(node: Node, vectors: VectorModel = VECTORS) -> Node:
    node.runner.info = msgspec.structs.replace(node.runner.info, vectors=vectors)
    return node


@pytest.mark.parametrize("rules", [PrefillRules(), DecodeRules(Role.AGGREGATED)])
def test_a_vector_comes_alone_and_frees_its_blocks(rules) -> None:
    with with_vectors(Node(rules)) as node:
        node.submit("text", prompt=70)
        node.submit("r", prompt=150, pooling=Pooling(PoolingKind.MEAN, dimensions=8))
        [chunk] = node.outgoing.until_finished("r")
        assert (chunk.finish, chunk.token_ids, chunk.vector) == (FinishReason.STOP, [], VECTOR)
        assert node.service.drain(PATIENCE_S)


@pytest.mark.parametrize(
    ("vectors", "fields", "says"),
    [
        (None, {"pooling": Pooling(PoolingKind.MEAN)}, "makes no vectors"),
        (VECTORS, {"pooling": Pooling(PoolingKind.MEAN, dimensions=9)}, "from 1 to 8, not 9"),
        (VECTORS, {"pooling": Pooling(PoolingKind.MEAN), "output_token_ids": [10]}, "of a prompt alone"),
        (VectorModel(Pooling(PoolingKind.LAST), 8, generates=False), {}, "makes vectors only"),
    ],
)
def test_what_the_model_is_not_for_is_refused(node: Node, vectors, fields, says: str) -> None:
    node.runner.info = msgspec.structs.replace(node.runner.info, vectors=vectors)
    node.submit(**fields)
    error = node.refusal()
    assert error.code == "invalid_request"
    assert says in error.message


def test_a_pin_ends_while_the_node_sleeps() -> None:
    """The loop wakes for the pin's end even if no request comes."""
    with Node(
        DecodeRules(Role.DECODE), scheduler=SchedulerConfig(policy=SchedulingPolicy.CONTINUUM, pin_seconds=0.05)
    ) as made:
        made.submit(prompt=200, job_id="j")
        made.service.receive(Ping(reply_to=ROUTER))
        made.outgoing.until_finished("r")
        status = made.outgoing.status_where(lambda s: s.totals.pins_ended == {"time": 1})
        assert (status.pinned_requests, status.free_blocks) == (0, status.total_blocks)


def test_while_hidden_states_wait_for_their_folder_further_ones_are_refused() -> None:
    wanting = SamplingParams(max_tokens=4, temperature=0, hidden_states="x")
    with Node(DecodeRules(Role.DECODE), states_folder="/states") as made:
        made.expect_served("r", sampling=wanting)
        made.runner.states_wait = True
        made.submit("s", sampling=wanting)
        error = made.refusal("s")
        assert error.code == "overloaded"
        assert "hidden_states: the folder takes files more slowly" in error.message
        made.expect_served("t")  # it asks for none


def few_adapters(free_memory: Callable[[], int] = lambda: PLENTY) -> PlainBook:
    """A book with one served adapter."""
    book = PlainBook(free_memory)
    book.serve([Adapter("sql", "d" * 64, {})])
    return book


@pytest.mark.parametrize(
    "lora",
    [identity_of("sql", "e" * 64), identity_of("law", "d" * 64), "sql"],
    ids=["other weights", "unknown", "name"],
)
def test_a_request_for_an_adapter_that_is_not_here_is_refused_by_its_name(lora: str) -> None:
    with Node(DecodeRules(Role.DECODE), adapters=few_adapters()) as node:
        node.submit(lora=lora)
        error = node.refusal()
        assert error.code == "adapter_missing"
        assert repr(lora.partition("@")[0]) in error.message
        node.expect_served("s", lora=identity_of("sql", "d" * 64))
        assert node.service.status().adapters == {"sql": "d" * 64}


def test_an_adapter_that_is_replaced_stays_for_requests_that_were_planned_with_it() -> None:
    slots = few_adapters()
    with Node(DecodeRules(Role.DECODE), adapters=slots) as node:
        old, law = identity_of("sql", "d" * 64), Adapter("law", "1" * 64, {})
        node.submit(lora=old, sampling=ENDLESS)
        node.outgoing.batches.get(timeout=PATIENCE_S)
        assert node.service.set_adapters([law, Adapter("sql", "e" * 64, {})], frozenset(), PATIENCE_S)
        status = node.outgoing.status_where(lambda s: "law" in s.adapters)
        assert status.adapters == {"law": "1" * 64, "sql": "e" * 64}
        assert status.replaced_adapters == {"sql": ("d" * 64,)}
        node.expect_served("s", lora=identity_of("sql", "e" * 64))
        node.service.receive(Cancel(reply_to=ROUTER, request_ids=["r"]))
        node.outgoing.status_where(lambda s: s.totals.requests_finished.get("abort") == 1)
        # It waited in its router's line, or began at a node that died.
        node.expect_served("t", lora=old, output_token_ids=[105])


def test_a_node_without_requests_gives_replaced_adapters_back_when_memory_runs_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_book, "LOOK_AT_MEMORY_S", 0.005)
    looks = itertools.count()
    slots = few_adapters(lambda: PLENTY if next(looks) < 20 else -1)
    with Node(DecodeRules(Role.DECODE), adapters=slots) as node:
        assert node.service.set_adapters([Adapter("sql", "e" * 64, {})], frozenset(), PATIENCE_S)
        until(lambda: not slots.has(identity_of("sql", "d" * 64)))
        assert slots.replaced == {}


def test_an_adapter_that_is_unloaded_stays_for_the_requests_that_use_it_alone() -> None:
    slots = few_adapters()
    with Node(DecodeRules(Role.DECODE), adapters=slots) as node:
        old, new = identity_of("sql", "d" * 64), identity_of("sql", "e" * 64)
        node.submit(lora=old, sampling=ENDLESS)
        node.outgoing.batches.get(timeout=PATIENCE_S)
        assert node.service.set_adapters([Adapter("sql", "e" * 64, {})], frozenset(), PATIENCE_S)
        assert node.service.set_adapters([], frozenset(), PATIENCE_S)
        status = node.outgoing.status_where(lambda s: not s.adapters)
        assert status.replaced_adapters == {}
        until(lambda: not slots.has(new))
        assert slots.has(old)
        node.service.receive(Cancel(reply_to=ROUTER, request_ids=["r"]))
        until(lambda: not slots.has(old))
        node.submit("t", lora=old)
        assert node.outgoing.until_finished("t")[-1].error.code == "adapter_missing"


class PickyBook(PlainBook):
    def serve(self, read, kept=(), now=0.0) -> None:
        if any(adapter.name == "odd" for adapter in read):
            raise ConfigurationError("the adapter 'odd' does not fit")
        super().serve(read, kept, now)


def test_an_adapter_that_the_engine_does_not_take_fails_its_change_and_nothing_else() -> None:
    book = PickyBook()
    book.serve([Adapter("sql", "d" * 64, {})])
    with Node(DecodeRules(Role.DECODE), adapters=book) as node:
        with pytest.raises(ConfigurationError, match="'odd' does not fit"):
            node.service.set_adapters([Adapter("odd", "1" * 64, {})], frozenset(), PATIENCE_S)
        assert node.service.status().adapters == {"sql": "d" * 64}
        node.expect_served("r", lora=identity_of("sql", "d" * 64))


RUN = MediaFeature("m/0", 2, 1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"media": [MediaFeature("m/0", 1, 1)]}, "placeholders"),  # not there
        ({"media": [MediaFeature("m/0", 2, 2)]}, "placeholders"),  # and another token
        ({"media": [MediaFeature("m/0", 2, 1, 1)]}, "placeholders"),  # no such file
        ({"media": [MediaFeature("m/0", -3, 1)]}, "placeholders"),
        ({"media": [MediaFeature("m/0", 2, 0)]}, "placeholders"),
        ({"media": [MediaFeature("m/0", 4, 9)]}, "placeholders"),
        ({"media": [RUN, RUN]}, "placeholders"),
        ({"reads": False}, "reads no images"),
    ],
)
def test_a_node_takes_a_routers_word_for_no_placeholder(fields: dict, why: str) -> None:
    reads = fields.pop("reads", True)
    with Node(DecodeRules(Role.DECODE)) as node:
        rules = TiledImages(tile=16, longest=48, is_cut=True, tokens=2, token_id=12)
        node.runner.info = msgspec.structs.replace(node.runner.info, images=rules if reads else None)
        # The third of its five tokens is a placeholder.
        node.submit(**({"media": [RUN], "images": [b""]} | fields))
        error = node.refusal()
        assert error.code == "invalid_request"
        assert why in error.message


ROWS = PromptEmbeds("float32", 2, np.arange(36, dtype="<f4").tobytes())


def rows_with(number: float, dtype: str = "float32") -> PromptEmbeds:
    rows = np.zeros(36, "<f4")
    rows[20] = number
    # The upper half of a float32 is the bfloat16.
    data = rows.view("<u2")[1::2] if dtype == "bfloat16" else rows.astype("<f2" if dtype == "float16" else "<f4")
    return PromptEmbeds(dtype, 2, data.tobytes())


@pytest.mark.parametrize(
    ("embeds", "fields", "why"),
    [
        (PromptEmbeds("float32", 3, ROWS.data), {}, "rows of this model have 2 numbers, not 3"),
        (PromptEmbeds("float64", 2, ROWS.data), {}, "rows of this model"),
        (PromptEmbeds("float32", 2, ROWS.data[:-1]), {}, "rows of this model"),
        (PromptEmbeds("float32", 2, b""), {}, "rows of this model"),
        (rows_with(float("nan")), {}, "infinite, or none"),
        (rows_with(float("-inf")), {}, "infinite, or none"),
        (rows_with(float("nan"), "bfloat16"), {}, "infinite, or none"),
        (rows_with(float("inf"), "float16"), {}, "infinite, or none"),
        (ROWS, {"prompt_token_ids": [0] * 17}, "not what its rows are called"),
        (ROWS, {"prompt_token_ids": [0] * 17 + [1]}, "not what its rows are called"),
        (ROWS, {"media": []}, "not what its rows are called"),
        (ROWS, {"media": rows_with(1.0).features()}, "not what its rows are called"),
        (ROWS, {"images": [b""]}, "only tokens follow"),
        (ROWS, {"sampling": SamplingParams(prompt_logprobs=1)}, "only tokens follow"),
        (ROWS, {"size": 0}, "takes tokens alone"),
    ],
)  # fmt: skip
def test_a_node_takes_a_routers_word_for_no_row(embeds: PromptEmbeds, fields: dict, why: str) -> None:
    with Node(DecodeRules(Role.DECODE)) as node:
        node.runner.info = msgspec.structs.replace(node.runner.info, embed_size=fields.pop("size", 2))
        called = embeds.features() if embeds.is_whole else []
        node.submit(**({"prompt_token_ids": [0] * 18, "media": called, "embeds": embeds} | fields))
        error = node.refusal()
        assert error.code == "invalid_request"
        assert why in error.message


@pytest.mark.parametrize(
    ("computes_in", "number", "sent", "fits"),
    [
        ("bfloat16", 3.4e38, "float32", False),
        ("bfloat16", -3.4e38, "float32", False),
        ("bfloat16", 3.38e38, "float32", True),
        ("float16", 65520.0, "float32", False),
        ("float16", 1e20, "bfloat16", False),
        ("float16", 65519.0, "float32", True),
        ("float32", 3.4e38, "float32", True),
    ],
)
def test_rows_are_judged_in_the_type_that_the_model_computes_in(
    computes_in: str, number: float, sent: str, fits: bool
) -> None:
    with Node(DecodeRules(Role.DECODE)) as node:
        node.runner.info = msgspec.structs.replace(node.runner.info, embed_size=2, dtype=computes_in)
        embeds = rows_with(number, sent)
        cast = rows_of(embeds).to(getattr(torch, computes_in))
        assert bool(cast.isfinite().all()) == fits
        node.submit(prompt_token_ids=[0] * 18, media=embeds.features(), embeds=embeds)
        error = node.outgoing.until_finished("r")[-1].error
        assert (error is None) == fits
        assert error is None or f"infinite in {computes_in}" in error.message
