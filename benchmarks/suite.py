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
from pathlib import Path

import msgspec

from benchmarks.lib.harness import BenchmarkReport, parser_of, report, run, say
from benchmarks.lib.servers import model_folder
from benchmarks.lib.tables import FLOOR_COLUMNS, Floor, rows_of, table_of
from tandem.base.errors import ConfigurationError
from tandem.cluster.saving import results_folder

_LOG_TAIL_LINES = 12
_COLUMNS = {"part": "{part}", **FLOOR_COLUMNS}


class SuitePart(msgspec.Struct, frozen=True):
    name: str
    arguments: tuple[str, ...]  # for `python -m`; {model} and {out} are replaced
    within_s: float


class PartResult(msgspec.Struct, frozen=True):
    part: str
    seconds: float
    headlines: list[Floor]
    failure: str = ""


PARTS = (
    SuitePart("scheduler", ("benchmarks.scheduler", "--quick"), 300),
    SuitePart("transfer", ("benchmarks.transfer", "--quick"), 180),
    SuitePart("router", ("benchmarks.router", "--quick"), 180),
    SuitePart("load generator", ("benchmarks.load_generator",), 120),
    SuitePart("disaggregation", ("benchmarks.disaggregation", "--quick", "--model", "{model}", "--out", "{out}"), 600),
)


def main() -> int:
    names = [part.name for part in PARTS]
    parser = parser_of(__doc__, out="results/suite")
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--only", nargs="+", default=names, metavar="PART", help=", ".join(names))
    options = parser.parse_args()
    if unknown := set(options.only) - set(names):
        raise ConfigurationError(f"--only {' '.join(sorted(unknown))}: there are only {', '.join(names)}")
    folder, model = results_folder(options.out), str(model_folder(options.model))
    results = []
    for part in PARTS:
        if part.name in options.only:
            say(f"{part.name} (at most {part.within_s / 60:.0f} minutes)")
            results.append(run_part(part, model, folder))
    failures = [f"{ran.part}: {ran.failure}" for ran in results if ran.failure]
    rows = [{"part": ran.part, **row} for ran in results for row in rows_of(ran.headlines)]
    table = table_of("Every part", rows, _COLUMNS, left=5)
    return report(options, results, table, *failures, failed=bool(failures))


def run_part(part: SuitePart, model: str, folder: Path) -> PartResult:
    """Never raises for a failure of the part, so that the other parts still run."""
    place = folder / part.name.replace(" ", "-")
    place.mkdir(exist_ok=True)
    figures, log = place / "figures.json", place / "output.txt"
    figures.unlink(missing_ok=True)
    filled = {"{model}": model, "{out}": str(place)}
    arguments = [filled.get(word, word) for word in part.arguments]
    command = [sys.executable, "-m", *arguments, "--json", str(figures)]
    began = time.monotonic()
    headlines, failure = [], ""
    try:
        with log.open("wb") as output:
            status = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=part.within_s, check=False
            ).returncode
        floors = msgspec.json.decode(figures.read_bytes(), type=BenchmarkReport).floors
        headlines = [floor for floor in floors if floor.measured is not None]
    except subprocess.TimeoutExpired:
        failure = f"not through after {part.within_s:.0f} s"
    except (OSError, msgspec.MsgspecError) as error:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        failure = f"no figures (status {status}): {error}\n{tail}"
    return PartResult(part.name, time.monotonic() - began, headlines, failure)


if __name__ == "__main__":
    run(main)
