"""How each server is started, and when it is ready."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from benchmarks.lib.processes import Family, free_port
from tandem.base.errors import ConfigurationError, DeadlineExceeded, Unavailable
from tandem.base.flags import adder
from tandem.cluster.models.store import prepare_model
from tandem.loadgen.api import Api, RequestShape
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.load import LoadStream
from tandem.loadgen.workload import Session

READY_WITHIN_S = 600.0
TREE = Path(__file__).parents[2]
STOPPED_WITHIN_S = 30.0
_ASK_EVERY_S = 0.1
# The ports of the peers' proxy, which reports healthy even if its two servers are not, and of those two servers.
_PD_PORT, _PD_SERVERS = 8110, (8101, 8102)


@dataclass(frozen=True, slots=True)
class System:
    """`key` names the system in files, `title` in tables."""

    key: str
    title: str
    command: tuple[str, ...]
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    behind: tuple[int, ...] = ()  # further ports that must be healthy

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class RunningSystem:
    system: System
    ready_s: float  # from the command to the first healthy answer
    family: Family

    @property
    def model(self) -> str:
        """The name under which it serves the model."""
        try:
            return str(msgspec.json.decode(text_of(self.system.url, "/v1/models"))["data"][0]["id"])
        except (msgspec.MsgspecError, LookupError, TypeError) as error:
            raise Unavailable(f"{self.system.title} does not say what it serves: {error}") from error


TANDEM_PD = "tandem-1p1d"
TANDEM_AGGREGATED = "tandem-aggregated"
TANDEM_VLLM_PD = "tandem-vllm-1p1d"
VLLM_PD = "vllm-1p1d"
VLLM_AGGREGATED = "vllm-aggregated"


def tandem_systems(model: Path) -> list[System]:
    """The machine's cores are divided among the nodes, so both layouts have all of them."""
    return [
        tandem_system(TANDEM_PD, "Tandem 1P+1D", model, "--prefill", "1", "--decode", "1"),
        tandem_system(TANDEM_AGGREGATED, "Tandem aggregated", model, "--aggregated", "1"),
    ]


def tandem_system(key: str, title: str, model: Path, *flags: str) -> System:
    """Returns `tandem serve` from this source tree, in whatever folder the benchmark runs."""
    port = free_port()
    command = (sys.executable, "-m", "tandem.cluster.cli", "serve", "--model", str(model), "--port", str(port), *flags)
    return System(key, title, command, port, {"PYTHONPATH": str(TREE)})


def vllm_systems(model: Path, vllm: Path, peers: Path) -> list[System]:
    """`vllm` is its virtual environment, `peers` the folder with the scripts that start it."""
    for script in ("serve_vllm.sh", "serve_vllm_pd.sh"):
        if not (peers / script).is_file():
            raise ConfigurationError(f"--peers {peers} has no {script}")
    if not (vllm / "bin" / "vllm").exists():
        raise ConfigurationError(f"--vllm {vllm} is not a virtual environment with vllm in it")
    cores = os.cpu_count() or 1
    port = free_port()
    # The scripts end their servers after a time that is longer than any run needs.
    life = {"LIFE_S": "7200"}
    return [
        System(
            VLLM_AGGREGATED,
            "vLLM aggregated",
            ("bash", str(peers / "serve_vllm.sh"), str(vllm), str(model), str(port)),
            port,
            life | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}"},
        ),
        System(
            VLLM_PD,
            "vLLM 1P+1D",
            ("bash", str(peers / "serve_vllm_pd.sh"), str(vllm), str(model)),
            _PD_PORT,
            life,
            behind=_PD_SERVERS,
        ),
    ]


def tandem_with_vllm(model: Path, vllm: Path) -> System:
    """Tandem's nodes with vLLM as their engine, each on cores of its own, as `serve_vllm_pd.sh` starts vLLM's servers."""
    half = max(1, (os.cpu_count() or 2) // 2)
    cores = {"prefill": f"0-{half - 1}", "decode": f"{half}-{2 * half - 1}"}
    pools = [
        f"pools.{pool}.env={{PYTHONPATH: {TREE}, VLLM_CPU_OMP_THREADS_BIND: '{bound}'}}"
        for pool, bound in cores.items()
    ]
    return tandem_system(
        TANDEM_VLLM_PD, "Tandem 1P+1D, vLLM", model, "--prefill", "1", "--decode", "1", "--engine", "vllm",
        "--set", f"model.engine_python={vllm / 'bin' / 'python'}", "model.device=cpu",
        f"timeouts.start_s={READY_WITHIN_S:.0f}", *pools,
    )  # fmt: skip


def add_system_flags(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("--model", "NAME", "smollm2", "(%(default)s)")
    add("--vllm", "DIR", Path, "a virtual environment with vLLM: measure it, too")
    add("--peers", "FOLDER", Path, "the scripts that start vLLM")
    parser.add_argument("--systems", nargs="+", metavar="KEY", help="only these (all that there are)")


def model_folder(name: str) -> Path:
    return Path(prepare_model(name, lambda what, share: None).path)


def asked_systems(options: argparse.Namespace, model: Path) -> list[System]:
    systems = tandem_systems(model)
    if options.vllm is not None:
        if options.peers is None:
            raise ConfigurationError("--vllm needs --peers FOLDER: the scripts that start it")
        vllm = options.vllm.resolve()
        systems += [*vllm_systems(model, vllm, options.peers.resolve()), tandem_with_vllm(model, vllm)]
    if options.systems is None:
        return systems
    unknown = set(options.systems) - {system.key for system in systems}
    if unknown:
        known = ", ".join(system.key for system in systems)
        raise ConfigurationError(f"--systems {' '.join(sorted(unknown))}: there are only {known}")
    return [system for system in systems if system.key in options.systems]


@contextmanager
def running(system: System, folder: Path) -> Iterator[RunningSystem]:
    """While it is entered the system answers; after it nothing of the system is left."""
    began = time.monotonic()
    family = Family(system.command, system.environment, folder)
    try:
        _wait_until_healthy(system, family, began + READY_WITHIN_S)
        ready_s = time.monotonic() - began
        yield RunningSystem(system, ready_s, family)
    finally:
        family.stop(STOPPED_WITHIN_S)


def _wait_until_healthy(system: System, family: Family, deadline: float) -> None:
    with httpx.Client(timeout=5.0, trust_env=False) as http:
        for port in (*system.behind, system.port):
            while not _is_healthy(http, port):
                status = family.failed()
                if status is not None:
                    raise Unavailable(f"{system.title} ended with status {status}:\n{family.tail()}")
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"{system.title} is not healthy after {READY_WITHIN_S:.0f} s:\n{family.tail()}"
                    )
                time.sleep(_ASK_EVERY_S)


def check_alive(started: RunningSystem) -> None:
    """Raises Unavailable if the system no longer answers: its measurements are then not its speed."""
    system = started.system
    with httpx.Client(timeout=30.0, trust_env=False) as http:
        for port in (*system.behind, system.port):
            if not _is_healthy(http, port):
                raise Unavailable(f"{system.title} died while it was examined:\n{started.family.tail()}")


def _is_healthy(http: httpx.Client, port: int) -> bool:
    try:
        return http.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:  # no server listens there yet
        return False


def text_of(url: str, path: str) -> str:
    try:
        return httpx.get(f"{url}{path}", timeout=30.0, trust_env=False).raise_for_status().text
    except httpx.HTTPError as error:
        raise Unavailable(f"{url}{path} is not shown: {error}") from error


async def played(
    url: str,
    shape: RequestShape,
    sessions: Sequence[Session],
    *,
    arrivals: Sequence[float] | None = None,
    users: int | None = None,
) -> LoadStream:
    """Sends each session at its time, or as soon as one of the users is free. Returns when all have ended."""
    async with HttpClient(Address.of_url(url)) as http:
        load = LoadStream("load", Api(http, shape), sessions, arrivals=arrivals, concurrency=users)
        await load.run()
    return load
