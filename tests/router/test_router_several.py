"""Several routers use the same nodes, and no router holds state that another needs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.router.conftest import RunningRouter, StartRouter


def pair(start_router: StartRouter) -> tuple[RunningRouter, RunningRouter]:
    """Two routers, two prefill nodes and two decode nodes."""
    first = start_router(prefill=2, decode=2)
    return first, start_router(prefill=0, decode=0).join(first)


def test_both_are_asked_at_once_and_nothing_is_mixed_up(start_router: StartRouter) -> None:
    routers = pair(start_router)

    def ask(index: int) -> tuple[str, str]:
        router = routers[index % 2]
        answer = router.complete(prompt=f"number {index}", max_tokens=10, seed=index)
        return answer.json()["choices"][0]["text"], router.expected(f"number {index}", 10, seed=index)

    with ThreadPoolExecutor(8) as pool:
        for text, expected in pool.map(ask, range(40)):
            assert text == expected
    for router in routers:
        router.wait_for(router.idle, "nothing is left behind")
        assert router.metric("tandem_foreign_chunks_total") == 0
        # A prefill node's one word may come when the decode node has said everything. Another router's would be many.
        assert router.metric("tandem_stray_chunks_total") <= 20


def test_one_dies_in_the_middle_and_the_others_streams_go_on(start_router: StartRouter) -> None:
    first, second = pair(start_router)
    for node in first.nodes.values():
        node.set(pause_at=3)
    with first.stream(max_tokens=8, seed=1) as lost, second.stream(max_tokens=8, seed=2) as kept:
        assert len(lost.text(count=3)) == len(kept.text(count=3)) == 3
        first.freeze()
        for node in first.nodes.values():
            node.resume()
        assert second.expected("the fox", 8, seed=2).endswith(rest := kept.text())
        assert len(rest) == 5
        assert second.complete(max_tokens=8, seed=1).json()["choices"][0]["text"] == second.expected(
            "the fox", 8, seed=1
        )
    second.wait_for(second.idle, "nothing is left behind")
    first.go_on()  # so that it can be closed
