"""Several router processes on one port: each answers for all of them, and one that ends takes nothing of that with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.http_server import serving
from tandem.http_server.serving import Tally
from tandem.router.config import ApiKey, LocalPrefill, PolicyName
from tandem.router.policy.choose import Chooser
from tandem.router.policy.views import RoutingRequest
from tandem.router.prefixes import PromptHashes
from tandem.router.processes import sockets
from tandem.router.processes.sockets import SiblingProcesses
from tandem.router.processes.wing import Processes, SiblingReports
from tandem.wire.nodes import Role
from tests.router.conftest import RunningRouter, StartRouter, bearer
from tests.router.test_router_pool import World, info, status

BODY = {"model": "fake", "prompt": "the fox", "max_tokens": 3}
Pair = tuple[RunningRouter, RunningRouter]


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LEAVING_ACCEPTED_S", 0.05)
    monkeypatch.setattr(serving, "LEAVING_IDLE_S", 0.2)


@pytest.fixture
def pair(start_router: StartRouter) -> Pair:
    return start_pair(start_router)


def start_pair(start_router: StartRouter, api_keys: tuple[ApiKey, ...] = ()) -> Pair:
    """Two on one port, which know each other."""
    first = start_router(api_keys=api_keys)
    door = first.look(lambda: first.server.door)
    second = start_router(prefill=0, decode=0, door=door, api_keys=api_keys).join(first)
    second.wait_for(lambda: second.server.accepts, "it accepts")
    introduce(first, second)
    return first, second


def introduce(*routers: RunningRouter) -> None:
    desks = {f"router~{number}": router.server.services.siblings.desk for number, router in enumerate(routers)}
    for router in routers:
        router.look(lambda router=router: router.server.set_siblings(desks))  # type: ignore[misc]


def on_new_connection(
    router: RunningRouter, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    with router.new_client() as client:
        return client.request("GET" if body is None else "POST", path, json=body, headers=headers)


def sample(text: str, name: str) -> float:
    families = text_string_to_metric_families(text)
    return sum(one.value for family in families for one in family.samples if one.name == name)


def ask_many(router: RunningRouter, count: int) -> None:
    for _ in range(count):
        assert on_new_connection(router, "/v1/completions", BODY).status_code == 200


def test_connections_are_shared_evenly(pair: Pair) -> None:
    first, second = pair
    clients = [first.new_client() for _ in range(16)]
    for client in clients:
        assert client.get("/health").status_code == 200
    counts = first.connections(), second.connections()
    assert sum(counts) == 16
    assert min(counts) >= 4, "one that is stopped for a moment keeps none waiting, so they need not be equal"
    for client in clients:
        client.close()


def test_one_that_hangs_keeps_no_connection_waiting(pair: Pair) -> None:
    first, second = pair
    going_on, hanging = hang(second)
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: on_new_connection(first, "/health").status_code, range(16)))
    finally:
        going_on.set()
    hanging.result(20)
    assert answers == [200] * 16


def hang(router: RunningRouter) -> tuple[threading.Event, Future[None]]:
    """Until the event is set. It hangs when this returns."""
    begun, going_on = threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        going_on.wait(15)

    hanging = router.begin(block())
    assert begun.wait(15)
    return going_on, hanging


def test_whichever_is_asked_tells_the_figures_of_both(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "ANSWER_S", 20.0)  # the machine may be busy
    first, _ = pair
    ask_many(first, 10)
    assert all(one.metric("tandem_prompt_tokens_total") > 0 for one in pair), "both had requests"
    for _ in range(4):
        text = on_new_connection(first, "/metrics").text
        assert sample(text, "tandem_request_success_total") == 10
        assert sample(text, "tandem_router_process_up") == 2
        assert sample(text, "tandem_node_up") == len(first.nodes), "nodes are told of once"


def test_what_one_has_counted_stays_when_it_leaves(pair: Pair) -> None:
    first, second = pair
    ask_many(first, 10)
    assert second.call(second.server.leave(20))
    second.call(second.server.stop())
    introduce(first)
    text = on_new_connection(first, "/metrics").text
    assert sample(text, "tandem_request_success_total") == 10
    assert sample(text, "tandem_num_requests_running") == 0


def test_what_was_shown_stays_when_one_is_killed(pair: Pair) -> None:
    first, second = pair
    ask_many(first, 10)
    shown = second.call(second.wing(Processes).figures.together())
    assert shown is not None
    second.look(second.wing(Processes).siblings.close)
    text = on_new_connection_to(first)
    assert sample(text, "tandem_request_success_total") == 10
    assert 'tandem_router_process_up{model_name="fake",process="router~1"} 0.0' in text


def on_new_connection_to(router: RunningRouter) -> str:
    figures = router.call(router.wing(Processes).figures.together())
    return router.server.services.metrics.render(figures).decode()


def test_one_that_does_not_answer_is_named_and_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    monkeypatch.setattr(sockets, "ANSWER_S", 0.05)
    going_on, hanging = hang(second)
    try:
        told = on_new_connection(first, "/cluster").json()["router"]["processes"]
    finally:
        going_on.set()
    hanging.result(20)
    assert [(one["name"], one["answers"]) for one in told] == [("router~0", True), ("router~1", False)]


def test_load_cluster_and_the_page_add_up(pair: Pair) -> None:
    first, _ = pair
    ask_many(first, 6)
    first.set(pause_at=1)
    streams = [first.stream(max_tokens=5) for _ in range(4)]
    for stream in streams:
        assert stream.read_header() == 200
    assert on_new_connection(first, "/load").json() == {"server_load": 4}
    router = on_new_connection(first, "/cluster").json()["router"]
    assert router["running"] == 4
    assert sum(one["running"] for one in router["processes"]) == 4
    page = on_new_connection(first, "/ui/state").json()
    assert page["router"]["running"] == 4
    assert sum(moment["ended"] for moment in page["moments"]) == 6
    assert len(page["latest"]) == 6
    assert len(page["nodes"]) == len(first.nodes)
    first.set(pause_at=None)
    for stream in streams:
        stream.text()


def test_a_trace_is_found_in_either(pair: Pair) -> None:
    first, _ = pair
    for number in range(8):
        headers = {"x-tandem-trace": "1", "x-request-id": f"asked-{number}"}
        assert on_new_connection(first, "/v1/completions", BODY, headers).status_code == 200
    listed = on_new_connection(first, "/traces").json()
    assert {one["request_id"] for one in listed["traces"]} == {f"asked-{number}" for number in range(8)}
    for number in range(8):
        assert on_new_connection(first, f"/traces/asked-{number}").status_code == 200
    assert on_new_connection(first, "/traces/none").status_code == 404


def test_a_stored_response_is_gone_on_with_and_deleted_by_either(pair: Pair) -> None:
    first, second = pair
    asked = {"model": "fake", "input": "hi", "max_output_tokens": 3}
    name = on_new_connection(first, "/v1/responses", asked).json()["id"]
    for router in pair:
        found = router.call(find(router, name))
        assert found["id"] == name
        assert found["status"] in ("completed", "incomplete")
    for _ in range(4):
        again = {**asked, "previous_response_id": name}
        assert on_new_connection(first, "/v1/responses", again).status_code == 200
    with first.new_client() as client:
        assert client.delete(f"/v1/responses/{name}").json()["deleted"]
    for _ in range(4):
        assert on_new_connection(first, f"/v1/responses/{name}").status_code == 404
    assert second.idle()


def test_a_response_that_was_cancelled_is_gone_on_with_by_neither(pair: Pair) -> None:
    first, _ = pair
    first.nodes["d0"].set(pause_at=2)
    with first.new_client() as client:
        name = client.post("/v1/responses", json={"model": "fake", "input": "hi", "background": True}).json()["id"]
        assert client.post(f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"
    first.nodes["d0"].resume()
    for router in pair:
        router.wait_for(router.idle, "nothing is left of it")
    again = {"model": "fake", "input": "and?", "max_output_tokens": 3, "previous_response_id": name}
    for _ in range(8):
        answer = on_new_connection(first, "/v1/responses", again)
        assert (answer.status_code, "cancelled" in answer.text) == (400, True)


async def find(router: RunningRouter, name: str) -> dict[str, object]:
    async with httpx.AsyncClient(base_url=router.url, trust_env=False) as client:
        answer: dict[str, object] = (await client.get(f"/v1/responses/{name}")).json()
        return answer


def test_a_tally_forgets_one_that_is_gone() -> None:
    one = Tally()
    assert one.lead(5) is None
    other = Tally(one.descriptor)
    one.set(3)
    other.set(1)
    assert (one.lead(3), other.lead(1)) == (2, -2)
    other.close()
    assert one.lead(3) is None
    one.close()


def test_a_quota_holds_for_all_together(start_router: StartRouter) -> None:
    first, second = start_pair(start_router, (ApiKey("a", "secret", concurrent_requests=2),))
    tenants = [router.server.services.keys.find(b"secret") for router in (first, second)]

    def both_count(running: int) -> None:
        for router, tenant in zip((first, second), tenants, strict=True):
            assert tenant is not None
            router.wait_for(lambda tenant=tenant: tenant.running_everywhere == running, f"{running} run")  # type: ignore[misc]

    first.set(pause_at=1)
    streams = []
    for number in range(2):
        streams.append(first.stream(headers=bearer("secret"), max_tokens=5))
        assert streams[-1].read_header() == 200
        both_count(number + 1)
    for _ in range(4):
        assert on_new_connection(first, "/v1/completions", BODY, bearer("secret")).status_code == 429
    first.set(pause_at=None)
    for stream in streams:
        stream.text()
    both_count(0)
    assert on_new_connection(first, "/v1/completions", BODY, bearer("secret")).status_code == 200


async def introduced(*several: SiblingProcesses) -> None:
    for one in several:
        await one.listen()
    for one in several:
        one.tell({str(number): other.desk for number, other in enumerate(several)})


async def test_what_one_sends_is_known_to_the_other_at_once() -> None:
    both, pools, choosers, reports = [SiblingProcesses(), SiblingProcesses()], [], [], []
    nodes = [info("p0", role=Role.PREFILL), info("p1", role=Role.PREFILL), info("d0")]
    for one in both:
        pool = World().pool
        pool.set_members(nodes)
        for node in nodes:
            pool.on_status(status(node))
        pools.append(pool)
        choosers.append(Chooser(pool, PolicyName.PREFIX_AFFINITY, LocalPrefill.NEVER))
        reports.append(SiblingReports(one, pool, choosers[-1]))
    await introduced(*both)
    member = pools[1].member("p1")
    assert member is not None
    hashes = PromptHashes(list(range(640)), None)
    reports[0].tell(member.info, "request", 640, 40, hashes)
    await until(lambda: member.pending_tokens == 640)
    assert member.pending_blocks == 40
    decision = choosers[1].choose(RoutingRequest(640, 9), hashes)
    assert decision.prefill == member.info, "it will have the prompt cached"
    reports[0].tell_answered("p1", "request")
    await until(lambda: member.pending_tokens == 0)
    for one in both:
        one.close()


async def test_one_that_does_not_read_misses_the_oldest_reports_and_holds_nobody_up() -> None:
    teller, reader, stranger = SiblingProcesses(), SiblingProcesses(), SiblingProcesses()
    heard: list[int] = []
    reader.hears["number"] = lambda desk, body: heard.append(msgspec.msgpack.decode(body, type=int))
    await introduced(teller, reader)
    await stranger.listen()
    stranger.tell({"reader": reader.desk})
    stranger.report("number", -1)  # the reader does not know it
    most = sockets.REPORTS_KEPT
    for number in range(3 * most):  # all at once: the reader's turn is later
        teller.report("number", number)
    await until(lambda: bool(heard) and heard[-1] == 3 * most - 1)
    assert heard == list(range(2 * most, 3 * most))
    reader.close()
    teller.report("number", 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    teller.close()
    stranger.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
