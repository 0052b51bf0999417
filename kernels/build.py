"""Compiles the library on first use and keeps it. `python -m tandem.kernels.build` compiles it ahead of time."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_NAME = "libtandem_native.so"
_STAMP = "sources"
_SHIPPED = _SOURCES / "compiled"  # in a wheel that contains the library
_TIMEOUT_S = 1800.0  # for one compiler run: minutes where many processes share few cores

# No -march=native: machines of different kinds may share the file system. Each unit is compiled for its instruction set, and the
# library asks the processor which one to use. NaN and infinity keep their meaning (no -ffast-math).
_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]
_UNIT_FLAGS = {
    "unit_avx2.cpp": ["-mavx2", "-mfma"],
    "unit_avx512.cpp": _AVX512,
    "unit_avx512bf16.cpp": [*_AVX512, "-mavx512bf16"],
    "unit_amx.cpp": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
_X86 = ("x86_64", "amd64")


class BuildFailed(Exception):
    """There is no compiler, or it failed. Models can still run through torch, the general path."""


def library_path() -> Path:
    """Returns the compiled library: the one in the wheel, or one that this machine has compiled; compiles it if there is neither. If CXX
    names a compiler, that is always used. Raises BuildFailed."""
    if not os.environ.get("CXX") and (shipped := _shipped()) is not None:
        return shipped
    compiler = _find_compiler()
    folder = _cache_folder() / _fingerprint(compiler)
    library = folder / _NAME
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not library.exists():
                _compile(compiler, library)
    except OSError as error:
        raise BuildFailed(f"the native library cannot be written to {folder}: {error}") from error
    return library


def ship(folder: Path) -> None:
    """Copies the compiled library into a wheel's folder, with a digest of its sources."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library_path(), folder / _NAME)
    (folder / _STAMP).write_text(_digest_of_sources(), encoding="utf-8")


def _shipped() -> Path | None:
    """Returns the library in the wheel, if it was compiled from these sources for this kind of machine."""
    try:
        matches = (_SHIPPED / _STAMP).read_text(encoding="utf-8") == _digest_of_sources()
    except OSError:
        return None
    library = _SHIPPED / _NAME
    return library if matches and library.exists() else None


def _find_compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    raise BuildFailed(
        f"there is no C++ compiler ({named or 'g++'}) to compile the native library: install g++, or set CXX"
    )


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tandem" / "native"
    except RuntimeError:
        raise BuildFailed(
            "this user has no home folder for the native library: set XDG_CACHE_HOME to a folder"
        ) from None


def _sources(suffix: str) -> list[Path]:
    return sorted(_SOURCES.glob(f"*{suffix}"))


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in [*_sources(".cpp"), *_sources(".h")]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_FLAGS, _UNIT_FLAGS, platform.machine(), platform.system())).encode())
    return digest.hexdigest()


def _fingerprint(compiler: str) -> str:
    """Returns a name that changes with the sources, the flags and the compiler."""
    made_of = _digest_of_sources() + _run([compiler, "--version"])
    return hashlib.sha256(made_of.encode()).hexdigest()[:20]


def _compile(compiler: str, library: Path) -> None:
    log.info("compiling the native library (once for this machine)")
    started = time.monotonic()
    finished = (
        library.parent / "objects"
    )  # of a process that was ended while it compiled: the next one goes on
    finished.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        sources = _sources(".cpp")[::-1]  # the units take longest, so they come first
        objects = [finished / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, target: Path) -> None:
            unit = _UNIT_FLAGS.get(source.name, []) if platform.machine().lower() in _X86 else []
            if not target.exists():
                made = Path(folder) / target.name
                _run([compiler, *_FLAGS, *unit, "-c", str(source), "-o", str(made)])
                made.replace(target)

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_one, sources, objects))
        linked = Path(folder) / _NAME
        _run([compiler, "-shared", "-pthread", "-o", str(linked), *map(str, objects)])
        linked.replace(library)  # atomic
    shutil.rmtree(finished, ignore_errors=True)
    log.info("compiled the native library in %.1f s: %s", time.monotonic() - started, library)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[:8])
        raise BuildFailed(f"{command[0]} could not compile the native library:\n{said}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one process compile at a time. The compiler run has a deadline, and the kernel releases the lock of a process that dies."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        path = library_path()
    except BuildFailed as error:
        log.warning("%s", error)
        log.warning("Tandem works without it: models run through torch, which is slower.")
        return 0
    log.info("native library: %s", path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
