from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tandem.router.config import ApiKey, Limits, Timeouts
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.event_reader import EventReader


def occupy(router: RunningRouter) -> EventReader:
    """Starts a request that holds the only place until the node is resumed."""
    router.nodes["d0"].set(pause_at=1)
    events = router.stream(max_tokens=3)
    events.text(count=1)
    return events


def test_a_full_queue_is_said_at_once_with_the_time_to_come_back(start_router: StartRouter) -> None:
    router = start_router(prefill=0, limits=Limits(inflight_per_node=1, queued=2))
    with occupy(router), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(router.complete, max_tokens=2) for _ in range(2)]
        router.wait_for(lambda: router.server.services.dispatcher.admission.queued == 2, "two wait")
        refused = router.complete(max_tokens=2)
        assert error_of(refused, 503)["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        router.nodes["d0"].resume()
        assert [answer.result(10).status_code for answer in waiting] == [200, 200]


def test_a_decode_node_is_given_no_work_for_which_it_has_no_blocks(start_router: StartRouter) -> None:
    """The node's free blocks are promised to its running requests, so the next request waits in the router, where it holds nothing."""
    router = start_router(prefill=1, timeouts=Timeouts(token_idle=0.2))
    decode, admission = router.nodes["d0"], router.server.services.dispatcher.admission
    full = {"free_blocks": 40, "wanted_blocks": 38, "running": 9, "total_blocks": 100}

    def room() -> int:
        [view] = router.server.services.pool.view.snapshot().decode
        return view.room_blocks

    decode.set(status_fields=full)
    router.wait_for(lambda: room() == 2, "the node's report")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(router.complete, max_tokens=30)
        router.wait_for(lambda: admission.queued == 1, "it waits in the router")
        assert decode.submits == router.nodes["p0"].submits == []
        decode.set(status_fields=full | {"wanted_blocks": 10})
        assert answer.result(10).status_code == 200
    assert len(decode.submits) == 1


def with_long_context(start_router: StartRouter, timeouts: Timeouts) -> RunningRouter:
    node = {"max_model_len": 400_000}
    return start_router(prefill=0, node=node, timeouts=timeouts, max_failovers=0).with_small_buffers()


def test_a_reader_that_stops_is_cut_off_and_nobody_else_notices(start_router: StartRouter) -> None:
    router = with_long_context(start_router, Timeouts(slow_reader=0.2))
    node = router.nodes["d0"]
    body = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 300_000, "n": 2, "logprobs": 20}
    with EventReader(router.url, "/v1/completions", body, receive_buffer=4096):
        node.wait_until(lambda: len(node.submits) == 2, "both run")
        assert router.complete(max_tokens=5).status_code == 200
        router.wait_for(router.idle, "cut off, and nothing is left of it", 25)
        assert router.metric("tandem_slow_readers_cut_total") == 1
        node.wait_until(lambda: not node.running, "cancelled")


def test_an_answer_that_nobody_fetches_does_not_hold_its_connection(start_router: StartRouter) -> None:
    router = with_long_context(start_router, Timeouts(keep_alive=1, slow_reader=0.3))
    body = {"model": "fake", "prompt": "x", "max_tokens": 500, "n": 4, "logprobs": 20}
    with EventReader(router.url, "/v1/completions", body, receive_buffer=4096):
        router.wait_for(lambda: router.metric("tandem_generation_tokens_total") == 2_000, "all of it is generated")
        router.wait_for(lambda: router.connections() == 0, "given up")


def test_drain_finishes_what_runs_and_takes_nothing_new(start_router: StartRouter) -> None:
    router = start_router(prefill=0)
    with occupy(router) as events:
        drained = router.begin(router.server.drain(10))
        router.wait_for(lambda: router.server.services.draining, "draining")
        assert error_of(router.complete(), 503)["code"] == "draining"
        assert router.client.get("/health").status_code == 503
        assert not drained.done()
        router.nodes["d0"].resume()
        assert len(events.text()) == 2
        assert drained.result(10) is True


def test_drain_fails_what_does_not_end_in_time_and_tells_those_who_still_wait(start_router: StartRouter) -> None:
    """So does a second one: the controller that ordered the first was killed, and the next one orders it again."""
    router = start_router(prefill=0, limits=Limits(inflight_per_node=1))
    with occupy(router) as events, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(router.complete, max_tokens=2)
        router.wait_for(lambda: router.server.services.dispatcher.admission.queued == 1, "it waits")
        first, second = router.begin(router.server.drain(0.1)), router.begin(router.server.drain(10))
        assert (first.result(10), second.result(10)) == (False, False)
        assert "shutting down" in events.rest()[-1]["error"]["message"]
        assert "shutting down" in error_of(waiting.result(10), 503)["message"]
    router.wait_for(router.idle, "nothing is left")


def test_stop_is_idempotent_and_leaves_no_task(start_router: StartRouter) -> None:
    router = start_router()
    with occupy(router):
        router.call(router.server.stop())
        router.call(router.server.stop())

        async def others() -> list[str]:
            mine = asyncio.current_task()
            return [task.get_name() for task in asyncio.all_tasks() if task is not mine]

        router.wait_for(lambda: router.call is not None, "settled")
        assert router.call(others()) == []


def test_a_wide_request_runs_in_the_places_that_there_are_and_others_run_beside_it(start_router: StartRouter) -> None:
    keys = (ApiKey("wide", "key-wide"), ApiKey("narrow", "key-narrow"))
    router = start_router(prefill=0, limits=Limits(inflight_per_node=2), api_keys=keys)
    node, admission = router.nodes["d0"], router.server.services.dispatcher.admission
    node.set(pause_at=1)
    with ThreadPoolExecutor(2) as pool:
        wide = pool.submit(router.complete, key="key-wide", n=7, max_tokens=2, seed=5)
        node.wait_until(lambda: len(node.submits) == 2, "it runs with two of seven")
        router.wait_for(lambda: admission.queued == 5, "the others wait")
        narrow = pool.submit(router.complete, key="key-narrow", max_tokens=2)
        router.wait_for(lambda: admission.queued == 6, "queued")
        node.resume()
        assert narrow.result(10).status_code == 200
        answer = wide.result(10)
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert texts == [router.expected("the fox", 2, seed=5 + index) for index in range(7)]
    router.wait_for(router.idle, "nothing is left")


def test_the_rest_of_a_wide_request_leaves_the_line_with_its_client_and_at_its_deadline(
    start_router: StartRouter,
) -> None:
    router = start_router(prefill=0, limits=Limits(inflight_per_node=2), timeouts=Timeouts(total=0.5))
    router.nodes["d0"].set(pause_at=1)
    with router.stream(max_tokens=3, n=6) as events:
        events.text(count=1)
        assert router.server.services.dispatcher.admission.queued == 4
    router.wait_for(router.idle, "nothing is left")
    assert router.complete(max_tokens=3, n=3).status_code == 504
    router.wait_for(router.idle, "nothing is left")


def test_the_time_to_the_first_token_begins_with_the_request(start_router: StartRouter) -> None:
    router = start_router(prefill=0, limits=Limits(inflight_per_node=1))
    with occupy(router), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(router.complete, max_tokens=2)
        router.wait_for(lambda: router.server.services.dispatcher.admission.queued == 1, "it waits")
        first, queue = "tandem_time_to_first_token_seconds_sum", "tandem_request_queue_time_seconds_sum"
        first_before, queue_before = router.metric(first), router.metric(queue)
        router.nodes["d0"].resume()
        assert waiting.result(10).status_code == 200
    waited = router.metric(queue) - queue_before
    assert waited > 0
    assert router.metric(first) - first_before >= waited


def test_while_everything_is_paused_new_requests_wait_and_running_ones_end(start_router: StartRouter) -> None:
    router = start_router(prefill=0)
    infos = [node.info for node in router.nodes.values()]
    with occupy(router) as running, ThreadPoolExecutor(1) as pool:
        router.look(lambda: router.server.set_members(infos, ["decode"]))
        waiting = pool.submit(router.complete, max_tokens=2)
        router.wait_for(lambda: router.server.services.dispatcher.admission.queued == 1, "it waits")
        router.nodes["d0"].resume()
        assert running.rest(), "it goes on to its end"
        assert router.client.get("/cluster").json()["router"]["paused"] == ["decode"]
        assert router.client.get("/health").status_code == 200
        router.look(lambda: router.server.set_members(infos, []))
        assert waiting.result(10).status_code == 200


def test_a_pause_that_lasts_is_told_with_the_time_to_come_back(start_router: StartRouter) -> None:
    router = start_router(prefill=0, timeouts=Timeouts(queue=0.2))
    infos = [node.info for node in router.nodes.values()]
    router.look(lambda: router.server.set_members(infos, ["prefill", "decode", "aggregated"]))
    refused = router.complete(max_tokens=2)
    assert error_of(refused, 503)["code"] == "overloaded"
    assert "requests are paused" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert router.metric("tandem_deadlines_exceeded_total", phase="queue") == 1


def test_a_key_on_all_places_pauses_for_another_and_loses_no_token(start_router: StartRouter) -> None:
    keys = (ApiKey("greedy", "key-greedy"), ApiKey("other", "key-other"))
    router = start_router(prefill=0, limits=Limits(inflight_per_node=2), api_keys=keys)
    node = router.nodes["d0"]
    node.set(pause_at=3)
    with ThreadPoolExecutor(1) as pool:
        greedy = pool.submit(router.complete, key="key-greedy", n=2, max_tokens=8, seed=5)
        router.wait_for(
            lambda: router.server.services.dispatcher.held == 2 and len(node.running) == 2, "all places taken"
        )
        assert router.complete(key="key-other", max_tokens=2).status_code == 200
        node.wait_until(lambda: len(node.submits) == 4, "the paused one goes on")
        node.resume()
        answer = greedy.result(10)
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert texts == [router.expected("the fox", 8, seed=5 + index) for index in range(2)]
    router.wait_for(router.idle, "nothing is left")
