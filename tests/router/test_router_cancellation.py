"""When a client disconnects, its request is cancelled on both nodes, in every phase."""

from __future__ import annotations

import pytest

from tandem.router.config import Limits
from tests.router.conftest import RunningRouter, StartRouter
from tests.router.event_reader import EventReader


def cancelled(router: RunningRouter, *node_ids: str) -> None:
    for node_id in node_ids:
        node = router.nodes[node_id]
        node.wait_until(
            lambda node=node: bool(node.submits) and node.submits[-1].request_id in node.cancels,  # type: ignore[misc]
            "cancelled",
            timeout_s=1.0,
        )
    router.wait_for(router.idle, "nothing is left of it", timeout_s=1.0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "handover", "decode"])
def test_in_every_phase(start_router: StartRouter, phase: str, stream: bool) -> None:
    router = start_router()
    prefill, decode = router.nodes["p0"], router.nodes["d0"]
    if phase == "prefill":
        prefill.set(pause_at=0)
    decode.set(pause_at=0 if phase == "handover" else 4)
    events = router.stream(max_tokens=50, stream=stream)
    decode.wait_until(lambda: bool(decode.submits), "submitted")
    prefill.wait_until(lambda: bool(prefill.submits), "submitted")
    if stream and phase == "decode":
        assert len(events.text(count=4)) == 4
    elif stream and phase == "handover":
        assert len(events.text(count=1)) == 1
    events.close()
    cancelled(router, "p0", "d0")
    ended = {"route": "/v1/completions", "status": "499"}  # in the log, too: it is one figure
    router.wait_for(lambda: router.metric("tandem_http_requests_total", **ended) == 1, "counted as what it was")
    prefill.resume()
    decode.resume()
    assert router.complete(max_tokens=3).status_code == 200


def test_while_it_waits_in_the_router(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=1, limits=Limits(inflight_per_node=1))
    node = router.nodes["d0"]
    node.set(pause_at=1)
    first = router.stream(max_tokens=3)
    assert len(first.text(count=1)) == 1
    second = router.stream(max_tokens=3)
    admission = router.server.services.dispatcher.admission
    router.wait_for(lambda: admission.queued == 1, "it waits")
    second.close()
    router.wait_for(lambda: admission.queued == 0, "it no longer waits", timeout_s=1.0)
    assert len(node.submits) == 1
    node.resume()
    assert len(first.text()) == 2
    first.close()


def test_every_choice_of_a_request(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=2)
    for node in router.nodes.values():
        node.set(pause_at=2)
    events = router.stream(max_tokens=50, n=6)
    events.text(count=12)
    events.close()
    router.wait_for(router.idle, "nothing is left of it", timeout_s=1.0)
    for node in router.nodes.values():
        node.wait_until(lambda node=node: not node.running, "cancelled", timeout_s=1.0)  # type: ignore[misc]


def test_a_storm_of_clients_that_hang_up(start_router: StartRouter) -> None:
    router = start_router(prefill=2, decode=2)
    router.set(pause_at=3)
    storm = [router.stream(max_tokens=50, stream=index % 2 == 0) for index in range(100)]
    for index, events in enumerate(storm):
        if index % 4 == 0:
            events.text(count=1)
        events.close()
    router.wait_for(router.idle, "nothing is left of them", timeout_s=3.0)
    for node in router.nodes.values():
        node.wait_until(lambda node=node: not node.running, "cancelled")  # type: ignore[misc]
        node.resume()
    assert router.complete(max_tokens=5).status_code == 200


def test_a_client_that_goes_away_before_its_body_is_complete(start_router: StartRouter) -> None:
    router = start_router()
    events = EventReader(
        router.url, "/v1/completions", {"model": "fake", "prompt": "x"}, headers={"content-length": "9"}
    )
    events.close()
    assert router.complete(max_tokens=2).status_code == 200
    router.wait_for(router.idle, "nothing is left of it")


@pytest.mark.parametrize("stream", [True, False])
def test_one_that_has_sent_its_next_request_already(start_router: StartRouter, stream: bool) -> None:
    router = start_router()
    router.nodes["d0"].set(pause_at=4)
    events = router.stream(max_tokens=50, stream=stream)
    router.nodes["d0"].wait_until(lambda: bool(router.nodes["d0"].submits), "submitted")
    events.socket.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    if stream:
        assert len(events.text(count=4)) == 4
    events.close()
    cancelled(router, "p0", "d0")
    router.nodes["d0"].resume()
