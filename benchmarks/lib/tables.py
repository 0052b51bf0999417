"""Tables of rows, and floors: what a figure must reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.table import Table

_ABSENT = "–"
_VERDICTS = {True: "met", False: "missed", None: ""}


class Floor(msgspec.Struct, frozen=True):
    """A claim about a figure. `measured` is None if a run did not measure it, `met` also if nothing is required."""

    claim: str
    required: str
    measured: float | None
    met: bool | None
    unit: str = ""

    @property
    def figure(self) -> str:
        return "not measured" if self.measured is None else f"{self.measured:,.2f} {self.unit}".strip()


def at_most(claim: str, measured: float | None, floor: float, unit: str = "") -> Floor:
    met = None if measured is None else measured <= floor
    return Floor(claim, f"at most {floor:g} {unit}".strip(), measured, met, unit)


def at_least(claim: str, measured: float | None, floor: float, unit: str = "") -> Floor:
    met = None if measured is None else measured >= floor
    return Floor(claim, f"at least {floor:g} {unit}".strip(), measured, met, unit)


def seen(claim: str, measured: float, unit: str = "") -> Floor:
    """A figure without a floor."""
    return Floor(claim, "", measured, None, unit)


def missed(floors: Iterable[Floor]) -> bool:
    return any(floor.met is False for floor in floors)


FLOOR_COLUMNS = {"claim": "{claim}", "floor": "{required}", "measured": "{figure}", "": "{verdict}"}


def rows_of(floors: Iterable[Floor]) -> list[dict[str, str]]:
    return [
        {"claim": floor.claim, "required": floor.required, "figure": floor.figure, "verdict": _VERDICTS[floor.met]}
        for floor in floors
    ]


def floors_table(floors: Iterable[Floor]) -> Table:
    return table_of("Main figures and floors", rows_of(floors), FLOOR_COLUMNS, left=4)


def table_of(title: str, rows: Sequence[Any], columns: Mapping[str, str] | None = None, *, left: int = 1) -> Table:
    """Makes a table of dicts or structs. `columns` has each column's heading and a template for its cells, which names fields of the row, such
    as "{ttft_ms:.1f}"; a field that is absent or None leaves a dash. Without `columns` every field has one. The first `left` columns are
    words, and all others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    fields = [dict(row) if isinstance(row, dict) else msgspec.structs.asdict(row) for row in rows]
    if columns is None:
        first = fields[0] if fields else {}
        columns = {name.replace("_", " "): _template(name, value) for name, value in first.items()}
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="left" if index < left else "right")
    for row in fields:
        table.add_row(*(_cell(template, row) for template in columns.values()))
    return table


def _template(name: str, value: object) -> str:
    return f"{{{name}:,.3f}}" if isinstance(value, float) else f"{{{name}}}"


def _cell(template: str, row: Mapping[str, Any]) -> str:
    try:
        return template.format_map(row)
    except (KeyError, TypeError):
        return _ABSENT
