"""The options of a tier in an object store, and the keys to it."""

from __future__ import annotations

import configparser
import dataclasses
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from tandem.base.errors import ConfigurationError

_FORM = "{spec: objects, options: {url: https://host/bucket}}"


@dataclasses.dataclass(frozen=True, slots=True)
class AccessKeys:
    access_key: str
    secret_key: str = dataclasses.field(repr=False)
    token: str = dataclasses.field(default="", repr=False)


class ObjectOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str  # of the bucket, or of a folder in it
    region: str = "us-east-1"
    credentials: str = ""  # a file in AWS's form; "": the environment's AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
    profile: str = "default"  # the file's section
    ca_file: str = ""  # certificates of the authority that signed the store's; "": the system's

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ObjectOptions:
        try:
            parsed = msgspec.convert(dict(options), cls)
            parts = parsed.parts
            port_is_right = parts.port is None or parts.port > 0
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigurationError(
                f"cache.tiers: the options of objects are not right: {error}; write {_FORM}"
            ) from error
        folder = parts.path.strip("/")
        extra = parts.query or parts.fragment or parts.username or parts.password
        if parts.scheme not in ("http", "https") or not parts.hostname or extra or not port_is_right:
            raise ConfigurationError(
                f"cache.tiers: the url of objects must be http(s)://host/bucket, without a key or a query, not {parsed.url!r}"
            )
        if any(part in ("", ".", "..") for part in folder.split("/")):
            raise ConfigurationError(
                f"cache.tiers: the url of objects names no bucket or folder: {parsed.url!r}; write {_FORM}"
            )
        return parsed

    @property
    def parts(self) -> SplitResult:
        return urlsplit(self.url)


class CredentialFile:
    """The keys as they are now: a file that was replaced is read again. Any thread may use it."""

    def __init__(self, options: ObjectOptions) -> None:
        self._options = options
        self._lock = threading.Lock()  # guards the fields from here on
        self._keys: AccessKeys | None = None
        self._read_at = -1

    def keys(self) -> AccessKeys:
        """Raises ConfigurationError."""
        if not self._options.credentials:
            return _of_environment()
        path = Path(self._options.credentials)
        with self._lock:
            try:
                changed_at = path.stat().st_mtime_ns
                if self._keys is None or changed_at != self._read_at:
                    self._keys, self._read_at = _of_file(path, self._options.profile), changed_at
            except OSError as error:
                raise ConfigurationError(
                    f"cache.tiers: the credentials of objects, {str(path)!r}, cannot be read: {error.strerror}"
                ) from error
            return self._keys


def _of_environment() -> AccessKeys:
    found = [os.environ.get(f"AWS_{name}", "") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")]
    if not found[0] or not found[1]:
        raise ConfigurationError(
            "cache.tiers: objects has no key to its store: name a file in options.credentials, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where nodes run"
        )
    return AccessKeys(*found)


def _of_file(path: Path, profile: str) -> AccessKeys:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
        section = parser[profile]
        return AccessKeys(
            section["aws_access_key_id"], section["aws_secret_access_key"], section.get("aws_session_token", "")
        )
    except (KeyError, configparser.Error, UnicodeDecodeError) as error:
        # Of the file's content nothing is said: it is secret.
        raise ConfigurationError(
            f"cache.tiers: the credentials of objects, {str(path)!r}, need a section [{profile}] with aws_access_key_id and "
            "aws_secret_access_key"
        ) from error
