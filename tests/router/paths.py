"""The paths that take a body, wings' among them. A wing may be deleted, and its cases in tests of all paths with it."""

from __future__ import annotations

from typing import Any

from tandem.router.http.request_fields import FIELDS

SERVED = {one.path for one in FIELDS.paths.values()}


def of_served(*cases: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The cases at paths that are there. Each begins with its path."""
    return [case for case in cases if case[0] in SERVED]
