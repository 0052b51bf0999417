"""A copy of the tree in which mutants are made, and tests run: each time in a process forked from one that has imported the libraries.

Which test calls which functions is recorded once, under `sys.settrace`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.wings import ROOT, copy_without, lies_in

_LIBRARIES = ("torch", "transformers", "msgspec", "zmq", "httpx", "hypothesis", "yaml", "starlette")
_TRACED_S = 0.2  # of its processor time: what a test calls later than that, narrower tests call, too
_MOST_BYTES = 6 << 30  # a mutant may have any number of things for ever
_FIRST_TIME = 1_000_000_000  # before any real time of a file


class Tree:
    """The working tree, or the tree of a commit, in `folder`."""

    def __init__(self, folder: Path, commit: str | None) -> None:
        self.folder = folder
        if commit is None:
            copy_without([], folder)
        else:
            packed = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
        self._times = iter(range(_FIRST_TIME, 2 * _FIRST_TIME))
        for name in _LIBRARIES:
            importlib.import_module(name)

    @contextlib.contextmanager
    def changed(self, file: str, source: bytes) -> Iterator[None]:
        """Each version has a time of its own: Python compiles a file again only when its time or its size differs."""
        path = self.folder / file
        right = path.read_bytes()
        try:
            self._write(path, source)
            yield
        finally:
            self._write(path, right)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        os.utime(path, (moment := next(self._times), moment))

    def run(self, words: Sequence[str], most_s: float, plugin: Any) -> Any:
        """What the plugin has to tell when pytest has run with these words, in the copy; None if it did not end in time."""
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_pytest, args=(self.folder, words, plugin, there))
        process.start()
        there.close()
        told = None
        with contextlib.suppress(EOFError):
            told = here.recv() if here.poll(most_s) else None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, 9)  # with what it has started
        process.join()
        return told


def _pytest(folder: Path, words: Sequence[str], plugin: Any, there: Connection) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    os.chdir(folder)
    os.environ |= {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    sys.path[:] = [str(folder), *(each for each in sys.path if each not in ("", str(ROOT)))]
    # An installation for development finds the rooms of its own tree.
    sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in repr(each)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tandem", "tests", "benchmarks")]:
        del sys.modules[name]
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    code = pytest.main(["-q", "-p", "no:cacheprovider", *words], plugins=[plugin])
    there.send(plugin.told(int(code)))
    os._exit(0)


class Killers:
    """A plug-in of pytest: which tests failed."""

    def __init__(self) -> None:
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def told(self, code: int) -> list[str]:
        return self._failed or ([] if code == pytest.ExitCode.OK else ["import"])


class Calls:
    """A plug-in of pytest: the functions that each test enters. What fixtures enter counts for all tests of the file."""

    def __init__(self, folder: Path) -> None:
        self._prefix = f"{folder}/"
        self._entered: set[tuple[str, int]] = set()
        self._until = 0.0
        self._entered_by: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._took: dict[str, float] = {}

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        self._entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
        if time.process_time() > self._until:
            sys.settrace(None)

    def _recorded(self, by: str) -> Iterator[None]:
        self._entered, self._until = self._entered_by[by], time.process_time() + _TRACED_S
        sys.settrace(self._on_call)
        threading.settrace(self._on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._recorded(item.nodeid.partition("::")[0]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        began = time.monotonic()
        result = yield from self._recorded(item.nodeid)
        self._took[item.nodeid] = round(time.monotonic() - began, 3)  # only of a test that passes
        return result

    def _named(self, test: str) -> list[str]:
        both = self._entered_by[test] | self._entered_by[test.partition("::")[0]]
        found = ((file.removeprefix(self._prefix), line) for file, line in both if file.startswith(self._prefix))
        return sorted(f"{file.removeprefix('tandem/')}:{line}" for file, line in found if not file.startswith("tests/"))

    def told(self, code: int) -> dict[str, Any]:
        return {test: {"took": took, "calls": self._named(test)} for test, took in self._took.items()}


@functools.cache
def calls_of(tree: Tree, tests: tuple[str, ...], marked: str, kept: Path) -> tuple[str, dict[str, Any]]:
    """A digest of the product and of these tests; and how long each of them takes and which functions it calls, recorded or as it is kept."""
    total = hashlib.sha256(marked.encode())
    for file in sorted(tree.folder.rglob("*.py")):
        name = file.relative_to(tree.folder).as_posix()
        if not name.startswith("tests/") or lies_in(
            name, (*tests, *(f"{each}/" for each in tests), "tests/conftest.py")
        ):
            total.update(name.encode() + b"\0" + file.read_bytes())
    file = kept / f"calls-{total.hexdigest()[:16]}.json"
    if not file.exists():
        print(f"recording what {' '.join(tests)} calls", flush=True)
        if not (calls := tree.run(["-m", marked, *tests], 3600, Calls(tree.folder))):
            raise SystemExit(f"none of {' '.join(tests)} passes that is {marked}")
        kept.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(calls))
    return file.stem, json.loads(file.read_text())
