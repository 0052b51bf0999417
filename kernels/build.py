"""Compiles the library on first use and keeps it. `python -m tandem.kernels.build` compiles it ahead of time, with `--all` for processors
of other kinds, too.

A slow machine only takes longer: a compiler is ended when it has stopped using the processor, never because time has passed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.kernels.compiler import BuildFailed, Stillness, run, spent_s

log = logging.getLogger(__name__)

Report = Callable[[str, float], None]
"""Takes what is being done, and which fraction of it is done (0 to 1)."""

SOURCES = Path(__file__).parent
_NAME = "libtandem_native.so"
_STAMP = "sources"
_SHIPPED = SOURCES / "compiled"  # in a wheel that contains the library
SAID = "said"  # the progress of the process that compiles, for those that wait for it
_LOOK_S = 1.0

# No -march=native: machines of different kinds may share the file system. Each unit is compiled for its instruction set, and the
# library asks the processor which one to use. NaN and infinity keep their meaning (no -ffast-math).
FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
UNIT_FLAGS = {
    "unit_avx2.cpp": ["-mavx2", "-mfma"],
    "unit_avx512.cpp": _AVX512,
    "unit_avx512bf16.cpp": [*_AVX512, "-mavx512bf16"],
    "unit_amx.cpp": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
_X86 = ("x86_64", "amd64")
LEFT_OUT = "-DTANDEM_LEFT_OUT"  # a unit that is compiled with this has no kernels

# The processor's features, as Linux names them, without which a unit does not run.
_NEEDS_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_UNIT_NEEDS = {
    "unit_avx2.cpp": {"avx2", "fma"},
    "unit_avx512.cpp": _NEEDS_AVX512,
    "unit_avx512bf16.cpp": _NEEDS_AVX512 | {"avx512_bf16"},
    "unit_amx.cpp": _NEEDS_AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
}
_CPUINFO = Path("/proc/cpuinfo")


def quiet(what: str, fraction: float) -> None:
    pass


def library_path(report: Report = quiet, *, for_all: bool = False) -> Path:
    """Returns the compiled library: the one in the wheel, or one that this machine has compiled; compiles it if there is neither. If CXX
    names a compiler, that is always used. `for_all` compiles it with the units that this processor cannot run. Raises BuildFailed."""
    found, compiler, library = look(for_all)
    if found is not None:
        return found
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with (library.parent / "lock").open("w") as lock:
            _take(lock.fileno(), library.parent / SAID, report)
            if not library.exists():
                _compile(compiler, library, frozenset() if for_all else left_out(), report)
    except OSError as error:
        raise BuildFailed(f"the native library cannot be written to {library.parent}: {error}") from error
    return library


def is_ready() -> bool:
    """Returns whether there is a library, so that nothing needs to be compiled. Raises BuildFailed."""
    return look(for_all=False)[0] is not None


def look(for_all: bool) -> tuple[Path | None, str, Path]:
    """Returns the library that is there, the compiler, and where that would put one."""
    if not os.environ.get("CXX") and (shipped := _shipped()) is not None:
        return shipped, "", shipped
    compiler = find_compiler()
    of_all, of_this = (_cache_folder() / _fingerprint(compiler, units) / _NAME for units in (frozenset(), left_out()))
    found = next((library for library in (of_all, of_this) if library.exists()), None)
    return (found if not for_all or found == of_all else None), compiler, of_all if for_all else of_this


def left_out() -> frozenset[str]:
    """Returns the units that this processor cannot run. None of them is left out where the processor does not say what it can."""
    features: set[str] = set()
    with contextlib.suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("flags"):
                features = set(line.partition(":")[2].split())
                break
    if not features:
        return frozenset()
    return frozenset(unit for unit, needs in _UNIT_NEEDS.items() if not needs <= features)


def ship(folder: Path) -> None:
    """Copies the compiled library into a wheel's folder, with a digest of its sources. It runs on processors of all kinds."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library_path(for_all=True), folder / _NAME)
    (folder / _STAMP).write_text(_digest_of_sources(), encoding="utf-8")


def _shipped() -> Path | None:
    """Returns the library in the wheel, if it was compiled from these sources for this kind of machine."""
    try:
        matches = (_SHIPPED / _STAMP).read_text(encoding="utf-8") == _digest_of_sources()
    except OSError:
        return None
    library = _SHIPPED / _NAME
    return library if matches and library.exists() else None


def find_compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    raise BuildFailed(
        f"there is no C++ compiler ({named or 'g++'}) to compile the native library: install g++, or set CXX"
    )


def _cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # A relative one counts for nothing: it would be another folder wherever a command is typed.
        return (base if base.is_absolute() else Path.home() / ".cache") / "tandem" / "native"
    except RuntimeError:
        raise BuildFailed(
            "this user has no home folder for the native library: set XDG_CACHE_HOME to a folder"
        ) from None


def _sources(suffix: str) -> list[Path]:
    return sorted(SOURCES.glob(f"*{suffix}"))


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in [*_sources(".cpp"), *_sources(".h")]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((FLAGS, UNIT_FLAGS, platform.machine(), platform.system())).encode())
    return digest.hexdigest()


def _fingerprint(compiler: str, without: frozenset[str]) -> str:
    """Returns a name that changes with the sources, the flags, the compiler and the units that are left out."""
    made_of = _digest_of_sources() + run([compiler, "--version"]) + " ".join(sorted(without))
    return hashlib.sha256(made_of.encode()).hexdigest()[:20]


def _compile(compiler: str, library: Path, without: frozenset[str], report: Report) -> None:
    log.info("compiling the native library (once for this machine)")
    started = time.monotonic()
    folder = library.parent
    for leftover in folder.glob("tmp*"):  # of a process that was killed: we hold its lock
        shutil.rmtree(leftover, ignore_errors=True)
    finished = folder / "objects"  # of a process that was ended while it compiled: the next one goes on
    finished.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="tmp") as work:
        sources = _sources(".cpp")[::-1]  # the units take longest, so they come first
        objects = [finished / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *_flags_of(source.name, without), "-c", str(source), "-o", str(Path(work) / target.name)]
            for source, target in zip(sources, objects, strict=True)
            if not target.exists()
        ]

        def say(seconds: float) -> None:
            done = sum(target.exists() for target in objects)
            what = f"compiling the native library, {done} of {len(objects)} files ({seconds:.0f} s of computing)"
            (folder / SAID).write_text(f"{done / len(objects)} {what}", encoding="utf-8")
            report(what, done / len(objects))

        _run_all(commands, finished, say)
        linked = Path(work) / _NAME
        run([compiler, "-shared", "-pthread", "-o", str(linked), *map(str, objects)])
        with linked.open("rb") as file:
            os.fsync(
                file.fileno()
            )  # after a power cut a name without its bytes would be taken for the library for ever
        linked.replace(library)
    shutil.rmtree(finished, ignore_errors=True)
    log.info("compiled the native library in %.1f s: %s", time.monotonic() - started, library)


def _flags_of(unit: str, without: frozenset[str]) -> list[str]:
    if unit in without:
        return [*FLAGS, LEFT_OUT]
    return [*FLAGS, *(UNIT_FLAGS.get(unit, []) if platform.machine().lower() in _X86 else [])]


def _run_all(commands: Sequence[Sequence[str]], finished: Path, say: Callable[[float], None]) -> None:
    """Runs the compilers, as many at once as there are cores, and tells their time. Daemon threads wait for them, because a process that
    ends must not wait for a compiler."""
    left = list(reversed(commands))
    failed: list[BuildFailed] = []
    ending = threading.Event()

    def work() -> None:
        while left and not failed and not ending.is_set():
            try:
                command = left.pop()
            except IndexError:  # another thread took the last one
                return
            try:
                run(command, ending)
                made = Path(command[-1])
                made.replace(finished / made.name)
            except BuildFailed as error:
                failed.append(error)
            except OSError as error:
                failed.append(BuildFailed(f"the native library cannot be written to {finished}: {error}"))

    threads = [
        threading.Thread(target=work, name="compiler", daemon=True)
        for _ in range(min(len(commands), len(os.sched_getaffinity(0))))
    ]
    before = spent_s()
    say(0.0)
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                say(spent_s() - before)
                thread.join(_LOOK_S)
    finally:
        ending.set()  # after an interrupt, the compilers that still run are ended
    if failed:
        raise failed[0]


def _take(lock: int, said: Path, report: Report) -> None:
    """Takes the lock, which the kernel releases for a process that dies. While another process has it, passes on that one's progress."""
    import fcntl

    still = Stillness(time.monotonic)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        share, _, what = "", "", "waiting for another process, which compiles the native library"
        with contextlib.suppress(OSError, ValueError):
            share, _, what = said.read_text(encoding="utf-8").partition(" ")
        if still.has_lasted(what):
            raise BuildFailed(
                f"another process that compiles the native library has stood still for {still.LIMIT_S:.0f} s ({said.parent}): end it"
            )
        report(what, float(share or 0))
        time.sleep(_LOOK_S)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    said = [""]

    def tell(what: str, fraction: float) -> None:
        """One line that moves on a terminal; elsewhere a line for each file."""
        if sys.stderr.isatty():
            print(what, end="\x1b[K\r", file=sys.stderr, flush=True)  # the next line is written over it
            return
        files = what.partition(" (")[0]
        if files != said[0]:
            log.info("%s", what)
        said[0] = files

    try:
        path = library_path(tell, for_all="--all" in sys.argv[1:])
    except BuildFailed as error:
        log.warning("%s", error)
        log.warning("Tandem works without it: models run through torch, which is slower.")
        return 0
    log.info("native library: %s", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
