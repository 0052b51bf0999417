"""`tandem serve`: from the command to the last process ended."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from cluster.clock import cancel
from cluster.config import TandemConfig
from cluster.deployment import Deployment, with_model
from cluster.describe import counted
from cluster.model_store import Model, prepare_model
from cluster.output import OtherPeoplesOutput
from cluster.placement import Machine, this_machine
from cluster.preflight import check_before_start
from cluster.progress import Display
from cluster.ray_runtime import ray_version, start_ray, stop_ray
from wire.nodes import Role

logger = logging.getLogger(__name__)

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # a supervisor's, and a terminal that was closed


def serve(config: TandemConfig) -> int:
    """The exit status. Raises TandemError for what an operator can mend."""
    began = time.monotonic()
    machine = this_machine()
    check_before_start(config, machine)
    console = Console(file=sys.stdout, highlight=False)  # before other people's output is sent elsewhere
    display = Display(console)
    # Until the event loop takes over, these unwind as a Ctrl-C does.
    for number in _ENDINGS:
        signal.signal(number, _terminated)
    with redirect_stdout(OtherPeoplesOutput("ray")):
        try:
            display.start()
            model = _in_background(config.model.path, display)
            with display.step("ray", "starting", f"running, version {ray_version()}"):
                logs = start_ray()
            return asyncio.run(_serve(config, machine, model, display, logs, began))
        except (
            KeyboardInterrupt,
            SystemExit,
            _Interrupted,
        ):  # Ray turns a SIGTERM during its start into an exit
            display.stop()
            console.print("stopped before it was ready")
            return 130
        finally:
            display.stop()
            # Whoever is impatient now only leaves processes behind.
            for number in (signal.SIGINT, *_ENDINGS):
                signal.signal(number, signal.SIG_IGN)
            stop_ray()


class _Interrupted(Exception):
    """A signal came before everything had started."""


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise _Interrupted


def _in_background(name: str, display: Display) -> Future[Model]:
    """The model is looked for, and fetched where needed, while Ray starts. Not a pool: its threads are joined at
    exit, and a download must not keep us."""
    result: Future[Model] = Future()

    def work() -> None:
        try:
            with display.step("model", f"looking for {name}", name) as report:
                model = prepare_model(name, report)
            result.set_result(model)
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name="prepare-model", daemon=True).start()
    return result


class _Interrupts:
    """The first signal asks to finish, the second to end at once. Two in the same moment are one that came by two
    ways: make and timeout pass a signal on to us and to our whole group."""

    _SAME_MOMENT_S = 0.5

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._first_at = 0.0
        for number in (signal.SIGINT, *_ENDINGS):
            self._loop.add_signal_handler(number, self._arrived)

    def _arrived(self) -> None:
        now = self._loop.time()
        if not self.first.is_set():
            self._first_at = now
            self.first.set()
        elif now - self._first_at > self._SAME_MOMENT_S:
            self.second.set()


async def _serve(
    config: TandemConfig, machine: Machine, found: Future[Model], display: Display, logs: Path, began: float
) -> int:
    interrupts = _Interrupts()
    stop = asyncio.ensure_future(interrupts.first.wait())
    try:
        model = asyncio.wrap_future(found)
        either: list[asyncio.Future[Any]] = [model, stop]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not model.done():
            raise _Interrupted
        # Imported here, when Ray is running already: it takes a while, and not every command needs it.
        from cluster.ray_launcher import RayLauncher

        launcher = RayLauncher(config.timeouts.stop_s)
        deployment = Deployment(with_model(config, model.result()), machine, launcher, display)
        try:
            start = asyncio.ensure_future(deployment.start())
            await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                await cancel(start)
                raise _Interrupted
            start.result()
            _say_ready(deployment, display, logs, time.monotonic() - began)
            return await _until_stopped(deployment, display.console, interrupts)
        finally:
            await deployment.stop()
    finally:
        await cancel(stop)
        # While there is still a loop: what Ray owes us an answer for, it answers now.
        stop_ray()


async def _until_stopped(deployment: Deployment, console: Console, interrupts: _Interrupts) -> int:
    failed = asyncio.ensure_future(deployment.controller.failed())
    stop = asyncio.ensure_future(interrupts.first.wait())
    await asyncio.wait({failed, stop}, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        await cancel(stop)
        console.print(f"[red]✗[/] {escape(failed.result())}")
        return 1
    await cancel(failed)
    limit = deployment.config.timeouts.nodes.drain_s
    console.print(f"\nfinishing what is running (up to {limit:.0f} s; once more to end at once)")
    drain = asyncio.ensure_future(deployment.drain())
    now = asyncio.ensure_future(interrupts.second.wait())
    await asyncio.wait({drain, now}, return_when=asyncio.FIRST_COMPLETED)
    finished = drain.done() and drain.result()
    await cancel(drain)
    await cancel(now)
    console.print("everything was finished" if finished else "ended before everything was finished")
    return 0


def _say_ready(deployment: Deployment, display: Display, logs: Path, seconds: float) -> None:
    display.stop()
    config, url, name = deployment.config, deployment.url, deployment.model_name
    counts = {role: config.pools.of(role).first_size for role in Role}
    pools = ", ".join(counted(count, f"{role.value} node") for role, count in counts.items() if count)
    lines = (
        "",
        f"[bold green]ready[/] after {seconds:.1f} s: {escape(name)} on {pools}",
        f"API:     {url}/v1",
        f"try it:  {escape(curl_line(url, name, with_key=bool(config.router.api_keys)))}",
        f"or:      tandem chat --url {url}",
        f"logs:    {logs}",
        "stop:    Ctrl-C",
        "",
    )
    # Lines as they are, however narrow the terminal: they are there to be copied.
    display.console.print("\n".join(lines), soft_wrap=True)


def curl_line(url: str, model: str, *, with_key: bool) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    # Without chance, so that a small model's first answer is its best one.
    body = json.dumps({"model": model, "messages": [question], "temperature": 0})
    quoted = body.replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $TANDEM_API_KEY"' if with_key else ""
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"
