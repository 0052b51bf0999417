"""Writes the JSON files and pictures that commands produce."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.base.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PICTURES = (".png", ".svg")


def as_json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def write_json(value: object, file: Path) -> None:
    try:
        file.write_bytes(as_json(value))
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error}") from error


def results_folder(named: Path) -> Path:
    """Returns the folder that `--out` names. Creates it if it does not exist."""
    folder = named.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out {folder} cannot be created: {error}") from error
    return folder


def check_file(file: Path) -> None:
    """Raises ConfigurationError for a file that cannot be written, before the work whose result it is to hold."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigurationError(f"{file} cannot be written: name another file")


def check_picture(file: Path, option: str) -> None:
    """Raises ConfigurationError for whatever `save_picture` would refuse, before the work that the picture is to show."""
    if file.suffix.lower() not in _PICTURES:
        raise ConfigurationError(f"{option} {file}: must end in {' or '.join(_PICTURES)}")
    check_file(file)
    new_figure(1, 1)


def new_figure(width: float, height: float) -> Figure:
    """Returns a figure that needs no screen. Only pictures need matplotlib, which is in the `bench` extra."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError as error:
        raise ConfigurationError("a picture needs matplotlib: pip install matplotlib") from error
    figure = MatplotlibFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(figure: Figure, file: Path) -> None:
    """Writes the figure in the format that the file's ending names."""
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error}") from error
