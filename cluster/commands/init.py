"""`tandem init`: writes a `tandem.yaml` that names and explains every setting, and a cluster's files."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path as FilePath

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.settings import description_of
from tandem.cluster.commands.show_config import scalar
from tandem.cluster.config import DERIVED
from tandem.cluster.describe import without_links
from tandem.cluster.saving import as_json
from tandem.cluster.settings.combined import Settings
from tandem.cluster.settings.layers import Layer, read_file
from tandem.cluster.settings.names import Path, fields_of, section_type
from tandem.cluster.settings.schema import FILE_NAME, json_schema

MANIFESTS = FilePath(__file__).resolve().parents[2] / "manifests"
CLUSTERS = ("static", "aws", "gcp", "kuberay")

_WIDTH = 110


def cluster_settings(cluster: str | None) -> Layer:
    """Returns the settings in which this kind of cluster must differ from a single machine."""
    if cluster is None:
        return Layer()
    layer = read_file(_manifests() / ("kuberay/base" if cluster == "kuberay" else "ray") / "tandem.yaml")
    for path in [path for path in layer.values if path == ("model", "path")]:
        del layer.values[path]
    return layer


def init(folder: FilePath, settings: Settings, cluster: str | None) -> list[FilePath]:
    """Returns the files that it wrote. Raises ConfigurationError, and leaves none, if one of them exists or cannot be written."""
    files = {"tandem.yaml": commented(settings)}
    if cluster == "kuberay":
        source = _manifests() / "kuberay"
        named = {file.relative_to(source).as_posix(): file for file in sorted(source.rglob("*")) if file.is_file()}
        files = {name: file.read_text(encoding="utf-8") for name, file in named.items()}
        files["base/tandem.yaml"] = commented(settings)
    elif cluster is not None:
        text = (_manifests() / "ray" / f"{cluster}.yaml").read_text(encoding="utf-8")
        files[f"{cluster}.yaml"] = text.replace("manifests/ray/", "")
    targets = {folder / name: text for name, text in files.items()}
    there = [str(file) for file in targets if file.exists()]
    # Not of those: it says the same in every folder.
    settings_file = "base/tandem.yaml" if cluster == "kuberay" else "tandem.yaml"
    targets[(folder / settings_file).with_name(FILE_NAME)] = as_json(json_schema()).decode()
    if there:
        raise ConfigurationError(
            f"{', '.join(there)} would be overwritten: name another folder, or move the files away"
        )
    new = [file for file in targets if not file.exists()]
    for file, text in targets.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            for made in new:  # they would be in the way of the next try
                with contextlib.suppress(OSError):
                    made.unlink()
            raise ConfigurationError(f"{file} cannot be written: {error}") from error
    return list(targets)


def _manifests() -> FilePath:
    if not MANIFESTS.is_dir():
        raise ConfigurationError(f"the files for clusters are not at {MANIFESTS}: install Tandem from its wheel")
    return MANIFESTS


def commented(settings: Settings) -> str:
    """Returns a file with these settings. Settings that are not set stand in it as comments with their defaults."""
    head = (
        f"# yaml-language-server: $schema={FILE_NAME}\n"
        "# The settings of `tandem serve`. What follows a # is the default: take the # away to change it.\n"
        "# Flags and variables (TANDEM_ROUTER__PORT=9000) win over this file; `tandem config` prints the result.\n"
    )
    return head + "\n".join(_lines(settings.config, (), settings)) + "\n"


def _lines(section: msgspec.Struct, prefix: Path, settings: Settings) -> Iterator[str]:
    indent = "  " * len(prefix)
    kind: type[msgspec.Struct] = type(section)
    for name, info in fields_of(kind).items():
        path = (*prefix, name)
        if path in DERIVED:
            continue
        value = getattr(section, name)
        if section_type(info.type) is not None:
            yield "" if not prefix else f"{indent}#"
            yield f"{indent}{name}:"
            yield from _lines(value, path, settings)
            continue
        about = without_links(description_of(info.type))
        yield from (f"{indent}# {line}" for line in textwrap.wrap(about, _WIDTH - len(indent) - 2))
        is_set = path in settings.origins
        yield f"{indent}{'' if is_set else '# '}{name}: {scalar(value)}"
