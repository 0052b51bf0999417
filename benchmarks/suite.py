"""Runs the benchmark of every part, shortened, one after another, and shows their main figures in one table with the floors.

    python -m benchmarks.suite
    python -m benchmarks.suite --only scheduler transfer --out results/suite

Takes about ten minutes on two cores, alone on the machine. Each benchmark writes its own table and JSON into the folder; the table at the end is
suite.txt and suite.json. Comparisons with other systems need the benchmarks' own flags.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.lib.command import exit_status, now, parser_of, write_text
from benchmarks.lib.servers import model_folder
from benchmarks.lib.tables import VERDICTS, Floor, at_most, seen
from benchmarks.router import FLOOR_TOKEN_US, FLOOR_TTFT_MS
from benchmarks.transfer import floors_of
from tandem.base.errors import ConfigurationError
from tandem.cluster.saving import results_folder, write_json
from tandem.loadgen.report import MachineDescription

_LOG_TAIL_LINES = 12


class SuitePart(msgspec.Struct, frozen=True):
    name: str
    arguments: tuple[str, ...]  # for `python -m`; {model}, {json} and {out} are replaced
    within_s: float
    read: Callable[[Any], list[Floor]]


class PartResult(msgspec.Struct, frozen=True):
    part: str
    seconds: float
    headlines: list[Floor]
    failure: str = ""


class Suite(msgspec.Struct):
    made_at: str
    machine: MachineDescription
    parts: list[PartResult] = []


def _scheduler(found: Any) -> list[Floor]:
    at_256 = next(row for row in found["workloads"] if row["running"] == 256)
    return [
        seen("a step at 256 running requests", at_256["tandem_us"]["step"], "µs"),
        seen("adding a request", at_256["tandem_us"]["add_request"], "µs"),
    ]


def _router(found: Any) -> list[Floor]:
    streams = max(found["streams"], key=lambda row: row["streams"])
    return [
        at_most("added to the first token", found["added_ttft_ms"], FLOOR_TTFT_MS, "ms"),
        at_most(
            f"CPU per token, {streams['streams']} streams",
            streams["added_us_per_token"],
            FLOOR_TOKEN_US,
            "µs",
        ),
        *(seen(f"requests, {name}", row["per_s"], "per s") for name, row in found["requests"].items()),
    ]


def _load_generator(found: Any) -> list[Floor]:
    worst = max(found["compared"], key=lambda row: abs(row["ours"] / row["known"] - 1))
    off = 100 * abs(worst["ours"] / worst["known"] - 1)
    return [
        at_most(f"furthest from what is known: {worst['figure']}", off, 5, "%"),
        seen("CPU per chunk", found["ours_us_per_chunk"], "µs"),
    ]


def _disaggregation(found: Any) -> list[Floor]:
    shown = []
    for one in found["examined"]:
        what, summary = f"{found['titles'][one['system']]}, {one['cell']}", one["summary"]
        if one["cell"] == "1 user":
            shown.append(seen(f"{what}: TTFT p50", summary["ttft_ms"]["p50"], "ms"))
            shown.append(seen(f"{what}: TPOT p50", summary["tpot_ms"]["p50"], "ms"))
        if one["cell"] == "8 users":
            shown.append(seen(what, summary["output_tokens_per_s"], "tokens/s"))
    floors = msgspec.convert(found["floors"], list[Floor])
    return shown + [floor for floor in floors if floor.measured is not None]


PARTS = (
    SuitePart("scheduler", ("benchmarks.scheduler", "--quick", "--json", "{json}"), 300, _scheduler),
    SuitePart("transfer", ("benchmarks.transfer", "--quick", "--json", "{json}"), 180, floors_of),
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
    parser = parser_of(__doc__, out="results/suite")
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PART", help=", ".join(part.name for part in PARTS))
    options = parser.parse_args()
    console = Console(stderr=True)
    return exit_status(lambda: _run(options.only, options.model, options.out.resolve(), console), console)


def _run(only: Sequence[str] | None, model: str, folder: Path, console: Console) -> int:
    unknown = set(only or ()) - {part.name for part in PARTS}
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        raise ConfigurationError(f"--only {' '.join(sorted(unknown))}: there are only {known}")
    folder = results_folder(folder)
    path = str(model_folder(model))
    suite = Suite(now(), MachineDescription.here())
    for part in PARTS:
        if only is None or part.name in only:
            console.print(f"{part.name} (at most {part.within_s / 60:.0f} minutes)", highlight=False)
            suite.parts.append(run_part(part, path, folder))
            write_json(suite, folder / "suite.json")
    write_text(lambda to: show(to, suite), folder / "suite.txt", 120)
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
            table.add_row(ran.part, line.claim, line.figure, line.required, VERDICTS[line.met])
        table.add_section()
    console.print(table)
    for ran in suite.parts:
        if ran.failure:
            console.print(f"{ran.part}: {ran.failure}", style="red", markup=False)


if __name__ == "__main__":
    sys.exit(main())
