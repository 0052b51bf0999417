"""The methods of a router's process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import httpx
import msgspec
import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.router import hosting, server
from tandem.router.config import RouterConfig
from tandem.router.hosting import RouterHost
from tandem.router.page_state import PageState
from tandem.wire.forecasts import FigureScore, ForecastScore, MeasuredRequest
from tandem.wire.nodes import RouterInfo, RouterQueue

PATIENCE_S = 10.0


def encoded(folder: str, port: int = 0) -> bytes:
    return msgspec.msgpack.encode(RouterConfig(tokenizer_path=folder, model_name="fake", port=port))


async def members(host: RouterHost) -> RouterQueue:
    return msgspec.msgpack.decode(await host.set_members(msgspec.msgpack.encode([])), type=RouterQueue)


async def test_a_controller_that_comes_back_finds_the_router_that_has_started(model_folder: str) -> None:
    host = RouterHost(encoded(model_folder))
    url = await host.start()
    assert await host.start() == url
    assert host.configuration() == encoded(model_folder)
    assert (await members(host)).queued == 0
    assert not await host.hold(0.001)
    held = asyncio.create_task(host.hold(PATIENCE_S))
    await host.stop()
    assert await held


async def test_a_router_shows_the_score_of_forecasts_that_it_is_told(model_folder: str) -> None:
    figures = [FigureScore("first token, p90", 7, 0.25, 9), FigureScore("first token, p90", 1, 0.5, 2, by_load=True)]
    score = ForecastScore(graded=9, figures=figures, said=["of the last 9 graded forecasts, 7 were inside"])
    host = RouterHost(encoded(model_folder))
    info = msgspec.msgpack.decode(await host.start(), type=RouterInfo)
    took = await host.follow_forecasts(msgspec.msgpack.encode(score), 60.0)
    assert msgspec.msgpack.decode(took, type=list[MeasuredRequest]) == []
    with httpx.Client(base_url=info.url, trust_env=False) as client:
        metrics = (await asyncio.to_thread(client.get, "/metrics")).text
        state = (await asyncio.to_thread(client.get, "/ui/state")).content
    page = msgspec.json.decode(state, type=PageState)
    figure, model = 'figure="first token, p90"', 'model_name="fake"'
    for by, inside, outside, error in (("order", 7.0, 2.0, 0.25), ("load", 1.0, 1.0, 0.5)):
        assert f'tandem_forecasts{{by="{by}",{figure},{model},outcome="inside"}} {inside}' in metrics
        assert f'tandem_forecasts{{by="{by}",{figure},{model},outcome="outside"}} {outside}' in metrics
        assert f'tandem_forecast_error_ratio{{by="{by}",{figure},{model}}} {error}' in metrics
    recalled = msgspec.json.decode(await host.recalled())
    assert (recalled["page"]["latest"], recalled["nodes"]) == ([], [])
    assert page.router.forecasts == score
    await host.stop()


async def test_a_router_looks_for_the_model_where_it_runs(model_folder: str) -> None:
    asked: list[str] = []

    def find(name: str, report: Callable[[str, float], None]) -> str:
        asked.append(name)
        return model_folder

    host = RouterHost(encoded("smollm2"), find)
    await host.start()
    await host.stop()
    assert asked == ["smollm2"]


async def test_a_router_waits_for_the_port_of_the_process_before_it(model_folder: str) -> None:
    """Ray takes five seconds to end a process that stands still, and says before that it has."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        host = RouterHost(encoded(model_folder, port), lambda name, report: name)
        starting = asyncio.create_task(host.start())
        _, said, _ = await host.progress_after(0, PATIENCE_S)
    assert said == f"waiting for port {port}, which another process has"
    info = msgspec.msgpack.decode(await starting, type=RouterInfo)
    assert info.url == f"http://127.0.0.1:{port}"
    await host.stop()


async def test_a_taken_port_is_said_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "PORT_S", 0.0)

    def find(name: str, report: Callable[[str, float], None]) -> str:
        pytest.fail("it was fetched")

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        host = RouterHost(encoded("smollm2", port), find)
        with pytest.raises(ConfigurationError, match=str(port)):
            await host.start()
        with pytest.raises(Unavailable, match="has not started"):
            await host.drain(1)
        await host.stop()


@pytest.mark.parametrize("succeeded", [True, False])
async def test_a_router_that_is_told_to_end_waits_for_its_successor_but_not_for_ever(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, succeeded: bool
) -> None:
    host = RouterHost(encoded(model_folder))
    await host.start()
    if not succeeded:
        monkeypatch.setattr(server, "SUCCESSOR_S", 0.1)
    ending = asyncio.create_task(host.finish())
    if succeeded:
        await asyncio.sleep(0)
        queue = await members(host)
        assert (queue.is_ending, queue.accepts) == (True, True), "clients still find it"
        assert await host.leave(PATIENCE_S), "another one has its socket"
    async with asyncio.timeout(PATIENCE_S):
        await ending
    assert await host.hold(PATIENCE_S), "it has stopped"
