"""Continues an experiment that was interrupted, without repeating what is finished."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.side_by_side.outcome import ComparisonOutcome, Gaps
from tandem.base.errors import ConfigurationError
from tandem.cluster.saving import as_json


class KeptResults(msgspec.Struct, frozen=True):
    """What a folder has of an experiment: outcome.json for readers, and the data of the plots."""

    outcome: ComparisonOutcome
    gaps: Gaps


def keep(folder: Path, kept: KeptResults) -> None:
    """Replaces each file atomically."""
    for name, content in (("outcome.json", kept.outcome), ("gaps.json", kept.gaps)):
        try:
            unfinished = folder / f"{name}.new"
            unfinished.write_bytes(
                as_json(content) if name == "outcome.json" else msgspec.json.encode(content)
            )
            unfinished.replace(folder / name)
        except OSError as error:
            raise ConfigurationError(f"{folder / name} cannot be written: {error}") from error


def resume(folder: Path, fresh: ComparisonOutcome) -> KeptResults:
    """Returns what the folder has, if it is of the same experiment, else `fresh`. Raises ConfigurationError for a folder of another experiment,
    whose figures must neither be mixed with these nor lost."""
    file = folder / "outcome.json"
    if not file.exists():
        return KeptResults(fresh, {})
    try:
        found = msgspec.json.decode(file.read_bytes(), type=ComparisonOutcome)
        gaps = msgspec.json.decode((folder / "gaps.json").read_bytes(), type=Gaps)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{folder} has an experiment that cannot be gone on with ({error}): name another folder with --out"
        ) from error
    different = _difference(found, fresh)
    if different is not None:
        raise ConfigurationError(
            f"{folder} has another experiment ({different}): name another folder with --out"
        )
    # Systems that are new are measured; results of systems that are left out this time are kept.
    found.titles = found.titles | fresh.titles
    found.settings = fresh.settings
    found.command = fresh.command
    found.absences = [absence for absence in found.absences if absence.system not in fresh.titles]
    return KeptResults(found, gaps)


def _difference(found: ComparisonOutcome, fresh: ComparisonOutcome) -> str | None:
    """Compares everything but the number of runs: more runs belong to the same experiment."""
    if found.machine != fresh.machine:
        return "on another machine"
    wanted = msgspec.json.decode(msgspec.json.encode(fresh.settings))  # as they are in the file
    for name in sorted({*found.settings, *wanted} - {"runs"}):
        if found.settings.get(name) != wanted.get(name):
            return f"with another {name}"
    return None
