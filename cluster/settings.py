"""From defaults, file, environment and flags to one TandemConfig, or to every mistake in them at once.

Each source becomes a layer: a flat map from a setting's path to what was given and where. Later layers win.
Names and types are checked against the structs of `cluster.config`, which are the only list of settings.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path as FilePath
from typing import Any

import msgspec
import yaml

from cluster.config import DERIVED, SHORTHANDS, TandemConfig
from cluster.describe import parse_size, sentence_for
from cluster.rules import broken_rules
from wire.errors import ConfigurationError
from wire.nodes import Role

ENV_PREFIX = "TANDEM_"
ENV_SEPARATOR = (
    "__"  # double, because Kubernetes invents TANDEM_ROUTER_PORT for a Service named tandem-router
)

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Given:
    value: object
    origin: str  # as the operator knows it: "tandem.yaml", "TANDEM_ROUTER__PORT", "--prefill"
    textual: bool  # from a place that has nothing but text
    implied: bool = False  # follows from another setting of the same layer


@dataclass(slots=True)
class Layer:
    givens: dict[Path, Given] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration, and where each value that is not a default came from."""

    config: TandemConfig
    origins: dict[Path, str]


class SettingsError(ConfigurationError):
    """Every mistake, each a sentence that says what to change."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        if len(mistakes) == 1:
            super().__init__(mistakes[0])
        else:
            super().__init__(
                "\n".join([f"{len(mistakes)} mistakes in the settings:", *(f"  {m}" for m in mistakes)])
            )


# --- the list of settings


def section_type(annotation: Any) -> type[msgspec.Struct] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


@cache
def fields_of(section: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {info.encode_name: info for info in msgspec.structs.fields(section)}


def leaves_of(section: type[msgspec.Struct], prefix: Path = ()) -> dict[Path, Any]:
    """Every setting's path and type."""
    leaves: dict[Path, Any] = {}
    for name, info in fields_of(section).items():
        inner = section_type(info.type)
        if inner is not None:
            leaves |= leaves_of(inner, (*prefix, name))
        else:
            leaves[(*prefix, name)] = info.type
    return leaves


@cache
def known_settings() -> dict[Path, Any]:
    return leaves_of(TandemConfig)


def dotted(path: Iterable[str]) -> str:
    return ".".join(path)


def _did_you_mean(name: str, candidates: Iterable[str]) -> str:
    candidates = sorted(candidates)
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if not close:  # the right last word in the wrong section
        last = name.rpartition(".")[2]
        close = [c for c in candidates if c.rpartition(".")[2] == last][:1]
    return f"; did you mean {close[0]}?" if close else ""


# --- the layers


def read_file(file: FilePath) -> Layer:
    layer = Layer()
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        layer.mistakes.append(f"{file}: cannot be read: {error.strerror}")
        return layer
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        layer.mistakes.append(f"{file}: is not valid YAML: {' '.join(str(error).split())}")
        return layer
    if content is None:
        return layer
    if not isinstance(content, dict):
        layer.mistakes.append(
            f"{file}: must be a mapping from sections to settings, not a {type(content).__name__}"
        )
        return layer
    _read_section(content, TandemConfig, (), str(file), layer)
    return layer


class _UniqueKeys(yaml.SafeLoader):
    """A key that stands twice is a mistake: YAML would silently keep the last."""


def _unique_mapping(loader: _UniqueKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
            )
        seen.add(key_node.value)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def _read_section(
    content: Mapping[object, object], section: type[msgspec.Struct], prefix: Path, origin: str, layer: Layer
) -> None:
    fields = fields_of(section)
    for key, value in content.items():
        path = (*prefix, str(key))
        info = fields.get(str(key))
        if info is None:
            hint = _did_you_mean(dotted(path), [dotted((*prefix, name)) for name in fields])
            hint = hint or _did_you_mean(dotted(path), map(dotted, known_settings()))
            layer.mistakes.append(f"{origin}: {dotted(path)} is not a setting{hint}")
            continue
        inner = section_type(info.type)
        if inner is None:
            _give(layer, path, Given(value, origin, textual=False))
        elif isinstance(value, Mapping):
            _read_section(value, inner, path, origin, layer)
        elif value is None:
            continue  # "section:" with nothing under it
        elif inner in SHORTHANDS:
            _give(layer, (*path, SHORTHANDS[inner]), Given(value, origin, textual=False))
        else:
            example = next(dotted((*path, name)) for name in fields_of(inner) if (*path, name) not in DERIVED)
            layer.mistakes.append(
                f"{origin}: {dotted(path)} is a section: set what is in it, such as {example}"
            )


def _give(layer: Layer, path: Path, given: Given) -> None:
    if path in DERIVED:
        layer.mistakes.append(f"{given.origin}: {dotted(path)} cannot be set: {DERIVED[path]}")
    else:
        layer.givens[path] = given


def read_environment(environ: Mapping[str, str]) -> Layer:
    """TANDEM_SECTION__NAME=value. Without the double underscore a variable is none of ours."""
    layer = Layer()
    names = {ENV_PREFIX + ENV_SEPARATOR.join(path).upper(): path for path in _addressable()}
    single = {name.replace(ENV_SEPARATOR, "_"): name for name in names if ENV_SEPARATOR in name}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable in names:
            _give_text(layer, names[variable], value, variable)
        elif ENV_SEPARATOR in variable:
            layer.mistakes.append(f"{variable}: is not a setting{_did_you_mean(variable, names)}")
        elif variable in single and not value.startswith("tcp://"):
            layer.mistakes.append(f"{variable}: is not a setting; did you mean {single[variable]}?")
    return layer


def read_assignments(assignments: Iterable[tuple[str, str | None, str]]) -> Layer:
    """(setting, text, origin): what flags say; no text where a flag left it out."""
    layer = Layer()
    addressable = {dotted(path): path for path in _addressable()}
    for name, value, origin in assignments:
        path = addressable.get(name)
        if path is None:
            layer.mistakes.append(
                f"{origin}: {name or 'an empty name'} is not a setting{_did_you_mean(name, addressable)}"
            )
        elif value is None:
            layer.mistakes.append(f"{origin}: {name} has no value: write {name}=VALUE")
        else:
            _give_text(layer, path, value, origin)
    return layer


@cache
def _addressable() -> frozenset[Path]:
    """What a flag or a variable can name: every setting, and every section that has a shorthand."""
    sections: set[Path] = set()

    def walk(section: type[msgspec.Struct], prefix: Path) -> None:
        for name, info in fields_of(section).items():
            inner = section_type(info.type)
            if inner is not None:
                if inner in SHORTHANDS:
                    sections.add((*prefix, name))
                walk(inner, (*prefix, name))

    walk(TandemConfig, ())
    return frozenset(known_settings()) | sections


def _give_text(layer: Layer, path: Path, value: str, origin: str) -> None:
    if path not in known_settings():
        section: Any = TandemConfig
        for name in path:
            section = fields_of(section)[name].type
        path = (*path, SHORTHANDS[section])
    _give(layer, path, Given(value, origin, textual=True))


# --- from layers to a configuration


def resolve(layers: Iterable[Layer]) -> Settings:
    """Raises SettingsError with everything that is wrong anywhere."""
    mistakes: list[str] = []
    merged: dict[Path, Given] = {}
    for layer in layers:
        mistakes += layer.mistakes
        _choose_layout(merged, layer)
        merged |= layer.givens
    values: dict[Path, object] = {}
    for path, given in merged.items():
        try:
            values[path] = _convert(path, given)
        except ConfigurationError as error:
            mistakes.append(str(error))
    config = _build(values, merged, mistakes)
    if mistakes or config is None:
        raise SettingsError(mistakes)
    return Settings(config, {path: given.origin for path, given in merged.items()})


def _choose_layout(lower: dict[Path, Given], layer: Layer) -> None:
    """Aggregated nodes stand instead of the two pools: who asks for one layout does not get the other's
    defaults, nor the other's counts from a file that it overrides."""
    counts = {role: ("pools", role.value, "nodes") for role in Role}
    given = {role: layer.givens[path] for role, path in counts.items() if path in layer.givens}
    separate = Role.PREFILL in given or Role.DECODE in given
    aggregated = given.get(Role.AGGREGATED)
    if aggregated is not None and not separate and str(aggregated.value) != "0":
        for role in (Role.PREFILL, Role.DECODE):
            lower[counts[role]] = Given(0, aggregated.origin, textual=False, implied=True)
    elif separate and aggregated is None:
        lower.pop(counts[Role.AGGREGATED], None)
        for path in [path for path, below in lower.items() if below.implied]:
            del lower[path]


def _convert(path: Path, given: Given) -> object:
    annotation = known_settings()[path]
    value = given.value
    if path == ("cache", "memory_bytes") and isinstance(value, str):
        value = parse_size(value, f"{given.origin}: {dotted(path)}")
    elif given.textual and isinstance(value, str) and value[:1] in ("[", "{") and annotation is not str:
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise _refusal(path, given, "is not valid YAML") from error
    try:
        converted = msgspec.convert(value, annotation, strict=not given.textual)
    except msgspec.ValidationError as error:
        raise _refusal(path, given, sentence_for(annotation, value, str(error))) from error
    if isinstance(converted, float) and not math.isfinite(converted):
        raise _refusal(path, given, "must be a finite number")
    return converted


def _refusal(path: Path, given: Given, sentence: str) -> ConfigurationError:
    return ConfigurationError(f"{given.origin}: {dotted(path)} {sentence}")


def _build(
    values: dict[Path, object], merged: Mapping[Path, Given], mistakes: list[str]
) -> TandemConfig | None:
    """Each value alone against the defaults first: a struct's own checks stop at the first mistake, we want all."""
    defaults = TandemConfig()
    sound: dict[Path, object] = {}
    for path, value in values.items():
        try:
            _with_values(defaults, {path: value})
        except ConfigurationError as error:
            mistakes.append(f"{merged[path].origin}: {error}")
        else:
            sound[path] = value
    try:
        config = _with_values(defaults, sound)
    except ConfigurationError as error:
        mistakes.append(str(error))
        return None
    for path, sentence in broken_rules(config):
        origin = f"{merged[path].origin}: " if path in merged else ""
        mistakes.append(f"{origin}{dotted(path)} {sentence}")
    return config


def _with_values(config: TandemConfig, values: Mapping[Path, object]) -> TandemConfig:
    def rebuild(section: Any, prefix: Path) -> Any:
        changes: dict[str, object] = {}
        kind: type[msgspec.Struct] = type(section)
        for name, info in fields_of(kind).items():
            path = (*prefix, name)
            if section_type(info.type) is not None:
                inner = getattr(section, name)
                rebuilt = rebuild(inner, path)
                if rebuilt is not inner:
                    changes[name] = rebuilt
            elif path in values:
                changes[name] = values[path]
        return msgspec.structs.replace(section, **changes) if changes else section

    rebuilt: TandemConfig = rebuild(config, ())
    return rebuilt
