"""Starts a Ray of our own on this machine, which logs nothing to the terminal and ends with this process, or joins a running one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.metadata
import ipaddress
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.base.errors import ConfigurationError, InternalError, Unavailable
from tandem.base.own_thread import in_own_thread
from tandem.cluster.config import DEFAULT_NAME
from tandem.cluster.describe import busy
from tandem.cluster.on_ray.auth_token import check_token, keep_private, make_private_token
from tandem.cluster.on_ray.lean import fewer_processes
from tandem.cluster.on_ray.private_folder import private_folder
from tandem.cluster.pools.placement import this_machine

logger = logging.getLogger(__name__)

NAMESPACE = "tandem"  # Ray's namespace of the deployment with the default name
CONTROLLER = "controller"  # the name of the controller's actor, in each deployment's namespace
# Ray gives this resource to the head of every cluster, also to a replaced one: an actor that asks for a little of it runs there.
HEAD_ONLY = {"node:__internal_head__": 0.001}
AUTO = "auto"  # joins the cluster that this machine is part of

# Tokens and blocks never travel through Ray; its object store carries configurations and status.
OBJECT_STORE_BYTES = 80 << 20

_NONE_HERE = "Tandem does not run on this machine: start it with `tandem serve`, or name the head of a Ray cluster with --address HOST:6379"
_REACH_S = 3.0
JOIN_S = 60.0  # a busy head takes seconds
_LEAVE_S = 10.0
_LOOK_AGAIN_S = 0.2
_END_S = 5.0  # for the processes that a raylet started to end by themselves
# The first bytes of each side of an HTTP/2 connection. Ray's control store speaks HTTP/2; a router and most other servers do not.
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER, _TYPE, _SETTINGS = 9, 3, 4

_ENVIRONMENT = {
    # Ray listens on every interface, so callers must authenticate with a token.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A node that asks Ray for no GPU must still see them: Tandem's placement chooses the device.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default is 15, which would let every other process on the machine run before a node.
    "RAY_worker_niceness": "0",
}


# With "0" Ray takes 127.0.0.1 as this machine's address and all its processes listen there only, as it does by default on Windows and
# macOS. Ray reads the variable when it is imported.
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class _ForkGroups:
    """While entered, puts forked processes into process groups of their own. A signal to our whole group, as `timeout` and
    service managers send it, would otherwise end Ray before we stop it, and the processes that need Ray would hang."""

    def __init__(self) -> None:
        self._entered = False
        os.register_at_fork(after_in_child=self._in_child)

    def __enter__(self) -> None:
        self._entered = True

    def __exit__(self, *_: object) -> None:
        self._entered = False

    def _in_child(self) -> None:
        if self._entered:
            os.setpgid(0, 0)


def namespace_of(name: str) -> str:
    """Returns the Ray namespace that holds the actors and the kept state of the deployment with this name."""
    return NAMESPACE if name == DEFAULT_NAME else f"{NAMESPACE}-{name}"


def deployment_in(namespace: str) -> str | None:
    """Returns the name of the deployment whose namespace this is; None if it is not one of Tandem's."""
    if namespace == NAMESPACE:
        return DEFAULT_NAME
    return namespace.removeprefix(f"{NAMESPACE}-") if namespace.startswith(f"{NAMESPACE}-") else None


_fork_groups = _ForkGroups()  # one for the process: a fork hook cannot be unregistered


def start_ray(when_imported: Callable[[], object] = lambda: None) -> Path:
    """Starts a Ray of our own, whatever other Ray runs here. Returns the folder of its logs. Raises Unavailable. `when_imported` is
    called before Ray's processes start.

    Call it from the main thread: Ray's processes end when the thread that started them does.
    """
    _stay_on_loopback()
    ray = import_ray()
    when_imported()
    try:
        make_private_token()
    except (OSError, RuntimeError) as error:
        raise Unavailable(
            f"Ray's token cannot be kept in ~/.ray: {error}. Set HOME to a folder that can be written, or RAY_AUTH_TOKEN to a token"
        ) from error
    try:
        folder = private_folder()
    except OSError as error:
        raise Unavailable(
            f"there is no place for Ray's sockets and logs: {error}. Make it, or set TMPDIR to a folder that can be written, with a short path"
        ) from error

    try:
        with _fork_groups, fewer_processes():
            context = ray.init(
                address="local",  # ignores RAY_ADDRESS
                _temp_dir=str(folder),
                namespace=NAMESPACE,
                job_config=_job_config(),
                num_cpus=0,  # so that Ray starts no idle workers; Tandem's placement counts the cores
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level="ERROR",
            )
    except Exception as error:  # Ray raises bare exceptions, too, for example when it starts too slowly
        machine = this_machine()
        why = busy(os.getloadavg()[0], machine.quota or len(machine.cores))
        advice = f"{why}: try again when it is quieter" if why else "`tandem doctor` looks for the reason"
        said = " ".join(str(error).split()).rstrip(".")
        raise Unavailable(
            f"Ray did not start: {said}; {advice}. Ray's logs are in {folder}/session_latest/logs"
        ) from error
    return Path(context.address_info["session_dir"]) / "logs"


def _stay_on_loopback() -> None:
    if "ray" not in sys.modules:
        os.environ.setdefault(_LOOPBACK_ONLY, "0")


def listens_on_loopback_only(address: str) -> bool:
    """Returns whether the Ray at this address is one that `start_ray` started. The head of a cluster, too, can be named by its
    loopback address, but it also answers at its other one."""
    host, _, port = address.rpartition(":")
    try:
        if not ipaddress.ip_address(host.strip("[]")).is_loopback:
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            asked.connect(("192.0.2.1", 9))  # sends nothing: the system chooses the local address for it
            beyond = asked.getsockname()[0]
        socket.create_connection((beyond, int(port)), _REACH_S).close()
    except ValueError:
        return False
    except OSError:
        return True
    return bool(ipaddress.ip_address(beyond).is_loopback)


def _job_config() -> Any:
    """Ray puts the command's current folder first on every worker's import path, unless the job has a working_dir. A `tandem.py`
    or `yaml.py` there would then be imported in place of the package, so this job claims to have one."""
    from ray.job_config import JobConfig

    class FolderlessJobConfig(JobConfig):  # type: ignore[misc]  # Ray has no types
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return FolderlessJobConfig()


def connect_to_ray(address: str) -> None:
    """Joins a running cluster. Raises Unavailable within seconds when nothing answers, and after JOIN_S when the head answers and then
    stands still or ends; ConfigurationError when `address` is malformed."""
    if listens_on_loopback_only(address):
        _stay_on_loopback()
    ray = import_ray()
    if address == AUTO:
        address = _address_here()
        try:
            check_reachable(address)
        except Unavailable as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                raise Unavailable(_NONE_HERE) from error
            raise
    else:
        check_reachable(address)
    keep_private()
    check_token(address)
    logging.getLogger("ray._private.worker").setLevel(
        logging.ERROR
    )  # it warns that a thread joins, which handles no signals
    join = functools.partial(
        ray.init,
        address=address,
        namespace=NAMESPACE,
        job_config=_job_config(),
        log_to_driver=False,
        configure_logging=False,
        logging_level="ERROR",
    )
    try:
        _within("join-ray", join, JOIN_S)
    except TimeoutError as error:
        raise Unavailable(
            f"the Ray cluster at {address} answers, and has let nothing join for {JOIN_S:.0f} s: its head ends, stands still or is busy; "
            "try again"
        ) from error
    except ConnectionError as error:
        raise Unavailable(f"the Ray cluster at {address} does not answer: {error}") from error
    except (RuntimeError, OSError, ValueError) as error:
        raise Unavailable(f"cannot join the Ray cluster at {address}: {str(error).strip()}") from error


_held: list[Future[object]] = []  # what Ray does for us and has not ended


def is_held_by_ray() -> bool:
    """Whether Ray still waits for its head. The interpreter's own exit would wait for that, too, or crash: `os._exit` ends this process."""
    return any(not work.done() for work in _held)


def _within(name: str, work: Callable[[], object], limit_s: float) -> None:
    """Raises TimeoutError. If the head stands still or cannot be reached, Ray waits for minutes and hears no signal meanwhile: that wait is
    left to a thread."""
    doing: Future[object] = in_own_thread(name, work)
    _held.append(doing)
    doing.result(limit_s)


def _address_here() -> str:
    """Returns the address of the Ray that this machine is part of. Ray remembers the last one it started here, which may have ended, and
    would take that one of several. Raises ConfigurationError for several, other users' left out."""
    from ray._private import services

    there = sorted(services.find_gcs_addresses())
    if len(there) > 1:
        there = [address for address in there if _is_open_to_us(address)]
        if not there:
            raise Unavailable(_NONE_HERE)
        if len(there) == 1:
            return str(there[0])
        raise ConfigurationError(
            f"{len(there)} Ray clusters run on this machine: name the one that you mean with --address ({', '.join(there)})"
        )
    try:
        found = services.canonicalize_bootstrap_address(AUTO)
    except ConnectionError:
        found = None
    if found is None:
        raise Unavailable(_NONE_HERE)
    return str(found)


def _is_open_to_us(address: str) -> bool:
    try:
        check_token(address)
    except ConfigurationError:
        return False
    return True


def check_reachable(address: str) -> None:
    """Fails early: Ray itself would try for minutes and ignore Ctrl-C."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"--address must be HOST:PORT of a Ray cluster's head, or auto, not {address!r}")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), _REACH_S)
    except (OSError, UnicodeError) as error:
        raise Unavailable(
            f"nothing answers at {address} ({error}): check that this is the head of a Ray cluster and that it is running"
        ) from error
    with connection:
        try:
            is_ray = os.environ.get("RAY_USE_TLS") == "1" or _speaks_http2(connection)
        except TimeoutError as error:
            raise Unavailable(
                f"{address} accepts connections, and has said nothing for {_REACH_S:.0f} s: the head's machine is busy, or the Ray there "
                "stands still; try again"
            ) from error
        if not is_ray:
            raise Unavailable(
                f"{address} answers, but not as Ray: give the address and port of the head's `ray start` "
                "(HOST:6379); for a router use `tandem status --url http://HOST:PORT`"
            )


async def until_ended(address: str) -> None:
    """Returns when nothing listens at this address of a head any more. Ray would ask there for a minute, and then end this process."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return
        except OSError:
            await asyncio.sleep(_LOOK_AGAIN_S)
            continue
        with contextlib.suppress(OSError):
            await reader.read()  # Ray ends the connection after a while, as nothing is asked on it
        writer.close()
        await asyncio.sleep(_LOOK_AGAIN_S)


def _speaks_http2(connection: socket.socket) -> bool:
    """Raises TimeoutError if nothing is said."""
    connection.settimeout(_REACH_S)
    try:
        connection.sendall(_HTTP2_PREFACE)
        header = connection.recv(_FRAME_HEADER, socket.MSG_WAITALL)
    except TimeoutError:
        raise
    except OSError:
        return False
    return len(header) == _FRAME_HEADER and header[_TYPE] == _SETTINGS


def stop_ray() -> None:
    """Idempotent, and quick when Ray was never started. Also ends the processes that a raylet of this process started: agents that
    had just started would otherwise look for their cluster for a minute."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or is_held_by_ray():
        return
    if started := _started_by_raylets():
        ray.shutdown()
        _end(started)
        return
    try:
        _within("leave-ray", ray.shutdown, _LEAVE_S)
    except TimeoutError:
        logger.warning("Ray's head does not answer: this process leaves the cluster without it")


def _started_by_raylets() -> list[int]:
    """Returns pidfds, which never refer to a later process with the same pid."""
    children: dict[int, list[int]] = {}
    raylets = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (process / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it has ended
        parent = int(rest.split()[1])
        children.setdefault(parent, []).append(int(process.name))
        if parent == os.getpid() and name.endswith("(raylet"):
            raylets.append(int(process.name))
    found, looked = [], raylets
    while looked:
        looked = [child for parent in looked for child in children.get(parent, ())]
        for process_id in looked:
            with contextlib.suppress(OSError):
                found.append(os.pidfd_open(process_id))
    return found


def _end(processes: Sequence[int]) -> None:
    deadline = time.monotonic() + _END_S
    for process in processes:
        left = max(0.0, deadline - time.monotonic())
        ends = select.poll()
        ends.register(process, select.POLLIN)
        if not ends.poll(left * 1000):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def import_ray() -> ModuleType:
    """Sets Ray's environment, then imports it: Ray reads its environment while it is imported."""
    if "ray" in sys.modules and any(name not in os.environ for name in _ENVIRONMENT):
        raise InternalError("ray was imported before its environment was set: import it through import_ray")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(f"Ray cannot be imported: {error}; install the package ray again") from error


def joined_ray() -> ModuleType:
    """For a process that is part of a cluster already: its parent gave it the environment."""
    return importlib.import_module("ray")


def own_address() -> str:
    """Returns the address of the cluster that this process has joined, as other machines reach it."""
    return str(joined_ray().get_runtime_context().gcs_address)


def own_job() -> str:
    """Returns the id of this process's job on the cluster that it has joined."""
    return str(joined_ray().get_runtime_context().get_job_id())


def has_job_ended(job: str) -> bool:
    """Returns False for a job that the control store does not know: only a recorded end counts. Raises Unavailable."""
    ray = joined_ray()
    client = ray._private.worker.global_worker.gcs_client  # the public interface needs the dashboard
    try:
        jobs = client.get_all_job_info(
            skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=_REACH_S
        )
    except Exception as error:  # Ray's own, and gRPC's
        raise Unavailable(f"Ray's control store does not answer: {error}") from error
    return any(bool(info.is_dead) for id, info in jobs.items() if id.hex() == job)


def ray_version() -> str:
    return importlib.metadata.version("ray")
