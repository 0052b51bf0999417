"""A machine dies and the stream goes on: no token is repeated or missing, and the text is the same as without the failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import KVLoadFailed, WireError
from tandem.router.config import Heartbeat, Timeouts
from tandem.wire.nodes import Role
from tandem.wire.requests import Submit, TransferRole
from tandem.wire.sampling import FinishReason
from tests.router.conftest import RunningRouter, StartRouter, error_of
from tests.router.fake_node import FakeNode

COUNT = 12
BLOCKED = {"running": 0, "waiting": 1, "free_blocks": 4, "quarantined_blocks": 60}


def submitted(node: FakeNode, count: int = 1) -> None:
    node.wait_until(lambda: len(node.submits) >= count, f"{count} requests submitted")


def serving(router: RunningRouter) -> FakeNode:
    """The decode node of the one running request."""
    nodes = [node for node in router.nodes.values() if node.role is Role.DECODE and node.submits]
    return max(nodes, key=lambda node: len(node.running))


def other(router: RunningRouter, node: FakeNode) -> FakeNode:
    (found,) = (n for n in router.nodes.values() if n.role is node.role and n is not node)
    return found


@contextmanager
def undisturbed(router: RunningRouter, after: int = 0, **fields: Any) -> Iterator[None]:
    """A stream whose text is right, whatever the block does when so many of its tokens have come. Until then decode nodes pause there."""
    if after:
        pause(router, after)
    with router.stream(max_tokens=COUNT, seed=9, **fields) as events:
        text = events.text(count=after) if after else ""
        yield
        rest = events.rest()
    assert rest.pop() == "[DONE]"
    text += "".join(body["choices"][0]["text"] for body in rest)
    assert text == router.expected("the fox", COUNT, seed=9)


def moved_once(left: FakeNode, reached: FakeNode) -> None:
    # The client may have its last token before the other node has the word.
    left.wait_until(lambda: bool(left.cancels), "the request is cancelled there")
    assert len(left.cancels) == len(reached.submits) == 1


def pause(router: RunningRouter, at: int) -> None:
    for node in router.nodes.values():
        if node.role is Role.DECODE:
            node.set(pause_at=at)


DECIDES_SOON = Timeouts(token_idle=0.5)


def hand_off(router: RunningRouter) -> Submit:
    """The KV of the request arrives at the decode node, without a word from the prefill node."""
    decode = router.nodes["d0"]
    submitted(decode)
    submit = decode.submits[0]
    assert submit.transfer is not None
    router.board.hand_off(submit.transfer.transfer_id, router.board.rule(submit.prompt_token_ids, 9, 0))
    return submit


@pytest.mark.parametrize("how", ["leaves", "silent"])
def test_a_decode_node_lost_mid_stream_is_replaced_and_the_text_is_the_same(
    start_router: StartRouter, how: str
) -> None:
    router = start_router(decode=2)
    with undisturbed(router, after=5, **({"temperature": 0} if how == "leaves" else {})):
        lost = serving(router)
        successor = other(router, lost)
        successor.resume()
        (router.remove(lost.info.node_id) if how == "leaves" else lost).kill()
    moved = successor.submits[-1]
    assert moved.transfer is not None
    assert (moved.transfer.role, len(moved.output_token_ids)) == (TransferRole.CONSUME, 5)
    first, second = router.nodes["p0"].submits
    assert second.output_token_ids == moved.output_token_ids
    assert first.request_id != second.request_id
    assert first.transfer is not None
    assert second.transfer is not None
    assert first.transfer.transfer_id != second.transfer.transfer_id
    assert first.sampling == second.sampling
    assert router.metric("tandem_failovers_total", reason="node_lost") == 1
    router.wait_for(router.idle, "everything given back")


def test_with_no_other_prefill_node_the_decode_node_does_it_all(start_router: StartRouter) -> None:
    router = start_router()
    router.nodes["p0"].set(pause_at=0)
    with undisturbed(router):
        submitted(router.nodes["d0"])
        router.nodes["p0"].kill()
    assert router.nodes["d0"].submits[-1].transfer is None


def test_a_prefill_node_that_fails_or_is_lost_after_the_handover_is_not_missed(start_router: StartRouter) -> None:
    router = start_router()
    decode = router.nodes["d0"]
    for lost in (False, True):
        with undisturbed(router, after=4):
            if lost:
                router.remove("p0").kill()
            else:
                unneeded = WireError("kv_transfer_failed", "a lease that was not needed")
                router.nodes["p0"].report(decode.submits[0], unneeded)
            decode.resume()
    assert len(decode.submits) == 2


@pytest.mark.parametrize("code", ["kv_transfer_failed", "node_lost"])
def test_a_transfer_that_fails_is_recomputed_on_the_decode_node(start_router: StartRouter, code: str) -> None:
    router = start_router()
    decode = router.nodes["d0"]
    decode.set(error_at=(0, WireError(code, "the notice never came")), errors_left=1)
    with undisturbed(router):
        pass
    assert [submit.transfer is None for submit in decode.submits] == [False, True]


@pytest.mark.parametrize("shown", [0, 3])
def test_a_request_that_has_to_fail_without_its_kv_is_tried_nowhere_else(start_router: StartRouter, shown: int) -> None:
    router = start_router(prefill=2, decode=2)
    why = KVLoadFailed("the prompt's KV did not arrive: refused by the producer").to_wire()
    for name in ("d0", "d1"):
        router.nodes[name].set(error_at=(shown, why))
    body = router.complete(max_tokens=COUNT, seed=9)
    assert error_of(body, 502)["code"] == "kv_load_failed"
    assert "did not arrive" in body.json()["error"]["message"]
    assert sum(len(router.nodes[name].submits) for name in ("d0", "d1")) == 1
    assert router.metric("tandem_failovers_total", model_name="fake", reason="kv_load_failed") == 0


def test_logprobs_and_usage_go_on_without_a_gap(start_router: StartRouter, tokenizer: Tokenizer) -> None:
    router = start_router(decode=2)
    pause(router, 5)
    usage = {"include_usage": True}
    with router.stream(max_tokens=COUNT, seed=9, logprobs=0, stream_options=usage) as events:
        bodies: list[Any] = []
        while sum(len(body["choices"][0]["text"]) for body in bodies) < 5:
            bodies.append(json.loads(events.next_event() or ""))
        lost = serving(router)
        other(router, lost).resume()
        router.remove(lost.info.node_id).kill()
        bodies += [body for body in events.rest() if body != "[DONE]"]
    last = bodies.pop()
    found = [body["choices"][0]["logprobs"] for body in bodies]
    assert [at for logprobs in found if logprobs for at in logprobs["text_offset"]] == list(range(COUNT))
    assert last["usage"]["completion_tokens"] == COUNT, "each token is counted once"
    assert last["usage"]["prompt_tokens"] == len(tokenizer.encode("the fox", special=True))


def test_the_first_tokens_logprobs_are_worth_waiting_for(start_router: StartRouter) -> None:
    """The prefill node's report is lost and the decode node's has no logprobs: when the prefill node goes, another node
    computes them again."""
    router = start_router()
    router.nodes["p0"].set(hide_first_token=True)
    with router.stream(max_tokens=4, seed=9, logprobs=0) as events:
        decode = router.nodes["d0"]
        decode.wait_until(lambda: bool(decode.submits) and not decode.running, "the decode node is through")
        router.remove("p0").kill()
        assert events.text() == router.expected("the fox", 4, seed=9)


def test_without_logprobs_the_decode_nodes_report_is_enough(start_router: StartRouter) -> None:
    router = start_router()
    router.nodes["p0"].set(hide_first_token=True)
    with undisturbed(router):
        pass


def test_a_first_token_that_comes_late_and_differs_is_counted_and_nothing_more(start_router: StartRouter) -> None:
    """The transfer failed, so both nodes computed the first token; the decode node's was shown."""
    router = start_router()
    prefill, decode = router.nodes["p0"], router.nodes["d0"]
    prefill.set(pause_at=0)
    decode.set(pause_at=6)
    with undisturbed(router):
        submit = hand_off(router)
        router.wait_for(lambda: router.metric("tandem_time_to_first_token_seconds_count") == 1, "it is shown")
        prefill.say(submit, 0, [99], FinishReason.HANDOFF)
        router.wait_for(lambda: router.metric("tandem_token_mismatches_total") == 1, "counted")
        decode.resume()
    assert len(decode.submits) == 1


def test_a_decode_node_that_began_from_another_first_token_goes_on_from_the_one_that_was_shown(
    start_router: StartRouter,
) -> None:
    router = start_router()
    router.nodes["p0"].set(report_first_token_as=80)
    decode = router.nodes["d0"]
    decode.set(pause_at=0)
    with router.stream(max_tokens=COUNT, seed=9) as events:
        text = events.text(count=1)
        decode.resume()
        text += events.text()
    assert decode.submits[1].output_token_ids == [80]
    assert text[1:] == router.expected("the fox", COUNT, seed=9)[1:]
    assert router.metric("tandem_token_mismatches_total") == 1


def test_a_prefill_node_that_was_told_to_stop_ends_nothing_and_is_freed(start_router: StartRouter) -> None:
    """The decode node has given the transfer up and computes the prompt itself; the prefill node reports that it will send no token."""
    router = start_router()
    prefill, decode = router.nodes["p0"], router.nodes["d0"]
    for says_so in (True, False):
        prefill.set(pause_at=0)
        with undisturbed(router):
            if says_so:
                submitted(decode)
                prefill.say(decode.submits[0], 0, [], FinishReason.ABORT)
            request_id = hand_off(router).request_id
        assert len(decode.submits) == 1
        if not says_so:
            prefill.wait_until(lambda name=request_id: name in prefill.cancels, "not computed for nothing")  # type: ignore[misc]
        router.as_new()


def test_nodes_that_never_agree_end_a_stream_with_an_error_and_not_with_another_answers_rest(
    start_router: StartRouter,
) -> None:
    router = start_router(max_failovers=0)
    router.nodes["p0"].set(report_first_token_as=80)
    decode = router.nodes["d0"]
    decode.set(pause_at=0)
    with router.stream(max_tokens=COUNT, seed=9) as events:
        assert len(events.text(count=1)) == 1
        decode.resume()
        bodies = events.rest()
    assert [body["error"]["code"] for body in bodies] == ["tokens_differ"]
    assert router.metric("tandem_token_mismatches_total") == 1


@pytest.mark.parametrize(
    ("error", "status", "submits"),
    [
        ({"error_at": (3, WireError("node_lost", "gone"))}, 502, 3),
        ({"refuse": WireError("context_length_exceeded", "too long")}, 400, 1),
    ],
    ids=["so many times", "where no one can help, not at all"],
)
def test_only_so_many_failovers(start_router: StartRouter, error: dict[str, Any], status: int, submits: int) -> None:
    router = start_router(prefill=0, decode=2, max_failovers=2)
    router.set(**error)
    answer = router.complete(max_tokens=COUNT)
    assert error_of(answer, status)["code"] == (error.get("refuse") or error["error_at"][1]).code
    assert sum(len(node.submits) for node in router.nodes.values()) == submits


def test_a_node_that_breaks_is_left_and_a_request_that_breaks_nodes_gets_two(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=3)
    router.set(error_at=(3, WireError("internal_error", "the kernel is not for this")), errors_left=1)
    assert router.complete(max_tokens=COUNT).status_code == 500
    assert sum(len(node.submits) for node in router.nodes.values()) == 2
    with undisturbed(router):
        pass


def test_a_full_node_is_passed_over_and_when_all_are_full_it_is_said(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=2)
    full = WireError("overloaded", "no blocks")
    router.nodes["d0"].set(refuse=full)
    for _ in range(3):
        assert router.complete(max_tokens=2).status_code == 200
    router.nodes["d1"].set(refuse=full)
    answer = router.complete(max_tokens=2)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def test_a_stream_waits_for_the_only_node_to_come_back(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=1)
    with undisturbed(router, after=5):
        router.remove("d0").kill()
        router.wait_for(lambda: router.server.services.dispatcher.running == 1, "it waits")
        router.add("d0", Role.DECODE)  # the same name, a new epoch


def test_nobody_comes_back_is_an_error_in_time(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=1, timeouts=Timeouts(failover_wait=0.2))
    router.nodes["d0"].set(pause_at=5)
    with router.stream(max_tokens=COUNT) as events:
        events.text(count=5)
        router.remove("d0").kill()
        bodies = events.rest()
    assert bodies[-1]["error"]["code"] == "node_lost"
    assert "no other node was ready within 0.2 s" in bodies[-1]["error"]["message"]


def test_a_node_that_stops_giving_tokens_is_left(start_router: StartRouter) -> None:
    """It still answers pings: its engine is wedged, not its process."""
    router = start_router(prefill=0, decode=2, timeouts=DECIDES_SOON)
    with undisturbed(router, after=5):
        wedged = serving(router)
        wedged.set(wedged=True)
        other(router, wedged).resume()
    wedged.wait_until(lambda: wedged.submits[0].request_id in wedged.cancels, "told that it is over")


def test_a_node_that_was_only_stopped_is_told_what_is_over_and_serves_again(start_router: StartRouter) -> None:
    """After SIGSTOP and SIGCONT the node comes back with requests that are no longer wanted."""
    router = start_router(prefill=0, decode=2, heartbeat=Heartbeat(ping_interval=0.1, silence=1.5))
    with undisturbed(router, after=5):
        stopped = serving(router)
        other(router, stopped).resume()
        stopped.set(mute=True)
    stopped.set(mute=False)
    router.wait_ready(stopped.info.node_id)
    assert router.complete(max_tokens=3).status_code == 200


def test_a_bug_in_one_requests_handling_is_its_own_misfortune(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = start_router(prefill=0)
    router.nodes["d0"].set(pause_at=2)
    with router.stream(max_tokens=6, seed=1) as doomed, router.stream(max_tokens=6, seed=9) as healthy:
        doomed.text(count=2)
        text = healthy.text(count=2)
        lives = router.server.services.dispatcher.placement.lives.all()

        def broken(*_: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(next(life.ledger for life in lives if life.spec.facts.sampling.seed == 1), "accept", broken)
        router.nodes["d0"].resume()
        assert doomed.rest()[-1]["error"]["code"] == "internal_error"
        assert text + healthy.text() == router.expected("the fox", 6, seed=9)


def test_a_request_that_waits_in_a_healthy_nodes_line_is_left_there(start_router: StartRouter) -> None:
    """The decode node has no room for the request for several idle times, and says so when it is asked."""
    router = start_router(timeouts=DECIDES_SOON)
    decode = router.nodes["d0"]
    decode.set(pause_at=0)
    with undisturbed(router):
        decode.wait_until(lambda: decode.asks >= 3, "asked what it holds, again and again")
        decode.resume()
    assert len(decode.submits) == len(router.nodes["p0"].submits) == 1
    assert decode.cancels == []


@pytest.mark.parametrize("says", [BLOCKED, {**BLOCKED, "running": 1, "waiting": 0}], ids=["waits", "begins again"])
def test_a_request_leaves_a_node_whose_blocks_wait_for_a_silent_peer(
    start_router: StartRouter, says: dict[str, int]
) -> None:
    """However often it has moved: no node has failed it. The node would run it when the peer goes on, if ever, and another one has room
    now. A request that is alone there, and gets no further, may look as if it ran."""
    router = start_router(decode=2, timeouts=DECIDES_SOON, max_failovers=0)
    with undisturbed(router, after=3):
        blocked = serving(router)
        other(router, blocked).resume()
        blocked.wait_until(lambda: blocked.asks >= 2, "it is asked, and the request stays")
        blocked.set(status_fields=says)
    moved_once(blocked, other(router, blocked))


def test_a_request_without_room_anywhere_leaves_when_another_node_has_some(start_router: StartRouter) -> None:
    """It looks for itself, long before its node is asked again."""
    router = start_router(decode=2, timeouts=Timeouts(token_idle=4.0))
    with undisturbed(router, after=3):
        blocked = serving(router)
        free = other(router, blocked)
        blocked.set(status_fields=BLOCKED)
        free.set(status_fields={"running": 1, "free_blocks": 0})
        free.resume()
        blocked.wait_until(lambda: blocked.asks == 1, "it is asked")
        free.set(status_fields={})
    moved_once(blocked, free)
    assert blocked.asks == 1


def test_a_request_goes_back_to_a_node_that_was_lost_and_started_again(start_router: StartRouter) -> None:
    """What failed it is gone."""
    router = start_router(decode=2, timeouts=DECIDES_SOON, max_failovers=1)
    with undisturbed(router, after=3):
        lost = serving(router)
        blocked = other(router, lost)
        router.remove(lost.info.node_id).kill()
        submitted(blocked)
        again = router.add(lost.info.node_id, Role.DECODE)
        router.wait_ready(lost.info.node_id)
        blocked.set(status_fields=BLOCKED)
    moved_once(blocked, again)


def test_a_request_whose_last_token_a_prefill_node_can_give_does_not_wait_for_a_decode_node(
    start_router: StartRouter,
) -> None:
    router = start_router(timeouts=DECIDES_SOON)
    prefill, decode = router.nodes["p0"], router.nodes["d0"]
    decode.set(pause_at=0, status_fields=BLOCKED)
    with router.stream(max_tokens=2, seed=9) as events:
        assert events.text() == router.expected("the fox", 2, seed=9)
    assert [submit.transfer is None for submit in prefill.submits] == [False, True]


def test_a_request_that_its_node_lost_goes_on_elsewhere(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=1, timeouts=DECIDES_SOON)
    node = router.nodes["d0"]
    with undisturbed(router, after=3):
        node.forget(node.submits[0].request_id)
        submitted(node, 2)
        node.resume()
    assert node.submits[1].output_token_ids != []


def test_a_node_in_a_long_step_is_waited_for(start_router: StartRouter) -> None:
    """It cannot answer before the step is over, and its status says that it is in one."""
    router = start_router(prefill=0, decode=1, timeouts=DECIDES_SOON)
    node = router.nodes["d0"]
    with undisturbed(router, after=3):
        node.set(wedged=True, status_fields={"step_age_s": 5.0})
        node.wait_until(lambda: node.asks >= 3, "asked")
        node.set(wedged=False, status_fields={})
        node.resume()
    assert len(node.submits) == 1


def test_a_stream_outlives_a_successor_that_is_full_for_a_moment(start_router: StartRouter) -> None:
    router = start_router(prefill=0, decode=2)
    with undisturbed(router, after=5):
        lost = serving(router)
        successor = other(router, lost)
        successor.set(refuse=WireError("overloaded", "no blocks"), pause_at=None)
        router.remove(lost.info.node_id).kill()
        submitted(successor)
        successor.set(refuse=None)
