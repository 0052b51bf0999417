"""Checks what can be wrong with a machine: one function for each subject, which says what it found and what to do about it."""

from __future__ import annotations

import enum
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.base.errors import TandemError
from tandem.cluster.commands.preflight import check_address, check_machine_memory, check_model_here
from tandem.cluster.config import TandemConfig
from tandem.cluster.describe import busy, counted, format_size
from tandem.cluster.models.store import models_folder
from tandem.cluster.pools.placement import LocalMachine, place_nodes, this_machine
from tandem.wire.nodes import Role

_CHECK_TIMEOUT_S = 90.0
_OUT_OF_TIME = re.compile(r"timed out|time-?out|within [\d.]+ s|too slow", re.IGNORECASE)
_CLASS = re.compile(r"^(?:\w+\.)+[A-Z]\w*: |^[A-Z]\w*(?:Error|Exception): ")
_GIB = 1 << 30


class Level(enum.StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str  # "" until it is known which check found it
    level: Level
    what: str
    advice: str = ""  # what to do about it; "" if it is OK
    is_open: bool = False  # the check came to no result


Check = Callable[[], Finding]


def ok(what: str) -> Finding:
    return Finding("", Level.OK, what)


def warn(what: str, advice: str, *, is_open: bool = False) -> Finding:
    return Finding("", Level.WARN, what, advice, is_open)


def fail(what: str, advice: str) -> Finding:
    return Finding("", Level.FAIL, what, advice)


def checks_for(config: TandemConfig) -> dict[str, Check]:
    return {
        "python": check_python,
        "ray": check_ray,
        "nixl": check_nixl,
        **({"nixl-gpu": check_nixl_on_gpu} if has_gpu() else {}),
        "torch": check_torch,
        "compiler": check_compiler,
        "cores": lambda: check_cores(config),
        "memory": lambda: check_memory(config, this_machine()),
        "shm": lambda: check_shared_memory(Path("/dev/shm")),
        "disk": lambda: check_disk(models_folder()),
        "files": lambda: check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "port": lambda: check_port(config),
        "model": lambda: check_model(config.model.path),
    }


def check_python() -> Finding:
    what = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return fail(what, "run it on Linux, or in a Linux container")
    return ok(what)


def check_ray() -> Finding:
    """Starts a Ray and stops it: most problems show only then."""
    script = (
        "import sys\n"
        "from tandem.cluster.on_ray.runtime import ray_version, start_ray, stop_ray\n"
        "from tandem.base.errors import TandemError\n"
        "try:\n"
        "    start_ray(); stop_ray(); print(ray_version())\n"
        "except TandemError as error:\n"
        "    sys.exit(' '.join(str(error.__cause__ or error).split()))"
    )
    child = run_python(script)
    if child.returncode == 0:
        return ok(f"{child.stdout.strip()}, starts and stops")
    return failed(
        f"it does not start: {last_line(child)}",
        f"see its logs in /tmp/tandem-{os.getuid()}/ray/session_latest/logs, or the same below TMPDIR if that is set; Ray needs to write "
        "there and to ~/.ray, and to listen on local ports",
    )


def failed(what: str, advice: str, *, load: float | None = None) -> Finding:
    """A check that ran out of time on a busy machine says nothing about the machine. `load` is its load average."""
    load = os.getloadavg()[0] if load is None else load
    machine = this_machine()
    cores = machine.quota or len(machine.cores)
    if _OUT_OF_TIME.search(what) and (why := busy(load, cores)):
        return warn(
            f"{why}, and the check was not done in time: {what}", "try again when the machine is quieter", is_open=True
        )
    return fail(what, advice)


def check_nixl() -> Finding:
    from tandem.kvtransfer.nixl_check import check

    report = check(_CHECK_TIMEOUT_S)
    if report.error:
        return failed(
            f"{report.version or 'missing'}: {report.error}",
            "install the package nixl again; without it only aggregated nodes can serve",
        )
    what = (
        f"{report.version}, UCX moves host memory at {report.gigabytes_per_s:.1f} GB/s over "
        f"{', '.join(report.transports) or 'an unknown transport'}; plug-ins: {', '.join(report.plugins)}"
    )
    if report.transports and all(transport.startswith("tcp/") for transport in report.transports):
        return warn(
            what, "between processes of this machine only TCP works: allow process_vm_writev (ptrace) in the container"
        )
    return ok(what)


def has_gpu(devices: Path = Path("/dev")) -> bool:
    return (devices / "nvidiactl").exists() or (devices / "dxg").exists()


def check_nixl_on_gpu() -> Finding:
    """Checks how a GPU's memory goes from one process to another, because slow ways work, too."""
    from tandem.kvtransfer.nixl.lanes import reaches_device
    from tandem.kvtransfer.nixl_check import check

    report = check(_CHECK_TIMEOUT_S, "cuda:0")
    if report.error:
        return warn(
            report.error, "KV on a GPU cannot be transferred between its processes; see the finding on torch first"
        )
    lanes = ", ".join(report.transports) or "an unknown transport"
    what = f"UCX moves the GPU's memory at {report.gigabytes_per_s:.1f} GB/s over {lanes}"
    if report.transports and not reaches_device(report.transports):
        return warn(
            f"{what}: staged through host memory, not by CUDA's IPC",
            "give the nodes of one machine one container and its IPC namespace, and leave expandable_segments out of "
            "PYTORCH_CUDA_ALLOC_CONF; RDMA does as well",
        )
    return ok(what)


def check_torch() -> Finding:
    script = (
        "import torch\n"
        "names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "print(torch.__version__, '|', torch.backends.cpu.get_cpu_capability(), '|', '; '.join(names))"
    )
    child = run_python(script)
    if child.returncode != 0:
        return failed(last_line(child), "install the package torch again, for this machine")
    version, instructions, gpus = (part.strip() for part in child.stdout.strip().split("|"))
    what = f"{version}, CPU with {instructions}" + (f", {gpus}" if gpus else "")
    if not gpus and Path("/proc/driver/nvidia/gpus").exists():
        return warn(f"{what}; there is a GPU that it cannot use", "install a torch build with CUDA")
    return ok(what)


def check_compiler() -> Finding:
    """Compiles the native kernels, unless they have been compiled on this machine."""
    from tandem.kernels.build import library_path
    from tandem.kernels.compiler import BuildFailed

    try:
        return ok(f"native kernels: {library_path()}")
    except BuildFailed as error:
        return warn(
            str(error),
            "install g++ with its standard library, and let this user write there (or set XDG_CACHE_HOME); without native kernels CPU nodes are "
            "several times slower",
        )


def check_cores(config: TandemConfig) -> Finding:
    machine = this_machine()
    cores = machine.quota or len(machine.cores)
    what = f"{counted(cores, 'core')}, {counted(machine.gpus, 'usable GPU')}"
    if machine.quota is not None:
        what += f" (by the container's quota; the machine has {len(machine.cores)} cores)"
    try:
        place_nodes(config, machine)
    except TandemError as error:
        return fail(what, str(error))
    if config.pools.total > cores and not machine.gpus:
        return warn(
            f"{what} for {counted(config.pools.total, 'node')}",
            "nodes will share cores and slow each other down: ask for fewer nodes",
        )
    return ok(what)


def check_memory(config: TandemConfig, machine: LocalMachine) -> Finding:
    nodes, available = config.pools.total, machine.free_memory or 0
    # An interpreter with torch and a small model, twice because of the moment when weights are read, and Ray.
    needed = _GIB
    for role in Role:
        cache = config.engine_of(role).cache
        needed += config.pools.of(role).first_size * (_GIB + (cache.memory_bytes or 0) + cache.host_bytes_of_tiers)
    what = f"{format_size(available)} free, {counted(nodes, 'node')} and Ray need about {format_size(needed)} and the weights"
    try:
        check_machine_memory(config, machine)
    except TandemError as error:
        return fail(what, str(error))
    if available < needed:
        return warn(what, "ask for fewer nodes or less KV memory (--kv-memory), or end something else")
    return ok(what)


def check_shared_memory(folder: Path) -> Finding:
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        return warn(f"{folder} is not there", f"mount a tmpfs on {folder}")
    what = f"{folder} holds {format_size(size)}"
    if size < 256 << 20:
        return warn(what, "give it at least 256 MiB (docker run --shm-size=1g)")
    return ok(what)


def check_disk(folder: Path) -> Finding:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    what = f"{format_size(free)} free for models in {folder}"
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return fail(f"{existing} cannot be written", "set TANDEM_CACHE to a folder that can")
    if free < 2 * _GIB:
        return warn(what, "make room, or set TANDEM_CACHE to a folder on a larger disk")
    return ok(what)


def check_open_files(limit: int) -> Finding:
    what = "no limit on open files" if limit == resource.RLIM_INFINITY else f"up to {limit} open files"
    if limit != resource.RLIM_INFINITY and limit < 4096:
        return warn(what, "raise it: ulimit -n 65536; every client and every worker takes some")
    return ok(what)


def check_port(config: TandemConfig) -> Finding:
    host, port = config.router.host, config.router.port
    try:
        check_address(host, port)
    except TandemError as error:
        return fail(f"{host}:{port}", str(error))
    return ok(f"{host}:{port} is free" if port else "any free port")


def check_model(name: str) -> Finding:
    try:
        found = check_model_here(name)
    except TandemError as error:
        return fail(name, str(error))
    if found is None:
        return ok(f"{name} will be fetched at the first start (tandem models fetch {name})")
    return ok(found.path)


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, "-P", "-c", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 1, "", f"nothing happened within {_CHECK_TIMEOUT_S:.0f} s")


def last_line(child: subprocess.CompletedProcess[str]) -> str:
    """Returns the last thing that it said, without the name of the exception's class."""
    lines = child.stderr.strip().splitlines()
    if not lines:
        return f"it ended with status {child.returncode}"
    return _CLASS.sub("", lines[-1]).rstrip(".")
