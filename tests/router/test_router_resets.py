"""A real node service and a real router, with connections between them that are reset again and again under load."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tandem.engine.model.runner import FinishedStep, LayerHooks
from tandem.engine.scheduling.output import SchedulerOutput
from tandem.router.config import Heartbeat
from tests.engine.engine_fakes import FakeRunner
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.fake_node import fake_logprobs
from tests.router.resetting_proxy import ResettingProxy
from tests.router.service_node import ServiceNode
from tests.waiting import until

STREAMS = 6
TOKENS = 400
STEP_S = 0.004
RESETS = int(os.environ.get("TANDEM_RESETS", "3"))
BETWEEN_RESETS_S = 4.0  # long enough for a gap of twice what is allowed


class LetterRunner(FakeRunner):
    """Takes some time for a step, and its tokens are letters of the tests' tokenizer."""

    def start(self, step: SchedulerOutput, hooks: LayerHooks | None = None) -> FinishedStep:
        if step.total_num_scheduled_tokens:
            time.sleep(STEP_S)
        computed = super().start(step, hooks)
        output = computed.finish()
        for request_id, tokens in output.sampled_token_ids.items():
            letters = [67 + token % 26 for token in tokens]
            output.sampled_token_ids[request_id] = letters
            output.logprobs[request_id] = [fake_logprobs(letter, 2) for letter in letters]
        return computed


class RealNode(ServiceNode):
    """Behind a proxy."""

    def __init__(self, node_id: str, reset_after: int) -> None:
        super().__init__(node_id, LetterRunner(num_blocks=4096, max_model_len=2048))
        self.proxy = ResettingProxy(self.channel.endpoint, reset_after)
        self.channel.lines.endpoint = self.proxy.endpoint
        self.info = msgspec.structs.replace(self.info, request_endpoint=self.proxy.endpoint)

    def kill(self) -> None:
        self.proxy.close()
        super().kill()


@pytest.fixture
def proxied(start_router: StartRouter) -> Iterator[tuple[RunningRouter, RealNode, ResettingProxy]]:
    router = start_router(prefill=0, decode=0, heartbeat=Heartbeat(ping_interval=0.05, silence=2.5))
    links = router.server.services.links
    inbox = ResettingProxy(links.endpoint, reset_after=150_000)
    links.lines.endpoint = inbox.endpoint
    # The handshake and all six requests pass before it resets. A link that resets before that lets nothing through, however often it is tried.
    node = RealNode("n0", reset_after=10_000)
    router.nodes["n0"] = node  # type: ignore[assignment]
    router.announce()
    router.wait_ready()
    yield router, node, inbox
    inbox.close()


def read(router: RunningRouter, index: int, texts: dict[int, str], gaps: list[float], **fields: object) -> None:
    with router.stream(prompt="the fox " * (index + 1), max_tokens=TOKENS, **fields) as events:
        pieces, last = [], time.monotonic()
        while True:
            data = events.next_event()
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
            if data is None or data == "[DONE]":
                break
            body = json.loads(data)
            assert "error" not in body, body
            pieces.append(body["choices"][0]["text"])
        texts[index] = "".join(pieces)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}], ids=["plain", "logprobs"])
def test_resets_cost_no_request_no_token_and_no_second_computation(
    proxied: tuple[RunningRouter, RealNode, ResettingProxy], fields: dict[str, object]
) -> None:
    router, node, inbox = proxied
    expected = {}
    tokenizer = router.server.services.model.tokenizer
    for index in range(STREAMS):
        prompt = tokenizer.encode("the fox " * (index + 1), special=True)
        ids = [67 + (100 + (len(prompt) + at) % 1000) % 26 for at in range(TOKENS)]
        expected[index] = tokenizer.decode(ids, skip_special=True)
    texts: dict[int, str] = {}
    gaps: list[float] = []
    threads = [
        threading.Thread(target=read, args=(router, index, texts, gaps), kwargs=fields) for index in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == expected
    assert inbox.resets >= 2, "from the node to the router"
    assert node.proxy.resets >= 1, "from the router to the node"
    assert max(gaps) < 2.0
    counters = node.service.status().counters
    assert counters.requests_started == STREAMS, "nothing was submitted twice"
    assert router.metric("tandem_request_success_total", finished_reason="length") == STREAMS
    links = router.server.services.links
    assert router.look(lambda: links.lines.gaps) + counters.line_gaps >= 1, "messages were lost, and healed"
    assert router.look(lambda: links.lines.restarts) == 0


@pytest.mark.slow
@pytest.mark.timeout(120 + 2 * RESETS * BETWEEN_RESETS_S)
def test_with_a_reset_every_few_seconds_no_stream_stands_still_for_two(start_router: StartRouter) -> None:
    """With the heartbeats that are the default, in both directions."""
    router = start_router(prefill=0, decode=0, heartbeat=Heartbeat())
    links = router.server.services.links
    inbox = ResettingProxy(links.endpoint, reset_after=1 << 40)
    links.lines.endpoint = inbox.endpoint
    node = RealNode("n0", reset_after=1 << 40)
    router.nodes["n0"] = node  # type: ignore[assignment]
    router.announce()
    router.wait_ready()
    over = threading.Event()
    gaps: list[float] = []
    answered: list[int] = []

    def use() -> None:
        while not over.is_set():
            read(router, len(answered) % STREAMS, {}, gaps)
            answered.append(1)

    users = [threading.Thread(target=use) for _ in range(STREAMS)]
    for user in users:
        user.start()
    for _ in range(RESETS):
        over.wait(BETWEEN_RESETS_S)
        inbox.reset()
        node.proxy.reset()
    over.set()
    for user in users:
        user.join(30)
    inbox.close()
    print(f"{len(answered)} requests, longest gap {max(gaps):.3f} s, {len(gaps)} gaps")
    assert max(gaps) < 2.0

    def ended() -> int:
        """A node counts an answer as ended a moment after its last token is sent."""
        return node.service.status().counters.requests_finished.get("length", 0)

    until(lambda: ended() >= len(answered))
    assert node.service.status().counters.requests_started == len(answered) == ended()
    assert router.metric("tandem_failovers_total", reason="node_lost") == 0
