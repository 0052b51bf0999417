"""Reads each source of settings: a file, the environment, flags. Each becomes a layer, a flat map from a setting's path to its value and
origin. Names are checked here; values are checked when the layers are combined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import msgspec
import yaml

from tandem.cluster.config import DERIVED, SHORTHANDS, TandemConfig
from tandem.cluster.settings.names import (
    Path,
    addressable,
    all_fields_of,
    did_you_mean,
    dotted,
    fields_of,
    known_settings,
    no_settings,
    section_type,
)

ENV_PREFIX = "TANDEM_"
ENV_SEPARATOR = "__"  # double, because Kubernetes sets TANDEM_ROUTER_PORT for a Service named tandem-router


@dataclass(frozen=True, slots=True)
class SettingValue:
    value: object
    origin: str  # as the operator knows it: "tandem.yaml", "TANDEM_ROUTER__PORT", "--prefill"
    textual: bool  # from a source that has text only
    implied: bool = False  # follows from another setting of the same layer


@dataclass(slots=True)
class Layer:
    values: dict[Path, SettingValue] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)


def read_file(file: FilePath) -> Layer:
    layer = Layer()
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        layer.mistakes.append(f"{file}: cannot be read: {error.strerror}")
        return layer
    except ValueError as error:
        layer.mistakes.append(f"{file}: is not valid YAML: {error}")
        return layer
    if content is None:
        return layer
    if not isinstance(content, dict):
        layer.mistakes.append(f"{file}: must be a mapping from sections to settings, not a {type(content).__name__}")
        return layer
    _read_section(content, TandemConfig, (), str(file), layer)
    return layer


def parse_yaml(text: str) -> Any:
    """Raises ValueError, whatever the parser stumbles over: a date in a 13th month and brackets without end are no errors of its own."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except Exception as error:
        raise ValueError(" ".join(str(error).split())) from error


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that occurs twice; YAML would silently keep the last one. Looks before `<<` merges other keys in, which may be
    overridden."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            wrong = ""
            if not isinstance(key, yaml.ScalarNode):
                wrong = "a key must be a word, not a list or a mapping"
            elif key.value in seen:
                wrong = f"the key {key.value!r} stands twice"
            if wrong:
                raise yaml.constructor.ConstructorError(None, None, wrong, key.start_mark)
            seen.add(key.value)
        return node


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    """At once, so that a mapping that contains itself is refused."""
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read_section(
    content: Mapping[object, object], section: type[msgspec.Struct], prefix: Path, origin: str, layer: Layer
) -> None:
    fields = all_fields_of(section)
    for key, value in content.items():
        path = (*prefix, str(key))
        info = fields.get(str(key))
        if info is None and path in no_settings():
            _give(layer, path, SettingValue(value, origin, textual=False))
            continue
        if info is None:
            hint = did_you_mean(dotted(path), [dotted((*prefix, name)) for name in fields_of(section)])
            hint = hint or did_you_mean(dotted(path), map(dotted, known_settings()))
            layer.mistakes.append(f"{origin}: {dotted(path)} is not a setting{hint}")
            continue
        inner = section_type(info.type)
        if inner is None:
            _give(layer, path, SettingValue(value, origin, textual=False))
        elif isinstance(value, Mapping):
            _read_section(value, inner, path, origin, layer)
        elif value is None:
            continue  # "section:" with nothing under it
        elif inner in SHORTHANDS:
            _give(layer, (*path, SHORTHANDS[inner]), SettingValue(value, origin, textual=False))
        else:
            example = next((dotted((*path, name)) for name in fields_of(inner) if (*path, name) not in DERIVED), None)
            layer.mistakes.append(f"{origin}: {dotted(path)} is a section: set what is in it, such as {example}")


def _give(layer: Layer, path: Path, given: SettingValue) -> None:
    if path in DERIVED:
        layer.mistakes.append(f"{given.origin}: {dotted(path)} cannot be set: {DERIVED[path]}")
    elif path in no_settings():
        layer.mistakes.append(f"{given.origin}: {dotted(path)} {no_settings()[path]}")
    else:
        layer.values[path] = given


def read_environment(environ: Mapping[str, str]) -> Layer:
    """Reads TANDEM_SECTION__NAME=value. Ignores variables without the double underscore."""
    layer = Layer()
    names = {ENV_PREFIX + ENV_SEPARATOR.join(path).upper(): path for path in (*addressable(), *no_settings())}
    single = {name.replace(ENV_SEPARATOR, "_"): name for name in names if ENV_SEPARATOR in name}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable in names:
            _give_text(layer, names[variable], value, variable)
        elif ENV_SEPARATOR in variable:
            layer.mistakes.append(f"{variable}: is not a setting{did_you_mean(variable, names)}")
        elif variable in single and not value.startswith("tcp://"):
            layer.mistakes.append(f"{variable}: is not a setting; did you mean {single[variable]}?")
    return layer


def read_assignments(assignments: Iterable[tuple[str, str | None, str]]) -> Layer:
    """Reads (setting, text, origin) of flags. The text is None if the flag had none."""
    layer = Layer()
    by_name = {dotted(path): path for path in addressable()}
    every_name = by_name | {dotted(path): path for path in no_settings()}
    for name, value, origin in assignments:
        path = every_name.get(name)
        if path is None:
            layer.mistakes.append(f"{origin}: {name or 'an empty name'} is not a setting{did_you_mean(name, by_name)}")
        elif value is None:
            layer.mistakes.append(f"{origin}: {name} has no value: write {name}=VALUE")
        else:
            _give_text(layer, path, value, origin)
    return layer


def _give_text(layer: Layer, path: Path, value: str, origin: str) -> None:
    if path not in known_settings() and path not in no_settings():
        section: Any = TandemConfig
        for name in path:
            section = fields_of(section)[name].type
        path = (*path, SHORTHANDS[section])
    _give(layer, path, SettingValue(value, origin, textual=True))
