"""Fixtures, options and scheduling that all test folders share."""

from __future__ import annotations

import gc
import inspect
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler.loadscope import LoadScopeScheduling

from tandem.cluster.models.store import prepare_model
from tests.doors import RECORDER, Door, read_ledger, write_ledger
from tests.loops import in_loop
from tests.small_model import folder_with_tools, model_folder, thinking_folder, tokenizer  # noqa: F401 (fixtures)

# hypothesis' deadline would measure how busy the machine is, and each test has a time limit of its own.
settings.register_profile("tandem", deadline=None, max_examples=50)
settings.load_profile("tandem")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The objects that imports create stay for good. Collections that walk over them again and again take longer than torch."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-doors", action="store_true", help="write the doors that the tests go through into doors.json"
    )
    parser.addoption("--share", metavar="I/N", help="run the I-th of N parts of the chosen tests")


# Of this run: the doors of each test function, and those functions of which a case failed or was left out.
_DOORS: dict[str, set[Door]] = {}
_INCOMPLETE: set[str] = set()
# How many tests --share left out of each file.
_LEFT_OUT: dict[str, int] = {}


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def pytest_configure(config: pytest.Config) -> None:
    RECORDER.watch()
    # A case that is named alone is not the whole function.
    _INCOMPLETE.update(_function(word) for word in config.args if "[" in word)


def pytest_deselected(items: list[pytest.Item]) -> None:
    _INCOMPLETE.update(_function(item.nodeid) for item in items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    RECORDER.passed.clear()
    try:
        return (yield)
    finally:
        _DOORS.setdefault(_function(item.nodeid), set()).update(RECORDER.passed)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _INCOMPLETE.add(_function(report.nodeid))


def pytest_testnodedown(node: Any) -> None:
    """One of xdist's processes has ended."""
    for test, doors in getattr(node, "workeroutput", {}).get("doors", {}).items():
        _DOORS.setdefault(test, set()).update((kind, name) for kind, name in doors)
    _INCOMPLETE.update(getattr(node, "workeroutput", {}).get("incomplete", ()))
    _LEFT_OUT.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def _untrue_entries() -> list[str]:
    return [
        f"{test} does not go through the {kind} {name!r}, as tests/doors.json says"
        for (kind, name), test in read_ledger()[0].items()
        if test in _DOORS.keys() - _INCOMPLETE and (kind, name) not in _DOORS[test]
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _untrue_entries():
        terminalreporter.write_line(line, red=True)
    if _LEFT_OUT:
        files = ", ".join(f"{file} {count}" for file, count in sorted(_LEFT_OUT.items()))
        terminalreporter.write_line(f"left out of this share: {sum(_LEFT_OUT.values())} tests: {files}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A share may have no test."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["doors"] = {test: sorted(doors) for test, doors in _DOORS.items()}
        session.config.workeroutput["incomplete"] = sorted(_INCOMPLETE)
        session.config.workeroutput["left_out"] = _LEFT_OUT
        return
    if session.config.getoption("--record-doors"):
        write_ledger({test: doors for test, doors in _DOORS.items() if test not in _INCOMPLETE})
    elif _untrue_entries() and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--share") is not None:
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(trylast=True)  # of what the markers left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getvalue("dist") == "loadfile":
        # What waits and what is long comes first, so that no process has one of them left when the others are done.
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        size = Counter(item.path for item in items)

        def turn(item: pytest.Item) -> tuple[int, int]:
            kinds = (item.path.name in ON_ONE_RAY, "integration" in item.path.parts, item.path in slow, True)
            return kinds.index(True), -size[item.path]

        items.sort(key=turn)
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = in_loop(item.obj)
    share = config.getoption("--share")
    if share is None:
        return
    part, parts = (int(number) for number in share.split("/"))
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    # The tests of a file share its cluster, so they stay together, and the files are dealt out in turn.
    files = sorted({item.path for item in items if item.get_closest_marker("own_cluster")})
    for item in items:
        own = item.get_closest_marker("own_cluster") is not None
        place = files.index(item.path) if own else zlib.crc32(item.nodeid.encode())
        (kept if place % parts == part % parts else others).append(item)
    config.hook.pytest_deselected(items=others)
    _LEFT_OUT.update(Counter(item.path.name for item in others))
    items[:] = kept


# Of tests/integration: deployments on a Ray that is started once.
ON_ONE_RAY = {
    "test_burst.py",
    "test_end_to_end.py",
    "test_logs_from_anywhere.py",
    "test_official_client.py",
    "test_quotes.py",
    "test_verify.py",
}


class FileScheduling(LoadScopeScheduling):
    """Gives whole files to xdist's processes, because the tests of a file share fixtures. One process gets all files that share a Ray."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if file.rpartition("/")[2] in ON_ONE_RAY else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, as `tandem serve` uses it. Fetched and converted on first use, then cached."""
    return Path(prepare_model("smollm2", lambda what, fraction: print(f"smollm2: {what}")).path)
