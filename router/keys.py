"""API keys: who a request belongs to, what they may still ask for, and what keeps their caches apart."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from tandem.router.config import ApiKey
from tandem.wire.errors import ConfigurationError, RequestError


class QuotaExceeded(RequestError):
    code = "rate_limit_exceeded"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Bucket:
    """`per_minute` units, refilled evenly, saved up for a minute at most. It may go below zero: what a request
    will have used is known only at its end."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def refill(self) -> float:
        now = self._clock()
        self._level = min(self._per_minute, self._level + (now - self._at) * self._per_minute / 60)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        self.refill()
        self._level -= amount

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.refill()) * 60 / self._per_minute)


class Tenant:
    """One key's account."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.name = key.name
        # Derived from the key, so that every router has the same and nobody else can guess it.
        self.salt = hashlib.sha256(b"tandem cache salt\0" + key.key.encode()).hexdigest()[:32]
        self.digest = hashlib.sha256(key.key.encode()).digest()
        self._concurrent_limit = key.concurrent_requests
        self._requests = _Bucket(key.requests_per_minute, clock) if key.requests_per_minute else None
        self._tokens = _Bucket(key.tokens_per_minute, clock) if key.tokens_per_minute else None
        self.running = 0

    def enter(self, *, generates: bool = True) -> None:
        """Raises QuotaExceeded; otherwise `leave` must follow. Only what generates needs tokens to be left."""
        if self._concurrent_limit is not None and self.running >= self._concurrent_limit:
            raise QuotaExceeded(f"no more than {self._concurrent_limit} requests at once with this key", 1.0)
        if self._requests is not None and (wait := self._requests.seconds_until(1)) > 0:
            raise QuotaExceeded("too many requests per minute with this key", wait)
        if generates and self._tokens is not None and (wait := self._tokens.seconds_until(1)) > 0:
            raise QuotaExceeded("too many tokens per minute with this key", wait)
        if self._requests is not None:
            self._requests.take(1)
        self.running += 1

    def leave(self, tokens: int) -> None:
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(tokens)

    def salted(self, cache_salt: str | None) -> str:
        return self.salt if cache_salt is None else f"{self.salt}/{cache_salt}"


class KeyRing:
    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float]) -> None:
        self._tenants = [Tenant(key, clock) for key in keys]
        digests = {tenant.digest for tenant in self._tenants}
        if len(digests) != len(self._tenants):
            raise ConfigurationError("router.api_keys: two of them are the same key")

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def find(self, key: bytes) -> Tenant | None:
        """In constant time: every key is compared, and equal-length digests of both."""
        digest = hashlib.sha256(key).digest()
        found: Tenant | None = None
        for tenant in self._tenants:
            if hmac.compare_digest(tenant.digest, digest):
                found = tenant
        return found


def load_keys(keys: Iterable[ApiKey], file: str | None) -> list[ApiKey]:
    """The configured keys and those of the file: one per line, or a JSON list of ApiKey."""
    loaded = list(keys)
    if file is None:
        return loaded
    try:
        text = Path(file).read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        raise ConfigurationError(f"router.api_keys_file: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"router.api_keys_file {file}: must be text in UTF-8, and is none at byte {error.start}"
        ) from error
    found = _listed(text, file) if text.startswith("[") else _lines(text)
    for key in found:
        if mistake := key.mistake():
            raise ConfigurationError(f"router.api_keys_file {file}: {key.name}: {mistake}")
    if not loaded and not found:
        raise ConfigurationError(f"router.api_keys_file {file} holds no key")
    return loaded + found


def _listed(text: str, file: str) -> list[ApiKey]:
    try:
        return msgspec.json.decode(text, type=list[ApiKey])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"router.api_keys_file {file}: {error}") from error


def _lines(text: str) -> list[ApiKey]:
    lines = [line.strip() for line in text.splitlines()]
    plain = [line for line in lines if line and not line.startswith("#")]
    return [ApiKey(name=f"key-{index}", key=key) for index, key in enumerate(plain, 1)]
