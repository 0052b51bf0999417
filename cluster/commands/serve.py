"""`tandem serve`: starts a deployment and follows it to its end, or with --detach until it answers."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO, TypeVar, cast

from rich.console import Console
from rich.markup import escape

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.base.own_thread import in_own_thread
from tandem.cluster.commands.engines import check_engine
from tandem.cluster.commands.output import LibraryOutput, UnfailingOutput
from tandem.cluster.commands.preflight import check_before_attach, check_before_start
from tandem.cluster.commands.progress import Display
from tandem.cluster.commands.ready_lines import ready_lines, ready_values, timing_lines
from tandem.cluster.commands.running import forget_serving, record_serving
from tandem.cluster.config import TandemConfig
from tandem.cluster.models.catalogue import PACKAGED
from tandem.cluster.models.resolved import with_model
from tandem.cluster.models.store import Model, local_model, name_to_serve, prepare_model
from tandem.cluster.on_ray.runtime import connect_to_ray, own_address, ray_version, start_ray, stop_ray
from tandem.cluster.orders import ViewOrder
from tandem.cluster.pools.placement import computes_on_cpu, this_machine
from tandem.cluster.pools.room import lacking
from tandem.cluster.saving import as_json
from tandem.cluster.tasks import first_of, has_ended
from tandem.engine.config import OWN_ENGINE
from tandem.kernels.build import is_ready, library_path
from tandem.kernels.compiler import BuildFailed

if TYPE_CHECKING:
    from tandem.cluster.commands.following import Follower
    from tandem.cluster.on_ray.remote_controller import RemoteController

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # from a service manager, and from a terminal that was closed


@dataclass(frozen=True, slots=True)
class ServeTarget:
    address: str | None = None  # of a Ray cluster; None: start a Ray of our own
    detach: bool = False  # the deployment outlives the command
    # Print one JSON document on standard output when it answers; the rest goes to standard error
    as_json: bool = False
    timings: bool = False  # say what the start waited for, too


def serve(config: TandemConfig, where: ServeTarget) -> int:
    """Returns the exit status. Raises TandemError for what an operator can correct."""
    began = time.monotonic()
    kernels: Future[None] | None = None
    if where.address is None:
        if where.detach:
            raise ConfigurationError(
                "--detach needs --address: a Ray that `tandem serve` starts itself ends with the command"
            )
        check_before_start(config, this_machine())
    else:
        check_before_attach(config)
    # Taken before standard output is redirected to the log.
    told = sys.stderr if where.as_json else sys.stdout
    console = Console(file=cast("TextIO", UnfailingOutput(told)), highlight=False)
    answer = UnfailingOutput(sys.stdout)
    display = Display(console)
    # Until the event loop handles signals, they raise as Ctrl-C does.
    for number in _ENDINGS:
        signal.signal(number, _terminated)
    # A process of Ray, such as a task in which a program serves a model, blocks SIGINT, and so would what it starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, *_ENDINGS))
    with redirect_stdout(LibraryOutput("ray")):
        try:
            display.start()
            if where.address is None:
                _show_engine(config, display)
                with display.step("ray", "starting", f"running, version {ray_version()}"):
                    logs = str(start_ray(lambda: in_own_thread("imports", _import_what_follows)))
                # After Ray, whose processes have a limited time to start: a model that is converted takes the cores for half a minute.
                model = config.model
                named = f"{model.path}@{model.revision}" if model.revision else model.path
                found = _in_background(named, display)
                if config.model.engine == OWN_ENGINE and computes_on_cpu(config, this_machine()):
                    kernels = in_own_thread("compile-kernels", lambda: _compile_kernels(display))
            else:
                found = _as_every_machine_finds_it(config.model.path)
                with display.step("ray", f"joining {where.address}", f"joined {where.address}"):
                    connect_to_ray(where.address)
                logs = "/tmp/ray/session_latest/logs on each machine"
            return asyncio.run(_Serving(config, where, display, answer, logs, began).run(found, kernels))
        except (KeyboardInterrupt, SystemExit, _Interrupted):  # a SIGTERM while Ray starts becomes SystemExit
            display.stop()
            console.print("stopped before it was ready")
            return 130
        finally:
            display.stop()
            # Ignored from here on: a second signal would only leave processes running.
            for number in (signal.SIGINT, *_ENDINGS):
                signal.signal(number, signal.SIG_IGN)
            stop_ray()


def _show_engine(config: TandemConfig, display: Display) -> None:
    """Raises SettingsError if the engine that the nodes are to run is not there."""
    if config.model.engine == OWN_ENGINE:
        return
    display.progress("engine", f"looking for {config.model.engine}", 0.0)
    if (engine := check_engine(config)) is not None:
        display.ready("engine", f"{engine.name} {engine.version} of {engine.python}")


class _Interrupted(BaseException):
    """A signal came before everything had started. A BaseException, so that handlers of errors let it pass."""


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise _Interrupted


def _in_background(name: str, display: Display) -> Future[Model]:
    """Looks for the model, and fetches it if needed."""

    def prepare() -> Model:
        with display.step("model", f"looking for {name}", name) as report:
            return prepare_model(name, report)

    return in_own_thread("prepare-model", prepare)


def _compile_kernels(display: Display) -> None:
    """Compiles the native library if this machine has none, before several nodes wait for it."""
    try:
        if not is_ready():
            with display.step("kernels", "compiling the native library", "compiled") as report:
                library_path(report)
    except BuildFailed as error:
        display.trouble("kernels", f"nodes compute without the native library, several times slower: {error}")


def _import_what_follows() -> None:
    """Half a second's work that would otherwise be done when Ray has started, which is a second's wait."""
    import tandem.cluster.commands.following
    import tandem.cluster.on_ray.remote_controller  # noqa: F401


def _as_every_machine_finds_it(name: str) -> Future[Model]:
    """A folder on this machine is taken as shared by all machines; a name is looked up by each machine itself."""
    local = None if name in PACKAGED else local_model(name)
    path = name if local is None else str(local)
    result: Future[Model] = Future()
    result.set_result(Model(path, name_to_serve(name)))
    return result


class _Interrupts:
    """`first` is set by the first signal, which asks to finish; `second` by another one, which asks to end at once. Two signals within half
    a second count as one: make and timeout send a signal both to us and to our whole process group."""

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


@dataclass(eq=False)
class _Serving:
    _config: TandemConfig
    _where: ServeTarget
    _display: Display
    _answer: UnfailingOutput
    _logs: str
    _began: float

    async def run(self, found: Future[Model], kernels: Future[None] | None) -> int:
        self._interrupts = _Interrupts()  # they need the loop
        try:
            model = await self._unless_stopped(asyncio.wrap_future(found))
            if kernels is not None:
                await self._unless_stopped(asyncio.wrap_future(kernels))
            return await self._on_ray(with_model(self._config, model))
        finally:
            forget_serving()
            # Before the loop ends, so that Ray can still answer calls that are pending.
            stop_ray()

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`. Raises _Interrupted when a signal comes first."""
        done, _ = await first_of(work, self._interrupts.first.wait())
        if not has_ended(done):
            raise _Interrupted
        return done.result()

    async def _on_ray(self, config: TandemConfig) -> int:
        # Imported after Ray has started: the imports take a while, and other commands do not need them.
        from tandem.cluster.commands.following import Follower
        from tandem.cluster.on_ray.hosts import offer_of, ray_nodes
        from tandem.cluster.on_ray.remote_controller import create_controller, find_controller

        own_ray = self._where.address is None
        if not own_ray:
            for sentence in lacking(config, [offer_of(node) for node in ray_nodes() if node["Alive"]]):
                self._display.trouble("machines", sentence)
        controller = None if own_ray else find_controller(config.name)
        is_new = controller is None
        if controller is None:
            self._display.progress("controller", "starting its process", 0.0)
            controller = await create_controller(config, own_ray=own_ray, detach=self._where.detach)
        elif not self._where.detach:
            raise Unavailable(
                f"a deployment with the name {config.name} runs on this Ray cluster already: look at it with `tandem status`, change its "
                "pools with `tandem scale`, give it this configuration with --detach, end it with `tandem down`, or start another "
                "deployment beside it with --name and --port"
            )
        address = own_address()
        if not self._where.detach:  # it runs as long as this command
            record_serving(address, config.name, config.router.model_name)
        follower = Follower(controller, self._display)
        finished = False
        try:
            if not is_new:
                await self._reconfigure(controller, config)
            account = await self._unless_stopped(follower.until_serving())
            view = await controller.ask(ViewOrder())
            if not self._where.detach:
                record_serving(address, config.name, account.model, account.url)
            self._display.stop()
            seconds = time.monotonic() - self._began
            if self._where.as_json:
                values = ready_values(account, view, self._logs, seconds)
                if self._where.timings:
                    values["timings"] = self._display.steps()
                self._answer.write(as_json(values).decode())
                self._answer.flush()
            lines = ready_lines(account, view, config, self._logs, seconds, detached=self._where.detach)
            if self._where.timings:
                lines += [*timing_lines(self._display.steps()), ""]
            # Not wrapped to the terminal's width: operators copy these lines.
            self._display.console.print("\n".join(lines), soft_wrap=True)
            if self._where.detach:
                finished = True
                return 0
            return await self._until_stopped(controller, follower)
        finally:
            # A deployment that this command did not start, or that was detached, is not ended by it.
            if is_new and not finished:
                await controller.end(2 * config.timeouts.stop_s, "the command that started it has ended it")

    async def _reconfigure(self, controller: RemoteController, config: TandemConfig) -> None:
        change = await controller.configure(config)
        for line in change.applied:
            self._display.console.print(escape(line))
        for line in change.refused:
            self._display.console.print(f"[yellow]![/] {escape(line)}")

    async def _until_stopped(self, controller: RemoteController, follower: Follower) -> int:
        console = self._display.console
        over, _ = await first_of(follower.until_over(), self._interrupts.first.wait())
        if has_ended(over):
            console.print(f"it was ended: {escape(over.result().why)}")
            return 0
        limit = self._config.timeouts.nodes.drain_s
        console.print(f"\nfinishing what is running (up to {limit:.0f} s; once more to end at once)")
        drain, _ = await first_of(controller.drain(limit), self._interrupts.second.wait())
        finished = has_ended(drain) and _drained(drain)
        console.print(
            "everything was finished" if finished else "ended before everything was finished: requests were lost"
        )
        return 0 if finished else 1


def _drained(drain: asyncio.Future[bool]) -> bool:
    try:
        return drain.result()
    except TandemError as error:
        logger.warning("draining: %s", error)
        return False
