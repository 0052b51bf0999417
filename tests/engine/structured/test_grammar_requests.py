"""A node whose requests wait for grammars: other requests run, and requests that cannot run end with an error."""

from __future__ import annotations

import gc
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from tandem.base.errors import DeadlineExceeded, InternalError, InvalidRequest, TandemError
from tandem.decode_node.node import DecodeRules
from tandem.engine.config import SchedulerConfig
from tandem.engine.model import torch_runner
from tandem.engine.model.runner import FinishedStep
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.engine.structured import masks
from tandem.engine.structured.grammars import TokenizerGrammars
from tandem.engine.structured.masks import MOST_IN_VAIN, MOST_SLOW
from tandem.engine.structured.pending import PendingGrammars
from tandem.wire.nodes import Role
from tandem.wire.requests import Cancel
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.engine.model import tiny
from tests.engine.model.driver import Driver, load
from tests.engine.structured.grammar_walks import END, PROMPT, Model, backend, costly_after, decode, encode, vocabulary
from tests.integration.one_engine import OneEngine
from tests.node.test_service import PATIENCE_S, ROUTER, Node

FOLLOWS = SamplingParams(max_tokens=4, temperature=0, grammar='start: "a"')


class Held(TokenizerGrammars):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(backend().to_str, vocabulary(), frozenset({END}))
        self.begun: queue.Queue[str] = queue.Queue()
        self.go = threading.Event()

    def prepare(self, grammar: str) -> None:
        self.begun.put(grammar)
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
    held.begun.get(timeout=PATIENCE_S)
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
    held.begun.get_nowait()
    node.submit("bob's", sampling=FOLLOWS, cache_salt="b")
    held.begun.get(timeout=PATIENCE_S)
    node.submit("alice's next", sampling=FOLLOWS, cache_salt="a/x")
    assert node.outgoing.until_finished("alice's next")[-1].finish is FinishReason.LENGTH
    held.go.set()
    assert node.outgoing.until_finished("bob's")[-1].finish is FinishReason.LENGTH


def test_a_request_is_cancelled_while_it_waits(node: Node, held: Held) -> None:
    node.submit("waits", sampling=FOLLOWS)
    held.begun.get(timeout=PATIENCE_S)
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


@pytest.mark.parametrize("grammar", ["start: unknown", ""])
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


class Pending(PendingGrammars):
    def __init__(self, of: TokenizerGrammars) -> None:
        self.told: queue.Queue[tuple[str, TandemError | None]] = queue.Queue()
        super().__init__(of, 5.0)

    def ask(self, request_id: str, grammar: str, now: float, tenant: str = "") -> None:
        self.begin(request_id, grammar, lambda error: self.told.put((request_id, error)), now, tenant)


@pytest.fixture
def pending(held: Held) -> Iterator[Pending]:
    made = Pending(held)
    yield made
    held.go.set()
    made.close()


def test_what_takes_too_long_is_overdue_once_and_its_late_result_is_nobodys(held: Held, pending: Pending) -> None:
    pending.ask("first", 'start: "a"', now=0.0)
    pending.ask("second", 'start: "b"', now=3.0)
    for _ in range(2):
        held.begun.get(timeout=PATIENCE_S)
    assert pending.seconds_until_due(1.0) == 4.0
    assert pending.overdue(4.9) == []
    ((request_id, error),) = pending.overdue(5.0)
    assert request_id == "first"
    assert isinstance(error, DeadlineExceeded)
    assert pending.overdue(5.0) == []
    held.go.set()
    late = {pending.told.get(timeout=PATIENCE_S)[0] for _ in range(2)}
    assert late == {"first", "second"}
    assert not pending.forget("first")
    assert pending.forget("second")
    assert pending.seconds_until_due(9.0) is None


def test_a_tenant_with_many_grammars_does_not_delay_another_one(held: Held, pending: Pending) -> None:
    for number in range(9):
        pending.ask(f"greedy {number}", f'start: "{number}"', now=0.0, tenant="greedy")
    for _ in range(2):
        held.begun.get(timeout=PATIENCE_S)
    pending.ask("other", 'start: "o"', now=0.0, tenant="other")
    held.go.set()
    assert 'start: "o"' in [held.begun.get(timeout=PATIENCE_S) for _ in range(2)]


def test_grammars_of_one_tenant_that_never_end_leave_threads_for_others(held: Held, pending: Pending) -> None:
    for number in range(9):
        pending.ask(f"greedy {number}", f'start: "{number}"', now=0.0, tenant="greedy")
    for number in range(2):
        assert held.begun.get(timeout=PATIENCE_S) == f'start: "{number}"'
    pending.ask("other", 'start: "o"', now=0.0, tenant="other")
    assert held.begun.get(timeout=PATIENCE_S) == 'start: "o"'


def test_what_nobody_waits_for_any_more_is_not_compiled(held: Held, pending: Pending) -> None:
    for number in range(2):
        pending.ask(f"busy {number}", f'start: "{number}"', now=0.0)
        held.begun.get(timeout=PATIENCE_S)
    pending.ask("cancelled", 'start: "c"', now=1.0)
    pending.ask("too late", 'start: "d"', now=1.0)
    pending.ask("in time", 'start: "e"', now=3.0)
    assert pending.forget("cancelled")
    assert "too late" in [request_id for request_id, _ in pending.overdue(6.0)]
    held.go.set()
    assert held.begun.get(timeout=PATIENCE_S) == 'start: "e"'
    assert {pending.told.get(timeout=PATIENCE_S)[0] for _ in range(3)} == {"busy 0", "busy 1", "in time"}


def test_a_panic_is_an_error_and_does_not_end_the_thread(
    held: Held, pending: Pending, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics(grammar: str) -> None:
        raise KeyboardInterrupt("as a library's panic: no Exception")

    monkeypatch.setattr(held, "prepare", panics)
    for request_id in "abc":
        pending.ask(request_id, 'start: "a"', now=0.0)
    for _ in range(3):
        assert isinstance(pending.told.get(timeout=PATIENCE_S)[1], InternalError)


PERSON = {
    "first_name": {"type": "string", "maxLength": 12},
    "age_in_years": {"type": "integer", "minimum": 0, "maximum": 99},
    "email_address": {"type": "string", "maxLength": 16},
    "is_a_registered_customer": {"type": "boolean"},
}
ORDER = {
    "order_number": {"type": "integer", "minimum": 0, "maximum": 99999},
    "delivery_address": {
        "type": "object",
        "properties": {"street_and_number": {"type": "string", "maxLength": 20}, "postal_code": {"type": "string", "maxLength": 6}},
        "required": ["street_and_number", "postal_code"],
        "additionalProperties": False,
    },
    "payment_method": {"enum": ["credit_card", "bank_transfer"]},
}  # fmt: skip


def grammar_of(properties: dict[str, Any]) -> str:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return f"start: %json {json.dumps({**schema, 'additionalProperties': False})}"


@pytest.mark.parametrize(
    ("answered", "forced"), [("", ""), ("ye", "s"), ("n", "othing at all"), ("no", "thing at all")]
)
def test_what_leaves_no_choice_is_forced(answered: str, forced: str) -> None:
    model = Model(SamplingParams(temperature=0, grammar='start: "yes" | "nothing at all"'))
    model.requests.append_tokens(model.row, [token for letter in answered for token in encode(letter)])
    for most in (99, 1):
        found = model.masks.forced(model.row, most, model.requests, model.table)
        assert len(found) <= most
        assert forced.startswith(decode(found))
        assert bool(found) == bool(forced)
    assert model.finish() == answered + forced if forced else True


def test_a_model_that_cuts_words_in_its_own_way_is_left_alone() -> None:
    said = "true true true true"
    model = Model(SamplingParams(temperature=0, grammar=f'start: "{said}"'))
    forced = []
    for letter in said[:12]:
        found = model.masks.forced(model.row, 8, model.requests, model.table)
        forced.append(len(decode(found[:1])) > 1)  # a longer word than the letter that is chosen
        model.requests.append_tokens(model.row, encode(letter))
    assert forced.count(True) == MOST_IN_VAIN
    assert model.finish() == said


def test_a_grammar_that_forces_a_very_long_text_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "SLOW_S", 0.0)
    model = Model(SamplingParams(temperature=0, grammar="start: /a{5000}/"))
    found = []
    for _ in range(4):
        found.append(len(model.masks.forced(model.row, 8, model.requests, model.table)))
        model.sample()
    assert found == [8] * MOST_SLOW + [0] * (4 - MOST_SLOW)
    assert model.failure is None


def test_what_is_forced_up_to_a_place_that_costs_too_much_is_said_first(tmp_path: Path) -> None:
    """With drafts a step comes near that place earlier than without."""
    path = tiny.save("llama", tmp_path)
    backend().save(str(path / "tokenizer.json"))
    said = encode("xqxqxqxqxqxq")
    driver = Driver(load(path))
    driver.add("r", PROMPT, SamplingParams(temperature=0, grammar=costly_after(decode(said)), bad_words=[encode("y")]))
    assert driver.generate(len(said))["r"] == said
    driver.failing.add("r")
    assert isinstance(driver.step({"r": 1}).errors["r"], InvalidRequest)


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("drafts", [0, 3])
def test_answers_are_the_same_in_fewer_steps(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    prompts = ["A customer as JSON:", "The order of a book, as JSON:"]
    answers, steps, forced = [], [], []
    for at_once in (torch_runner.FORCED_AT_ONCE, 0):
        monkeypatch.setattr(torch_runner, "FORCED_AT_ONCE", at_once)
        scheduler = SchedulerConfig(max_model_len=512, num_speculative_tokens=drafts)
        with OneEngine.start(smollm2_path, "e", 16, None, scheduler=scheduler) as engine:
            for number, temperature in enumerate((0.0, 0.0, 1.0, 1.0)):
                sampling = SamplingParams(
                    max_tokens=200, temperature=temperature, seed=number, stop_token_ids=[end],
                    grammar=grammar_of((PERSON, ORDER)[number % 2]),
                )  # fmt: skip
                prompt = tokenizer.encode(prompts[number % 2]).ids
                engine.add(str(number), prompt, 200, None, sampling=sampling)
            answers.append(engine.run_all())
            stats = engine.engine.scheduler.stats()
            steps.append(stats.steps)
            forced.append(stats.grammar_tokens_forced)
    assert answers[0] == answers[1]
    assert forced[0] > 20
    assert forced[1] == 0
    assert steps[0] < steps[1]
    print(f"steps {steps}, forced tokens {forced[0]} of {sum(map(len, answers[0].values()))}")
