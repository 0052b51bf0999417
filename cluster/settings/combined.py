"""Combines layers into one TandemConfig, or reports all mistakes in them at once. Later layers win.

Values are checked against the types of the fields of `cluster.config`'s structs, then against `rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.settings import allows_null, choices_of, kinds_at, refusal
from tandem.cluster.config import OF_ALL_POOLS, TandemConfig
from tandem.cluster.describe import LARGEST, parse_size
from tandem.cluster.models.store import name_at
from tandem.cluster.settings.layers import Layer, SettingValue, parse_yaml
from tandem.cluster.settings.names import Path, did_you_mean, dotted, fields_of, known_settings, section_type
from tandem.cluster.settings.rules import broken_rules
from tandem.wire.nodes import Role


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration, and the origin of each value that is not a default."""

    config: TandemConfig
    origins: dict[Path, str]


class SettingsError(ConfigurationError):
    """All mistakes, each as a sentence that says what to change."""

    def __init__(self, mistakes: list[str]) -> None:
        self.mistakes = mistakes
        if len(mistakes) == 1:
            super().__init__(mistakes[0])
        else:
            super().__init__("\n".join([f"{len(mistakes)} mistakes in the settings:", *(f"  {m}" for m in mistakes)]))


def resolve(layers: Iterable[Layer]) -> Settings:
    """Raises SettingsError with the mistakes of all layers."""
    mistakes: list[str] = []
    merged: dict[Path, SettingValue] = {}
    for layer in layers:
        mistakes += layer.mistakes
        _choose_layout(merged, layer)
        merged |= layer.values
    values: dict[Path, object] = {}
    for path, given in merged.items():
        try:
            values[path] = _convert(path, given)
        except ConfigurationError as error:
            mistakes.append(str(error))
    config = _build(values, merged, mistakes)
    if mistakes:
        raise SettingsError(mistakes)
    return Settings(config, {path: given.origin for path, given in merged.items()})


def _choose_layout(lower: dict[Path, SettingValue], layer: Layer) -> None:
    """Setting aggregated nodes sets the default sizes of the prefill and decode pools, and those of lower layers, to 0; and the other way
    round."""
    counts = {role: ("pools", role.value, "nodes") for role in Role}
    given = {role: layer.values[path] for role, path in counts.items() if path in layer.values}
    separate = any(role.hands_over for role in given)
    aggregated = given.get(Role.AGGREGATED)
    if aggregated is not None and not separate and str(aggregated.value) != "0":
        for role in filter(lambda role: role.hands_over, Role):
            lower[counts[role]] = SettingValue(0, aggregated.origin, textual=False, implied=True)
    elif separate and aggregated is None:
        lower.pop(counts[Role.AGGREGATED], None)
        for path in [path for path, below in lower.items() if below.implied]:
            del lower[path]


def _convert(path: Path, given: SettingValue) -> object:
    annotation = known_settings()[path]
    value = given.value
    if isinstance(value, str) and not value.isprintable() and value != value.encode(errors="replace").decode():
        raise _refusal(path, given, "has bytes that are no UTF-8")
    if path[0] == "pools" and path[-1] in OF_ALL_POOLS:
        return _of_pool(path, given)
    if path == ("cache", "memory_bytes") and isinstance(value, str):
        value = parse_size(value, f"{given.origin}: {dotted(path)}")
    elif given.textual and isinstance(value, str) and value[:1] in ("[", "{") and annotation is not str:
        try:
            value = parse_yaml(value)
        except ValueError as error:
            raise _refusal(path, given, "is not valid YAML") from error
    if path in (("model", "path"), ("model", "draft")) and isinstance(value, str):
        value = name_at(value)
    if path == ("cache", "tiers"):
        value = _with_sizes(value, given)
    _check_spaces(path, given, value)
    if given.textual and value == "null" and allows_null(annotation):
        return None
    if isinstance(value, bool) and (word := "on" if value else "off") in choices_of(kinds_at(annotation, "")):
        value = word  # YAML takes both words for truth values
    try:
        converted = msgspec.convert(value, annotation, strict=not given.textual)
    except msgspec.ValidationError as error:
        raise _refusal(path, given, refusal(annotation, value, str(error))) from error
    if isinstance(converted, float) and not math.isfinite(converted):
        raise _refusal(path, given, "must be a finite number")
    for number in _inside(converted):
        if isinstance(number, int) and abs(number) > LARGEST:
            raise _refusal(path, given, f"must be at most {LARGEST}: messages cannot carry a larger number")
        if isinstance(number, float) and not math.isfinite(number):
            raise _refusal(path, given, f"is not right: it has {number}, which is no number")
    return converted


def _inside(value: object) -> Iterator[object]:
    """Yields what lists and mappings hold, however deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _inside(each)
    else:
        yield value


def _of_pool(path: Path, given: SettingValue) -> dict[str, object]:
    """Converts a pool's overrides of a section, each value by its type in that section."""
    section, value = path[-1], given.value
    if given.textual and isinstance(value, str):
        try:
            value = parse_yaml(value)
        except ValueError as error:
            raise _refusal(path, given, "is not valid YAML") from error
    _check_spaces(path, given, value)
    if not isinstance(value, dict):
        raise _refusal(path, given, f"must be settings of {section}, such as {{{_EXAMPLES[section]}}}")
    names = {known[1] for known in known_settings() if known[0] == section and len(known) == 2}
    own = names - set(OF_ALL_POOLS[section])
    found: dict[str, object] = {}
    for name, each in value.items():
        if name in OF_ALL_POOLS[section]:
            raise _refusal(path, given, f"has {name}, which must be the same for all nodes: set {section}.{name}")
        if name not in own:
            raise _refusal(
                path,
                given,
                f"has {str(name)[:80]!r}, which is not a setting of {section}{did_you_mean(str(name), own)}",
            )
        origin = f"{given.origin}: {dotted(path)}"
        found[name] = msgspec.to_builtins(_convert((section, name), SettingValue(each, origin, textual=False)))
    return found


def _check_spaces(path: Path, given: SettingValue, value: object) -> None:
    """YAML reads {GPU:1} as a name, `GPU:1`, without a value. In a shell people write that, because a space needs quotes."""
    for mapping in value if isinstance(value, list) else [value]:
        for name, inside in mapping.items() if isinstance(mapping, dict) else ():
            key, colon, rest = str(name).partition(":")
            if inside is None and colon and rest:
                raise _refusal(
                    path, given, f"needs a space after the colon, and in a shell quotes: '{{{key}: {rest}}}'"
                )


_EXAMPLES = {"cache": "block_size: 32", "scheduler": "max_num_seqs: 64"}


def _with_sizes(tiers: object, given: SettingValue) -> object:
    """Converts `cpu: 8GiB` to bytes. Anything but a list of mappings is returned as it is, for the check of types."""

    def in_bytes(name: object, value: object) -> object:
        if name in ("cpu", "size") and isinstance(value, str):
            return parse_size(value, f"{given.origin}: cache.tiers: {name}")
        return value

    if not isinstance(tiers, list):
        return tiers
    return [
        {name: in_bytes(name, value) for name, value in tier.items()} if isinstance(tier, dict) else tier
        for tier in tiers
    ]


def _refusal(path: Path, given: SettingValue, sentence: str) -> ConfigurationError:
    return ConfigurationError(f"{given.origin}: {dotted(path)} {sentence}")


def _build(values: dict[Path, object], merged: Mapping[Path, SettingValue], mistakes: list[str]) -> TandemConfig:
    """Builds the configuration of all values that fit together. A struct's own checks stop at their first mistake, and compare values that
    may be right only together: so all are tried at once, and without the ones that are to blame again."""
    defaults, left = TandemConfig(), dict(values)
    refused = merged.keys() - values.keys()
    if ("pools", Role.AGGREGATED.value, "nodes") in refused:
        left = {path: value for path, value in left.items() if not merged[path].implied}
    while True:
        try:
            config = _with_values(defaults, left)
            break
        except ConfigurationError as error:
            sentence = str(error)
        to_blame = _to_blame(left, sentence)
        if not _mentions(sentence, refused):
            mistakes.append(f"{_origin(to_blame, sentence, merged)}{sentence}")
        refused |= to_blame
        left = {path: value for path, value in left.items() if path not in to_blame}
    for path, end in broken_rules(config):
        origin = f"{merged[path].origin}: " if path in merged else ""
        if not _mentions(end, refused):
            mistakes.append(f"{origin}{dotted(path)} {end}")
    return config


def _to_blame(values: Mapping[Path, object], sentence: str) -> set[Path]:
    """Returns the fewest of the values, one or two of a section, that make the same mistake by themselves."""
    defaults = TandemConfig()
    pairs = (pair for pair in combinations(values, 2) if pair[0][0] == pair[1][0])
    for paths in chain(((path,) for path in values), pairs):
        try:
            _with_values(defaults, {path: values[path] for path in paths})
        except ConfigurationError as error:
            if str(error) == sentence:
                return set(paths)
    return set(values)


_NAME = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")


def _mentions(sentence: str, refused: Collection[Path]) -> bool:
    """Returns whether the mistake may only follow from that of a setting which was refused already."""
    return any(tuple(name.split(".")) in refused for name in _NAME.findall(sentence))


def _origin(paths: Collection[Path], sentence: str, merged: Mapping[Path, SettingValue]) -> str:
    named = [path for path in paths if sentence.startswith(dotted(path))]
    return f"{merged[max(named or paths)].origin}: "


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
