"""API keys: which tenant a request belongs to, what is left of its quotas, and what keeps tenants' caches
apart."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Self

import msgspec

from tandem.base.errors import ConfigurationError, RequestError
from tandem.router.config import ApiKey, check_distinct, key_places, name_of_key
from tandem.router.policy.views import Average
from tandem.router.siblings import Siblings

# Tokens reserved for an answer without a given limit, before the key has had any answer.
DEFAULT_ANSWER = 256
KEY_USE = "key use"


class QuotaExceeded(RequestError):
    code = "rate_limit_exceeded"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Bucket:
    """A token bucket of `per_minute` units, refilled evenly, with at most a minute's worth saved. It goes
    below zero if requests use more than they reserved."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()
        self.taken = 0.0  # by this process since it began, less what was given back

    def refill(self) -> float:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """Takes an amount; a negative one gives back."""
        self.taken += amount
        self.take_elsewhere(amount)

    def take_elsewhere(self, amount: float) -> None:
        """Lowers the level without counting the amount as taken by this process."""
        self._level = min(self.per_minute, self.refill() - amount)

    def lower_to(self, level: float) -> None:
        self._level = min(self.refill(), level)

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.refill()) * 60 / self.per_minute)


class Reservation:
    """What one request has taken from its key's quotas: taken before the work, and settled at the end. Leaving it unsettled
    voids it. Without a tenant there is nothing to take."""

    def __init__(self, tenant: Tenant | None) -> None:
        self._tenant = tenant
        self._tokens = 0.0
        self._settled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *of_no_concern: object) -> None:
        self.void()

    def take_tokens(self, prompt_tokens: int, asked: list[int | None]) -> None:
        """Reserves tokens for a prompt and its answers. `asked`: the limit of each answer, None if the
        request has none. Raises QuotaExceeded. A request larger than a minute's quota waits for a full
        bucket."""
        tenant = self._tenant
        if tenant is None or tenant.tokens is None:
            return
        bucket, typical = tenant.tokens, tenant.typical_answer()
        wanted = prompt_tokens + sum(typical if tokens is None else tokens for tokens in asked)
        wanted = min(wanted, bucket.per_minute)
        if (wait := bucket.seconds_until(wanted)) > 0:
            raise QuotaExceeded(
                f"this request may take {wanted:.0f} tokens, and so many are not left of this key's "
                f"{bucket.per_minute} tokens per minute",
                wait,
            )
        bucket.take(wanted)
        self._tokens = wanted
        tenant.tell()

    def settle(self, prompt_tokens: int, answers: list[int]) -> None:
        """The request has ended and used these tokens."""
        if self._tenant is not None:
            self._end(self._tenant, prompt_tokens + sum(answers))
            for tokens in answers:
                self._tenant.answers.observe(tokens)

    def void(self) -> None:
        """The request was refused, and does not count. Idempotent; does nothing after `settle`."""
        if self._tenant is not None and not self._settled:
            self._end(self._tenant, 0)
            self._tenant.give_back_request()

    def _end(self, tenant: Tenant, used: int) -> None:
        self._settled = True
        tenant.running -= 1
        if tenant.tokens is not None:
            tenant.tokens.take(used - self._tokens)
        tenant.tell()


class _KeyUse(msgspec.Struct, frozen=True, array_like=True):
    """A key's use in one process, as sums since the process began: the next report makes up for a lost
    one."""

    key: bytes  # the key's digest
    running: int
    requests: float
    tokens: float
    requests_left: float
    tokens_left: float


class Tenant:
    """One key's account."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.name = key.name
        self.is_operator = key.operator
        self.most_urgent = key.priority
        # Derived from the key, so that every router has the same salt and no client can guess it.
        self.salt = hashlib.sha256(b"tandem cache salt\0" + key.key.encode()).hexdigest()[:32]
        self.digest = hashlib.sha256(key.key.encode()).digest()
        self._concurrent_limit = key.concurrent_requests
        self._requests = _Bucket(key.requests_per_minute, clock) if key.requests_per_minute else None
        self.tokens = _Bucket(key.tokens_per_minute, clock) if key.tokens_per_minute else None
        self.answers = Average()  # tokens of one answer
        self.running = 0  # in this process
        self._has_quota = key.has_quota
        self._siblings: Siblings | None = None
        self._elsewhere: dict[str, _KeyUse] = {}  # by the process's desk

    @property
    def running_everywhere(self) -> int:
        """Running requests in all processes on the port."""
        return self.running + sum(use.running for use in self._elsewhere.values())

    def enter(self, *, generates: bool = True) -> Reservation:
        """Counts a request before any work is done for it. Raises QuotaExceeded. The caller must settle or
        void the reservation. Only requests that generate need tokens left."""
        if self._concurrent_limit is not None and self.running_everywhere >= self._concurrent_limit:
            raise QuotaExceeded(f"no more than {self._concurrent_limit} requests at once with this key", 1.0)
        if self._requests is not None and (wait := self._requests.seconds_until(1)) > 0:
            raise QuotaExceeded("too many requests per minute with this key", wait)
        if generates and self.tokens is not None and (wait := self.tokens.seconds_until(1)) > 0:
            raise QuotaExceeded("too many tokens per minute with this key", wait)
        if self._requests is not None:
            self._requests.take(1)
        self.running += 1
        self.tell()
        return Reservation(self)

    def give_back_request(self) -> None:
        if self._requests is not None:
            self._requests.take(-1)
            self.tell()

    # --- one account in several processes

    def share(self, siblings: Siblings) -> None:
        if self._has_quota:
            self._siblings = siblings

    def tell(self) -> None:
        if self._siblings is None or self._siblings.alone:
            return
        taken, left = (
            [of(bucket) if bucket is not None else 0.0 for bucket in (self._requests, self.tokens)]
            for of in (lambda bucket: bucket.taken, _Bucket.refill)
        )
        self._siblings.report(KEY_USE, _KeyUse(self.digest, self.running, *taken, *left))

    def hear(self, desk: str, use: _KeyUse) -> None:
        before = self._elsewhere.get(desk)
        self._elsewhere[desk] = use
        for bucket, now, then, left in (
            (self._requests, use.requests, before.requests if before else 0.0, use.requests_left),
            (self.tokens, use.tokens, before.tokens if before else 0.0, use.tokens_left),
        ):
            if bucket is None:
                continue
            if before is None:  # one of the two has just begun, and the other knows what is left
                bucket.lower_to(left)
            else:
                bucket.take_elsewhere(now - then)

    def keep_only(self, desks: Collection[str]) -> None:
        """Forgets the running requests of processes that have ended. What these took stays taken."""
        self._elsewhere = {desk: use for desk, use in self._elsewhere.items() if desk in desks}

    def typical_answer(self) -> int:
        """Returns how many tokens to reserve for an answer without a given limit."""
        return DEFAULT_ANSWER if self.answers.value is None else math.ceil(self.answers.value)

    def salted(self, cache_salt: str | None) -> str:
        return self.salt if cache_salt is None else f"{self.salt}/{cache_salt}"


class KeyRing:
    """All keys' accounts, and the lookup of a request's key."""

    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float]) -> None:
        self._tenants = [Tenant(key, clock) for key in keys]
        self.required = bool(self._tenants)

    def share(self, siblings: Siblings) -> None:
        """Makes quotas hold for all processes on the port together, except for requests at two of them at the
        same moment."""
        by_digest = {tenant.digest: tenant for tenant in self._tenants}

        def hear(desk: str, body: bytes) -> None:
            use = msgspec.msgpack.decode(body, type=_KeyUse)
            if (tenant := by_digest.get(use.key)) is not None:
                tenant.hear(desk, use)

        def on_change() -> None:
            for tenant in self._tenants:
                tenant.keep_only(siblings.desks)
                tenant.tell()

        siblings.hears[KEY_USE] = hear
        siblings.on_change.append(on_change)
        for tenant in self._tenants:
            tenant.share(siblings)

    def weight_of(self, name: str) -> float:
        """A key's part of the pools beside others': as its tokens per minute are to theirs. A key without such a quota
        counts as the largest one."""
        most = max([each.tokens.per_minute for each in self._tenants if each.tokens is not None], default=1)
        tenant = self.named(name)
        return 1.0 if tenant is None or tenant.tokens is None else tenant.tokens.per_minute / most

    def named(self, name: str) -> Tenant | None:
        """Returns the account of this name; None also where there are no keys."""
        return next((tenant for tenant in self._tenants if tenant.name == name), None)

    def find(self, key: bytes) -> Tenant | None:
        """Finds a key's tenant in constant time: compares every key, by digests of equal length."""
        digest = hashlib.sha256(key).digest()
        found: Tenant | None = None
        for tenant in self._tenants:
            if hmac.compare_digest(tenant.digest, digest):
                found = tenant
        return found


def load_keys(keys: Iterable[ApiKey], file: str | None) -> list[ApiKey]:
    """Returns the configured keys and those of the file, which has one per line or a JSON list of ApiKey. Raises
    ConfigurationError if two of them are equal or have one name."""
    loaded = list(keys)
    if file is None:
        return loaded
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"router.api_keys_file: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"router.api_keys_file {file}: must be text in UTF-8, and is none at byte {error.start}"
        ) from error
    found = _listed(text, file) if text.lstrip().startswith("[") else _lines(text, file)
    for place, key in found:
        if mistake := key.mistake():
            raise ConfigurationError(f"{place}: {key.name}: {mistake}")
    if not loaded and not found:
        raise ConfigurationError(f"router.api_keys_file {file} holds no key")
    check_distinct([*key_places(loaded, "router.api_keys"), *found])
    return loaded + [key for _, key in found]


def _listed(text: str, file: str) -> list[tuple[str, ApiKey]]:
    try:
        keys = msgspec.json.decode(text, type=list[ApiKey])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"router.api_keys_file {file}: {error}") from error
    return list(key_places(keys, f"router.api_keys_file {file}"))


def _lines(text: str, file: str) -> list[tuple[str, ApiKey]]:
    lines = enumerate(map(str.strip, text.split("\n")), 1)
    return [
        (f"router.api_keys_file {file}, line {number}", ApiKey(name=name_of_key(line), key=line))
        for number, line in lines
        if line and not line.startswith("#")
    ]
