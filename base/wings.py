"""Wings: parts of a room that a deployment may never use, and that can be deleted.

A room's core never imports a wing. It has a table of their modules' names, reads it with `find_wings`, and asks each module for what a
wing of that room has (a protocol beside the table). A row whose folder was deleted counts for nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType


def find_wings(names: Sequence[str]) -> list[ModuleType]:
    """Imports those of these modules that exist, in the order of the table. An error inside a module is raised: only its absence is
    allowed."""
    return [importlib.import_module(name) for name in names if is_there(name)]


def find_wing(name: str) -> ModuleType | None:
    return next(iter(find_wings((name,))), None)


def is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the folder that it was in is deleted, too
        return False
