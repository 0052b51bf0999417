"""Runs the benchmark of every part, shortened, one after another, and shows their main figures in one table with the floors.

    python -m benchmarks.suite
    python -m benchmarks.suite --only scheduler transfer --out results/suite

Takes about ten minutes on two cores, alone on the machine. Each benchmark writes its own table and JSON into the folder; the table at the end is
suite.txt and suite.json. Comparisons with other systems need the benchmarks' own flags.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.ending import exit_status
from tandem.base.errors import ConfigurationError
from tandem.cluster.models.store import prepare_model
from tandem.cluster.saving import results_folder, write_json
from tandem.loadgen.report import MachineDescription

_WIDTH = 120
_LOG_TAIL_LINES = 12


class Headline(msgspec.Struct, frozen=True):
    figure: str
    measured: float
    unit: str
    floor: str = ""
    met: bool | None = None


class SuitePart(msgspec.Struct, frozen=True):
    name: str
    arguments: tuple[str, ...]  # for `python -m`; {model}, {json} and {out} are replaced
    within_s: float
    read: Callable[[Any], list[Headline]]


class PartResult(msgspec.Struct, frozen=True):
    part: str
    seconds: float
    headlines: list[Headline]
    failure: str = ""


class Suite(msgspec.Struct):
    made_at: str
    machine: MachineDescription
    parts: list[PartResult] = []


def _at_most(figure: str, value: float, unit: str, floor: float) -> Headline:
    return Headline(figure, value, unit, f"at most {floor:g}", value <= floor)


def _at_least(figure: str, value: float, unit: str, floor: float) -> Headline:
    return Headline(figure, value, unit, f"at least {floor:g}", value >= floor)


def _scheduler(found: Any) -> list[Headline]:
    at_256 = next(row for row in found["workloads"] if row["running"] == 256)
    return [
        Headline("a step at 256 running requests", at_256["tandem_us"]["step"], "µs"),
        Headline("adding a request", at_256["tandem_us"]["add_request"], "µs"),
    ]


def _transfer(found: Any) -> list[Headline]:
    handover = found["handover_512"]
    return [
        _at_most("handover of 512 tokens", handover["ms_p50"], "ms", 10),
        _at_most("the same, over raw NIXL", handover["ms_p50"] / handover["raw_ms_p50"], "×", 2),
        _at_least("largest batch, of raw NIXL", found["throughput"][-1]["of_raw"], "×", 0.85),
        _at_least("moved while the prompt was computed", found["overlap_2048"][0]["share"], "", 0.8),
    ]


def _router(found: Any) -> list[Headline]:
    streams = max(found["streams"], key=lambda row: row["streams"])
    return [
        _at_most("added to the first token", found["added_ttft_ms"], "ms", 3),
        _at_most(f"CPU per token, {streams['streams']} streams", streams["added_us_per_token"], "µs", 100),
        Headline("requests", found["requests_per_s"], "per s"),
    ]


def _load_generator(found: Any) -> list[Headline]:
    worst = max(found["compared"], key=lambda row: abs(row["ours"] / row["known"] - 1))
    return [
        _at_most(
            f"furthest from what is known: {worst['figure']}",
            100 * abs(worst["ours"] / worst["known"] - 1),
            "%",
            5,
        ),
        Headline("CPU per chunk", found["ours_us_per_chunk"], "µs"),
    ]


def _disaggregation(found: Any) -> list[Headline]:
    titles = found["titles"]
    shown = []
    for one in found["examined"]:
        if one["cell"] == "1 user":
            summary = one["summary"]
            shown.append(
                Headline(f"{titles[one['system']]}, 1 user: TTFT p50", summary["ttft_ms"]["p50"], "ms")
            )
            shown.append(
                Headline(f"{titles[one['system']]}, 1 user: TPOT p50", summary["tpot_ms"]["p50"], "ms")
            )
        if one["cell"] == "8 users":
            rate = one["summary"]["output_tokens_per_s"]
            shown.append(Headline(f"{titles[one['system']]}, 8 users", rate, "tokens/s"))
    measured = [floor for floor in found["floors"] if floor["measured"] is not None]
    return shown + [
        Headline(floor["claim"], floor["measured"], floor["unit"].strip(), floor["required"], floor["met"])
        for floor in measured
    ]


PARTS = (
    SuitePart("scheduler", ("benchmarks.scheduler", "--quick", "--json", "{json}"), 300, _scheduler),
    SuitePart("transfer", ("benchmarks.transfer", "--quick", "--json", "{json}"), 180, _transfer),
    SuitePart("router", ("benchmarks.router", "--quick", "--json", "{json}"), 180, _router),
    SuitePart("load generator", ("benchmarks.load_generator", "--json", "{json}"), 120, _load_generator),
    SuitePart(
        "disaggregation",
        ("benchmarks.disaggregation", "--quick", "--model", "{model}", "--out", "{out}"),
        600,
        _disaggregation,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PART", help=", ".join(part.name for part in PARTS))
    parser.add_argument(
        "--out", type=Path, default=Path("results/suite"), metavar="FOLDER", help="(%(default)s)"
    )
    options = parser.parse_args()
    console = Console(stderr=True)
    return exit_status(lambda: _run(options.only, options.model, options.out.resolve(), console), console)


def _run(only: Sequence[str] | None, model: str, folder: Path, console: Console) -> int:
    unknown = set(only or ()) - {part.name for part in PARTS}
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        raise ConfigurationError(f"--only {' '.join(sorted(unknown))}: there are only {known}")
    folder = results_folder(folder)
    path = prepare_model(model, lambda what, share: None).path
    suite = Suite(datetime.now(UTC).isoformat(timespec="seconds"), MachineDescription.here())
    for part in PARTS:
        if only is None or part.name in only:
            console.print(f"{part.name} (at most {part.within_s / 60:.0f} minutes)", highlight=False)
            suite.parts.append(run_part(part, path, folder))
            write_json(suite, folder / "suite.json")
    show(Console(width=_WIDTH), suite)
    with (folder / "suite.txt").open("w") as text:
        show(Console(file=text, width=_WIDTH), suite)
    return 1 if any(ran.failure for ran in suite.parts) else 0


def run_part(part: SuitePart, model: str, folder: Path) -> PartResult:
    """Never raises for a failure of the part, so that the other parts still run."""
    place = folder / part.name.replace(" ", "-")
    place.mkdir(exist_ok=True)
    result = place / ("outcome.json" if "{out}" in part.arguments else "figures.json")
    # Results of earlier runs are deleted, because disaggregation would continue the last one.
    for old in place.glob("*.json"):
        old.unlink()
    filled: Mapping[str, str] = {"{model}": model, "{json}": str(result), "{out}": str(place)}
    command = [sys.executable, "-m", *(filled.get(word, word) for word in part.arguments)]
    log = place / "output.txt"
    began = time.monotonic()
    try:
        with log.open("wb") as output:
            status = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=part.within_s, check=False
            ).returncode
        headlines = part.read(msgspec.json.decode(result.read_bytes()))
    except subprocess.TimeoutExpired:
        return PartResult(part.name, time.monotonic() - began, [], f"not through after {part.within_s:.0f} s")
    except (OSError, msgspec.MsgspecError, LookupError, TypeError, StopIteration) as error:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        return PartResult(
            part.name, time.monotonic() - began, [], f"no figures (status {status}): {error}\n{tail}"
        )
    return PartResult(part.name, time.monotonic() - began, headlines)


def show(console: Console, suite: Suite) -> None:
    title = f"{suite.machine.processor}, {suite.machine.cores} cores, {suite.made_at}"
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("figure")
    table.add_column("measured", justify="right")
    table.add_column("floor")
    table.add_column("")
    for ran in suite.parts:
        for line in ran.headlines:
            verdict = {True: "met", False: "missed", None: ""}[line.met]
            table.add_row(
                ran.part, line.figure, f"{line.measured:,.2f} {line.unit}".strip(), line.floor, verdict
            )
        table.add_section()
    console.print(table)
    for ran in suite.parts:
        if ran.failure:
            console.print(f"{ran.part}: {ran.failure}", style="red", markup=False)


if __name__ == "__main__":
    sys.exit(main())
