"""Flags of commands, a line each."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable
from typing import Any


def adder(group: argparse._ActionsContainer) -> Callable[..., None]:
    """Returns what adds one flag to this parser or group. Its third argument is the default, whose type is the flag's, or what makes a
    value, if there is no default. What else a flag needs (`nargs`, `required`) is given by name."""

    def add(name: str, metavar: str | None, value: Any, says: str, **more: Any) -> None:
        if isinstance(value, bool):
            group.add_argument(name, action="store_true", help=says)
        elif isinstance(value, enum.Enum):
            choices = [choice.value for choice in type(value)]
            group.add_argument(name, choices=choices, default=value.value, help=says)
        elif callable(value):
            group.add_argument(name, type=value, metavar=metavar, help=says, **more)
        else:
            group.add_argument(name, type=type(value), default=value, metavar=metavar, help=says, **more)

    return add
