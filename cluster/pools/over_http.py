"""What an operator's HTTP key may not change: settings by which it could run programs on the cluster's machines, or reach their files."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import ControllerConfig, TandemConfig

# Settings that choose what a process runs, or what an HTTP key may do.
_CODE = (
    ("router", "env"),
    ("controller", "env"),
    ("controller", "admin_folders"),
    ("controller", "admin_may_run_code"),
    ("model", "engine"),
    ("model", "engine_args"),  # some of them name modules and paths
    ("model", "engine_python"),
    ("transfer", "connector"),  # may name a module
    ("transfer", "options"),
)
_CODE_OF_POOLS = ("env", "transfer_options", "engine_args")
# Whatever is written there is a path.
_PATHS = (
    "hidden_states_folder",
    "trace_folder",
    "batches_folder",
    "disk",
    "api_keys_file",
    "receipt_key_file",
    "tls_certificate",
    "tls_key",
)
_FREE = (("router", "api_keys"),)  # texts that may look like paths
# A command asks by a dry run under which of two paths the cluster knows its model.
_ASKED = (("model", "path"), ("router", "tokenizer_path"))
_INSTEAD = (
    "run the command on a machine of the cluster without --url, or have it allowed there: controller.admin_folders names folders, "
    "controller.admin_may_run_code allows everything"
)


def check_config(running: TandemConfig, wanted: TandemConfig, *, dry_run: bool) -> None:
    """Raises ConfigurationError if an HTTP key may not change `running` to this. What is unchanged passes."""
    if running.controller.admin_may_run_code:
        return
    folders = running.controller.admin_folders
    refused = {
        ".".join(path)
        for path, before, after in _changes((), msgspec.to_builtins(running), msgspec.to_builtins(wanted))
        if not (dry_run and path in _ASKED) and _is_refused(path, before, after, folders)
    }
    if refused:
        raise ConfigurationError(
            f"{', '.join(sorted(refused))} cannot be changed over HTTP: with it, this key could run programs on the cluster's machines or "
            f"reach their files; {_INSTEAD}"
        )


def check_adapters(controller: ControllerConfig, known: Mapping[str, str], load: Mapping[str, str]) -> None:
    """Raises ConfigurationError if an HTTP key may not load adapters from these places. Those in `known` are loaded."""
    if controller.admin_may_run_code:
        return
    for name, where in load.items():
        if known.get(name) != where and _is_path(where) and not _is_within(where, controller.admin_folders):
            there = ", ".join(controller.admin_folders) or "none"
            raise ConfigurationError(
                f"the adapter {name[:200]!r}: {where[:200]!r} is in none of the folders from which adapters may be loaded over HTTP "
                f"(controller.admin_folders: {there}); {_INSTEAD}"
            )


def _changes(path: tuple[str, ...], before: Any, after: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from _changes((*path, key), before.get(key), after.get(key))
    elif before != after:
        yield path, before, after


def _is_refused(path: tuple[str, ...], before: Any, after: Any, folders: list[str]) -> bool:
    if path[:2] in _CODE or (path[0] == "pools" and path[2] in _CODE_OF_POOLS):
        return True
    if any(path[: len(free)] == free for free in _FREE):
        return False
    known = set(_texts(path[-1], before))
    return any(
        # A tier names a module, or a store and a file with keys.
        (setting == "spec" and text != "synthetic") or (_is_path(text, setting) and not _is_within(text, folders))
        for setting, text in _texts(path[-1], after)
        if text and (setting, text) not in known
    )


def _texts(setting: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields every text in the value with the name of its innermost setting."""
    if isinstance(value, str):
        yield setting, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(setting, inner)


def _is_path(text: str, setting: str = "") -> bool:
    if setting in _PATHS:
        return True
    if setting == "chat_template":
        return "{{" not in text and "{%" not in text  # else it is the template itself
    return text.startswith(("/", "~", ".", "ipc:", "file:")) or ".." in text.split("/")


def _is_within(path: str, folders: list[str]) -> bool:
    """Looks at the names alone: the folders are on other machines."""
    if not path.startswith("/") or ".." in path.split("/"):
        return False
    whole = posixpath.normpath(path)
    return any(
        posixpath.commonpath([whole, posixpath.normpath(folder)]) == posixpath.normpath(folder)
        for folder in folders
        if folder.startswith("/")
    )
