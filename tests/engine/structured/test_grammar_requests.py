"""A node whose requests wait for grammars: other requests run, and requests that cannot run end with an error."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import msgspec
import pytest

from tandem.base.errors import InternalError
from tandem.decode_node.node import DecodeRules
from tandem.engine.model.runner import FinishedStep
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.engine.structured.grammars import TokenizerGrammars
from tandem.wire.nodes import Role
from tandem.wire.requests import Cancel
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.engine.structured.grammar_walks import END, backend, vocabulary
from tests.node.test_service import PATIENCE_S, ROUTER, Node

FOLLOWS = SamplingParams(max_tokens=4, temperature=0, grammar='start: "a"')


class Held(TokenizerGrammars):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(backend().to_str, vocabulary(), frozenset({END}))
        self.started = threading.Event()
        self.go = threading.Event()

    def prepare(self, grammar: str) -> None:
        self.started.set()
        assert self.go.wait(PATIENCE_S)
        super().prepare(grammar)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def node(held: Held) -> Iterator[Node]:
    made = Node(DecodeRules(Role.DECODE), grammars=held)
    yield made
    held.go.set()
    made.service.stop()


def all_free(node: Node) -> None:
    node.outgoing.status_where(
        lambda status: status.free_blocks == status.total_blocks and not status.running + status.waiting
    )


def test_others_go_on_while_a_grammar_is_compiled(node: Node, held: Held) -> None:
    node.submit("waits", sampling=FOLLOWS)
    assert held.started.wait(PATIENCE_S)
    node.submit("runs")
    assert node.outgoing.until_finished("runs")[-1].finish is FinishReason.LENGTH
    assert node.outgoing.status_where(lambda status: status.waiting).waiting == 1
    held.go.set()
    assert node.outgoing.until_finished("waits")[-1].finish is FinishReason.LENGTH
    all_free(node)


def test_a_grammar_that_is_there_costs_no_waiting(node: Node, held: Held) -> None:
    held.go.set()
    node.submit("first", sampling=FOLLOWS)
    node.outgoing.until_finished("first")
    held.go.clear()
    node.submit("second", sampling=FOLLOWS)
    assert node.outgoing.until_finished("second")[-1].finish is FinishReason.LENGTH


def test_a_requests_grammar_stays_until_its_end_whatever_others_ask_for(
    node: Node, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step must never compile one: some take a minute, and every request of the node waits for it."""
    monkeypatch.setattr("tandem.engine.structured.grammars._KEPT", 1)
    held.go.set()
    endless = msgspec.structs.replace(FOLLOWS, max_tokens=90_000)
    for name in ("that waited", "that found it"):
        node.submit(name, sampling=endless)
        node.outgoing.status_where(lambda status: status.running)
        held.prepare('start: "another"')
        assert held.prepared('start: "a"') is not None
        held.prepare('start: "a"')
    node.service.receive(Cancel(reply_to=ROUTER, request_ids=["that waited", "that found it"]))
    held.prepare('start: "another"')
    all_free(node)
    node.submit("next")
    node.outgoing.until_finished("next")
    gc.collect()
    assert held.prepared('start: "a"') is None


def test_a_grammar_that_another_tenant_used_is_compiled_anew(node: Node, held: Held) -> None:
    held.go.set()
    node.submit("alice's", sampling=FOLLOWS, cache_salt="a/x")
    node.outgoing.until_finished("alice's")
    held.go.clear()
    held.started.clear()
    node.submit("bob's", sampling=FOLLOWS, cache_salt="b")
    assert held.started.wait(PATIENCE_S)
    node.submit("alice's next", sampling=FOLLOWS, cache_salt="a/x")
    assert node.outgoing.until_finished("alice's next")[-1].finish is FinishReason.LENGTH
    held.go.set()
    assert node.outgoing.until_finished("bob's")[-1].finish is FinishReason.LENGTH


def test_a_request_is_cancelled_while_it_waits(node: Node, held: Held) -> None:
    node.submit("waits", sampling=FOLLOWS)
    assert held.started.wait(PATIENCE_S)
    node.service.receive(Cancel(reply_to=ROUTER, request_ids=["waits"]))
    all_free(node)
    held.go.set()
    # The grammar comes for no request, and the next one is served.
    node.submit("next", sampling=FOLLOWS)
    assert node.outgoing.until_finished("next")[-1].finish is FinishReason.LENGTH


def test_a_grammar_that_takes_too_long_ends_its_request(held: Held) -> None:
    node = Node(DecodeRules(Role.DECODE), grammars=held, grammar_s=0.01)
    node.submit("waits", sampling=FOLLOWS)
    (chunk,) = node.outgoing.until_finished("waits")
    assert chunk.finish is FinishReason.ERROR
    assert chunk.error is not None
    assert chunk.error.code == "deadline_exceeded"
    all_free(node)
    held.go.set()
    node.service.stop()


@pytest.mark.parametrize("grammar", ["start: unknown", 'start: %json {"$ref": "#"}', ""])
def test_what_is_no_grammar_ends_its_request(node: Node, held: Held, grammar: str) -> None:
    held.go.set()
    node.submit("r", sampling=SamplingParams(temperature=0, grammar=grammar))
    (chunk,) = node.outgoing.until_finished("r")
    assert chunk.error is not None
    assert chunk.error.code == "invalid_request"
    assert "grammar" in chunk.error.message or "unknown" in chunk.error.message
    all_free(node)


def test_a_request_whose_grammar_breaks_in_a_step_ends_alone(node: Node, monkeypatch) -> None:
    start = node.runner.start

    def breaks(step: SchedulerOutput, hooks=None) -> FinishedStep:
        output = start(step, hooks).finish()
        if output.sampled_token_ids.pop("breaks", None):
            output.errors["breaks"] = InternalError("the answer does not follow its grammar")
        return FinishedStep(output)

    monkeypatch.setattr(node.runner, "start", breaks)
    node.submit("breaks")
    node.submit("runs")
    (chunk,) = node.outgoing.until_finished("breaks")
    assert chunk.error is not None
    assert chunk.error.code == "internal_error"
    node.submit("next")
    assert node.outgoing.until_finished("next")[-1].finish is FinishReason.LENGTH
    all_free(node)


def test_a_node_without_grammars_refuses_them() -> None:
    node = Node(DecodeRules(Role.DECODE))
    try:
        node.submit("r", sampling=FOLLOWS)
        (chunk,) = node.outgoing.until_finished("r")
        assert chunk.error.message == "this node follows no grammars"
    finally:
        node.service.stop()
