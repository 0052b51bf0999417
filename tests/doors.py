"""The ledger of doors: which test goes through each setting, flag, command, endpoint, metric, alert, shipped file and block of code
in the way its users do.

`known_doors` collects them from the code and the pages. While tests run, a `Recorder` watches what really passes: settings that load,
words that the command runs with, requests on a socket and samples of a scrape, files that are opened, blocks that a test takes.
tests/doors.json names a test for each door. At the end of a run, a test that is named there, that passed, and that did not go through
its doors fails the run; so does a door without a test (tests/test_doors.py). `pytest --record-doors` writes what a run saw into the file.
`python -m tests.doors` prints the report.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.documents import ROOT, blocks

LEDGER = ROOT / "tests" / "doors.json"
_NOT_YET = "not yet"  # beside the kinds of doors: the reason for each that has no test

Door = tuple[str, str]
"""Its kind and its name."""

_READING = threading.Lock()  # Python does not parse in several threads at once: its AST then counts wrong


# --- what there is


def known_doors() -> set[Door]:
    kinds = {
        "setting": _settings,
        "command": lambda: (name for name, _ in _commands()),
        "flag": _flags,
        "endpoint": lambda: (f"{method} {path}" for path, methods in endpoints() for method in methods),
        "metric": _metrics,
        "alert": lambda: re.findall(r"alert: (\w+)", (ROOT / "manifests/monitoring/alerts.yaml").read_text()),
        "file": lambda: (str(file.relative_to(ROOT)) for file in (ROOT / "manifests").rglob("*") if file.is_file()),
        "block": lambda: (block.name for block in blocks()),
    }
    return {(kind, name) for kind, names in kinds.items() for name in names()}


def _settings() -> Iterator[str]:
    from tandem.cluster.config import DERIVED
    from tandem.cluster.settings.names import dotted, known_settings

    return (dotted(path) for path in known_settings().keys() - DERIVED.keys())


@functools.cache
def _commands() -> list[tuple[str, argparse.ArgumentParser]]:
    """Every command, actions as `models fetch` among them, with its parser."""
    from tandem.cluster.cli import make_parser
    from tandem.cluster.commands.parser import described, subcommands

    found: list[tuple[str, argparse.ArgumentParser]] = [("", make_parser())]
    for name, parser in found:
        inner = subcommands(described(parser))
        found += [(f"{name} {word}".strip(), each) for word, each in inner.items()]
    return found[1:]


def _named(command: str, action: argparse.Action) -> str:
    """A flag that sets settings is the same on every command that takes it."""
    from tandem.cluster.commands.setting_options import _SETTING_FLAGS

    (name,) = [each for each in action.option_strings if each.startswith("--")][:1]
    if action.dest == "foreign" or name in _SETTING_FLAGS or name in ("--set", "--config"):
        return name
    return f"{command} {name}"


def _flags() -> Iterator[str]:
    from tandem.cluster.commands.parser import flags_of

    for command, parser in _commands():
        for action in dict.fromkeys(flags_of(parser).values()):
            if action.dest != "help":
                yield _named(command, action)


@functools.cache
def endpoints() -> list[tuple[str, list[str]]]:
    """Read from the rows of routes, wherever in the router they stand: a path, a handler, the methods."""
    return [
        (node.elts[0].value, ast.literal_eval(node.elts[2]))
        for file in sorted((ROOT / "router").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Tuple)
        and len(node.elts) == 3
        and isinstance(node.elts[0], ast.Constant)
        and isinstance(node.elts[2], ast.List)
        and str(node.elts[0].value).startswith("/")
    ]


def _metrics() -> set[str]:
    from tests.router.test_router_api_page import published

    return published()


# --- what passes


class Recorder:
    """What the test that runs now goes through."""

    def __init__(self) -> None:
        self.passed: set[Door] = set()

    def watch(self) -> None:
        """Begins to watch, for as long as the process lives."""
        self._watch_settings()
        self._watch_commands()
        self._watch_requests()
        sys.addaudithook(self._on_audit)

    def words(self, words: Sequence[str]) -> None:
        """`tandem` runs with these words."""
        from tandem.cluster.commands.parser import flags_of

        commands = dict(_commands())
        name = next((two for n in (2, 1) if (two := " ".join(words[:n])) in commands), None)
        if name is None:
            return
        self.passed.add(("command", name))
        actions = flags_of(commands[name])
        for word in words:
            action = actions.get(word.partition("=")[0])
            if action is not None and action.dest != "help":
                self.passed.add(("flag", _named(name, action)))

    def request(self, method: str, path: str) -> None:
        with _READING:
            rows = endpoints()
        for template, methods in rows:
            pattern = re.sub(r"\{\w+:path\}", ".+", template)
            if method in methods and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), path):
                self.passed.add(("endpoint", f"{method} {template}"))

    def scrape(self, text: str) -> None:
        for sample in set(re.findall(r"^(tandem_\w+)[ {]", text, re.MULTILINE)):
            self.passed |= {("metric", sample), ("metric", re.sub("_(bucket|sum|count)$", "", sample))}

    def _watch_settings(self) -> None:
        from tandem.cluster.settings import combined

        make, recorder = combined.Settings.__init__, self

        def made(self: Any, config: Any, origins: Any) -> None:
            make(self, config, origins)
            recorder.passed.update(("setting", ".".join(path)) for path in origins)

        combined.Settings.__init__ = made  # type: ignore[method-assign]

    def _watch_commands(self) -> None:
        from tandem.cluster import cli

        make = cli.make_parser

        def made() -> argparse.ArgumentParser:
            parser = make()
            parse = parser.parse_args

            def parsed(words: Sequence[str]) -> Any:
                self.words(words)
                return parse(words)

            parser.parse_args = parsed  # type: ignore[method-assign, assignment]
            return parser

        cli.make_parser = made  # the one that `main` calls; tests that only parse have the other

    def _watch_requests(self) -> None:
        import httpx

        handle, handle_async = (httpx.HTTPTransport.handle_request, httpx.AsyncHTTPTransport.handle_async_request)

        def handled(transport: Any, request: httpx.Request) -> httpx.Response:
            response = handle(transport, request)
            if response.status_code not in (404, 405):
                self.request(request.method, request.url.path)
            if request.url.path == "/metrics":
                self.scrape(response.read().decode())
            return response

        async def handled_async(transport: Any, request: httpx.Request) -> httpx.Response:
            response = await handle_async(transport, request)
            if response.status_code not in (404, 405):
                self.request(request.method, request.url.path)
            return response

        httpx.HTTPTransport.handle_request = handled  # type: ignore[method-assign]
        httpx.AsyncHTTPTransport.handle_async_request = handled_async  # type: ignore[method-assign]

    def _on_audit(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[0], str) and "/manifests/" in given[0]:
            place = given[0].partition(f"{ROOT}/")[2]
            if place.startswith("manifests/") and "r" in (given[1] or "r"):
                self.passed.add(("file", place))
        elif event == "subprocess.Popen" and isinstance(given[1], (list, tuple)):
            words = [str(word) for word in given[1]]
            if "tandem.cluster.cli" in words:
                self.words(words[words.index("tandem.cluster.cli") + 1 :])
            elif words[0] == "helm":
                given_paths = [Path(word) for word in words if word.startswith(f"{ROOT}/manifests/")]
                read = [file for path in given_paths for file in (path, *path.rglob("*")) if file.is_file()]
                self.passed.update(("file", str(file.relative_to(ROOT))) for file in read)
            elif words[:3] == ["promtool", "check", "config"]:
                self.passed.add(("file", str((Path(given[2]) / words[3]).relative_to(ROOT))))
            elif words[:3] == ["promtool", "test", "rules"]:
                faults = (Path(given[2]) / words[3]).read_text(encoding="utf-8")
                self.passed.update(("alert", name) for name in re.findall(r'alertname="(\w+)"', faults))


RECORDER = Recorder()


def passes(kind: str, name: str) -> None:
    """A test says that it goes through a door that cannot be watched: it takes this block as it stands in the page."""
    RECORDER.passed.add((kind, name))


# --- the ledger


def read_ledger() -> tuple[dict[Door, str], dict[Door, str]]:
    """The test of each door, and the reason of each that has none."""
    kept = json.loads(LEDGER.read_text(encoding="utf-8"))
    reasons = {(kind, name): reason for kind, named in kept.pop(_NOT_YET).items() for name, reason in named.items()}
    return {(kind, name): test for kind, named in kept.items() for name, test in named.items()}, reasons


def write_ledger(seen: dict[str, set[Door]]) -> None:
    """Adds what the tests of a run went through, keeps the test that a door has, and drops what is gone."""
    known, (tests, reasons) = known_doors(), read_ledger()
    for test in sorted(seen, key=lambda name: ("integration" in name, name)):
        for door in seen[test]:
            if door in known:
                tests.setdefault(door, test)
    kept: dict[str, Any] = defaultdict(dict)
    for kind, name in sorted(known & tests.keys()):
        kept[kind][name] = tests[kind, name]
    left: dict[str, dict[str, str]] = defaultdict(dict)
    for kind, name in sorted(known - tests.keys()):
        left[kind][name] = reasons.get((kind, name), "")
    LEDGER.write_text(json.dumps({**kept, _NOT_YET: left}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def report() -> str:
    known, (tests, reasons) = known_doors(), read_ledger()
    lines = []
    for kind in sorted({kind for kind, _ in known}):
        doors = {door for door in known if door[0] == kind}
        lines.append(f"{kind:<10}{len(doors & tests.keys()):>5} tested, of {len(doors)}")
    lines += [f"not yet: {kind} {name}: {reason}" for (kind, name), reason in sorted(reasons.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
