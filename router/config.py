"""A router's configuration: frozen structs, built once. Unknown keys are refused by name."""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tandem.api.settings import ApiSettings, RequestLimits
from tandem.base.errors import ConfigurationError
from tandem.base.logs import LogFormat, LogLevel
from tandem.base.settings import AtLeastOne, NotEmpty, NotNegative, Seconds, about, check_fields, fixed

MOST_PROCESSES = 32  # On one machine. The tally of connections has room for these and for as many successors.


class PolicyName(enum.StrEnum):
    LEAST_WAIT = "least_wait"
    ROUND_ROBIN = "round_robin"
    PREFIX_AFFINITY = "prefix_affinity"
    SESSION_AFFINITY = "session_affinity"


class LocalPrefill(enum.StrEnum):
    """Whether a decode node may compute a prompt itself although a prefill node could."""

    AUTO = "auto"  # when sending the prompt away would cost more, by the measured rates
    NEVER = "never"  # only when no prefill node is ready
    ALWAYS = "always"


class RouterPlacement(enum.StrEnum):
    """Which machines have a router. The controller reads this and places the routers."""

    HEAD = "head"
    EVERY_HOST = "every_host"


class UnknownFields(enum.StrEnum):
    """What happens to fields of a request that this server does not know."""

    IGNORE = "ignore"  # they are named in a header of the answer and in the log
    REFUSE = "refuse"


class Limits(RequestLimits, frozen=True, forbid_unknown_fields=True):
    """Limits on what one client, or all clients together, may ask for."""

    # fmt: off
    header_bytes: Annotated[AtLeastOne, fixed(
        "bytes of one request's header; proxies and other servers take 8 to 64 KiB"
    )] = 32 << 10
    body_bytes: Annotated[AtLeastOne, about("bytes of one request's body")] = 16 << 20
    body_bytes_at_once: Annotated[AtLeastOne, fixed(
        "bytes of all bodies that are being received, parsed or tokenized; parsed, a body takes several times its bytes, and "
        "further ones wait"
    )] = 256 << 20
    kept_bytes: Annotated[AtLeastOne, about(
        "bytes that all requests keep until their end: tokens, log-probabilities, unread parts of answers. A request that "
        "exceeds it alone is refused, others get 503 while there is no room. Each key has a share"
    )] = 1 << 30
    responses_bytes: Annotated[AtLeastOne, fixed(
        "bytes of answers of /v1/responses that a router keeps, and of those that are being written in the background; the "
        "oldest of the key that keeps most make room"
    )] = 256 << 20
    cached_blocks: Annotated[NotNegative, fixed(
        "blocks of nodes' caches that a router knows of, about 150 bytes each; beyond that it goes by what it sent to a node"
    )] = 4_000_000
    connections: Annotated[AtLeastOne, fixed(
        "connections open at once in one process, of `router.processes`; beyond it, the longest idle gives way"
    )] = 4096
    inflight_per_node: Annotated[AtLeastOne, about("sequences that run at once, per decoding node")] = 256
    queued: Annotated[AtLeastOne, about("sequences that wait beyond those")] = 1024
    # fmt: on


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In seconds. Each wait in a request's life ends by one of these."""

    # fmt: off
    header: Annotated[Seconds, fixed("for a request's header to arrive; it is one packet")] = 10.0
    body: Annotated[Seconds, fixed(
        "for its body to arrive, and for the rest of a body that is answered already: 16 MiB at 5 Mbit/s"
    )] = 30.0
    queue: Annotated[Seconds, about("for a place on a node")] = 30.0
    token_idle: Annotated[Seconds, fixed(
        "after half of it without a token, the router asks the nodes whether they have the request; a slow node says so, and "
        "keeps it"
    )] = 30.0
    total: Annotated[Seconds, about("for the whole request")] = 1800.0
    slow_reader: Annotated[Seconds, fixed(
        "a client that takes nothing of its answer for this long is cut off; it holds memory that others wait for"
    )] = 30.0
    keep_alive: Annotated[Seconds, fixed(
        "an idle connection is closed after this long: later than most load balancers close theirs, which is after 60 s"
    )] = 75.0
    realtime_ping: Annotated[Seconds, fixed(
        "a client of /v1/realtime that is silent for this long is pinged, and has as long to answer; servers with the "
        "`websockets` package do the same"
    )] = 20.0
    realtime_idle: Annotated[Seconds, fixed(
        "a client of /v1/realtime that sends no whole event for this long is cut off; it may connect again"
    )] = 300.0
    failover_wait: Annotated[Seconds, fixed(
        "for a node to appear when the last one was lost; a client that would wait longer asks again"
    )] = 10.0
    # fmt: on


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # fmt: off
    ping_interval: Annotated[Seconds, fixed("between two questions to a node")] = 0.5
    # With the time until the silence is noticed, this stays under 3 s.
    silence: Annotated[Seconds, fixed(
        "a node that says nothing for this long is lost: with the time until that is noticed, under 3 s"
    )] = 2.5
    starved: Annotated[Seconds, fixed(
        "the same, while its machine accepts connections for it and no other node could go on with its requests"
    )] = 10.0
    wedged: Annotated[Seconds, fixed(
        "a node that has been in one step for this long gets no new requests; `timeouts.step_s` ends it"
    )] = 60.0
    # fmt: on


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request is traced when its caller asks for it, by a sampled `traceparent` or an `x-tandem-trace`
    header."""

    # fmt: off
    sample: Annotated[Annotated[float, Meta(ge=0, le=1)], about("share of requests that are traced without asking for it")] = 0.0
    keep: Annotated[AtLeastOne, fixed("number of last traces that `tandem trace` can show; a collector keeps all")] = 64
    otlp_endpoint: Annotated[str, about(
        "OpenTelemetry's collector, such as `http://localhost:4318`; empty: `OTEL_EXPORTER_OTLP_ENDPOINT`, if it is set"
    )] = ""
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self, "router.tracing")
        if self.otlp_endpoint and not _is_http_url(self.otlp_endpoint):
            raise ConfigurationError(
                f"router.tracing.otlp_endpoint must be an http or https URL, not {self.otlp_endpoint!r}"
            )


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for an invalid port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii() and url.isprintable()


HIDDEN_KEY = "(hidden)"  # what is shown in a key's place


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant. Its quotas hold for each router by itself; None is no limit."""

    name: str
    key: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output tokens together
    concurrent_requests: int | None = None
    # the most urgent priority, the lowest number, that its requests may have; also the default for those that
    # name none
    priority: int = 0
    operator: bool = False  # may read and change the cluster's state, and read all traces

    @property
    def has_quota(self) -> bool:
        limits = (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)
        return any(limit is not None for limit in limits)

    def mistake(self) -> str | None:
        """Returns what is wrong with the key, or None. It never contains the key itself, because it may be
        logged."""
        if not self.key:
            return "key must not be empty"
        if self.key == HIDDEN_KEY:
            return f"{HIDDEN_KEY} stands where `tandem config` shows no key: write the key itself"
        if not all("!" <= character <= "~" for character in self.key):
            return (
                "key must be of letters, digits and signs in ASCII, without spaces: "
                "clients send it in an HTTP header, which carries nothing else"
            )
        if not -(2**31) <= self.priority < 2**31:
            return f"priority must be from {-(2**31)} to {2**31 - 1}, not {self.priority}"
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                return f"{name} must be at least 1, not {limit}; without it there is no limit"
        return None


def name_of_key(key: str) -> str:
    """Returns the name of a key that was given without one. It follows from the key alone, so it stays the same
    when keys before it are removed, and it reveals nothing of a random key."""
    return f"key-{hashlib.sha256(b'tandem key name' + key.encode('utf-8', 'replace')).hexdigest()[:8]}"


def check_distinct(keys: Iterable[tuple[str, ApiKey]]) -> None:
    """Raises ConfigurationError for two equal keys, or two keys of one name, which would see each other's traces
    and responses. Each key comes with the place where it stands."""
    names: dict[str, str] = {}
    texts: dict[str, str] = {}
    for place, key in keys:
        if (other := texts.setdefault(key.key, place)) != place:
            raise ConfigurationError(f"{other} and {place} are the same key; leave one of them out")
        if (other := names.setdefault(key.name, place)) != place:
            raise ConfigurationError(
                f"{other} and {place} have the same name, {key.name!r}; give each key a name of its own"
            )


def key_places(keys: Iterable[ApiKey], where: str) -> Iterator[tuple[str, ApiKey]]:
    return ((f"{where}[{index}]", key) for index, key in enumerate(keys))


_ROUTER_URL = re.compile(r"https?://[^\s/?#@]+/?")


class RouterConfig(ApiSettings, frozen=True, forbid_unknown_fields=True):
    # fmt: off
    host: Annotated[NotEmpty, about("address to listen at; `0.0.0.0` is every interface")] = "127.0.0.1"
    port: Annotated[Annotated[int, Meta(ge=0, le=65535)], about("port to listen at; 0 takes a free one")] = 8000
    placement: Annotated[RouterPlacement, about("`head`, or `every_host`: one on each machine")] = RouterPlacement.HEAD
    processes: Annotated[Annotated[int, Meta(ge=1, le=MOST_PROCESSES)], about(
        "router processes that share the port on each machine that has a router: [many "
        "nodes](scale.md#several-router-processes)"
    )] = 1
    inbox_host: Annotated[str, about(
        "address at which the router receives nodes' answers; on a Ray cluster the default is its machine's address"
    )] = "127.0.0.1"
    policy: Annotated[PolicyName, about(
        "`least_wait`, `prefix_affinity`, `session_affinity` or `round_robin`: [api](api.md#what-happens-to-a-request)"
    )] = PolicyName.LEAST_WAIT
    local_prefill: Annotated[LocalPrefill, about(
        "whether a decode node reads a prompt itself: `auto`, when that costs less and stalls no stream there for more than 50 "
        "ms; `never`; `always`"
    )] = LocalPrefill.AUTO
    admit_within: Annotated[Seconds | None, about(
        "a request that would wait longer than this before its prompt is read, in the router's and nodes' lines together, gets "
        "503 with `Retry-After` at once; `null`: it waits. [Under overload](tuning.md#under-overload)"
    )] = None
    chat_template: Annotated[str | None, about(
        "a file with a chat template, or the template itself, in place of the model's own"
    )] = None
    unknown_fields: Annotated[UnknownFields, about(
        "what happens to a request's fields that this server does not know: `ignore` names them in a header and in the log, "
        "`refuse` answers 400. Internals are always refused"
    )] = UnknownFields.IGNORE
    max_failovers: Annotated[NotNegative, fixed(
        "how often a request may move to other nodes; what breaks a fourth node is the request"
    )] = 3
    api_keys: Annotated[tuple[ApiKey, ...], about(
        "clients' keys, each with its quotas: [api](api.md#keys). Empty: everyone may ask"
    )] = ()
    api_keys_file: Annotated[str | None, about("the same in a file: one key per line, or a JSON list")] = None
    receipt_key_file: Annotated[str | None, about(
        "a file with at least 32 random bytes, the same for each router: answers carry signed [receipts](exact.md#receipts) for "
        "requests that ask for one, and can be made again"
    )] = None
    cors_origins: Annotated[tuple[str, ...], about("web pages that may ask from a browser; `*` is any page")] = ()
    # The part of the cluster's `slo` that the router measures.
    slo_ttft_s: Seconds = 2.0
    slo_inter_token_s: Seconds = 0.1
    by_priority: bool = (
        # set when the cluster's `scheduler.policy` is priority: the router's line follows priorities, too
        False
    )
    # The cluster's `logs`.
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    tls_certificate: Annotated[str | None, about(
        "a file with a certificate and its chain; clients must then speak TLS. A changed file is read while the router serves: "
        "[security](security.md#tls)"
    )] = None
    tls_key: Annotated[str | None, about("the file with the certificate's key")] = None
    batches_folder: Annotated[str, about(
        "where [batches](batches.md) and their files are kept. All routers of the machine share it. Empty: a folder of the "
        "model's name in `~/.local/state/tandem/batches`"
    )] = ""
    env: Annotated[dict[str, str], about(
        "environment variables of each router's process, such as `{PYTHONPATH: /shared/tandem-0.2.0}`; no secrets: Ray shows "
        "them"
    )] = msgspec.field(default_factory=dict)
    # fmt: on
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    heartbeat: Heartbeat = Heartbeat()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        if not self.tokenizer_path:
            raise ConfigurationError("router.tokenizer_path must name the model's folder")
        if not self.model_name:
            raise ConfigurationError("router.model_name must not be empty")
        check_fields(self, "router")
        for key in self.api_keys:
            if mistake := key.mistake():
                raise ConfigurationError(f"router.api_keys: {key.name}: {mistake}")
        check_distinct(key_places(self.api_keys, "router.api_keys"))
        for name, url in self.other_models.items():
            if name in (self.model_name, *self.model_aliases):
                raise ConfigurationError(f"router.other_models has {name!r}, which is this deployment's own model")
            if not _ROUTER_URL.fullmatch(url):
                raise ConfigurationError(
                    f"router.other_models: {name}: must be a router's address such as http://10.0.0.7:8000, not {url[:100]!r}"
                )
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("certificate", "key") if self.tls_key is None else ("key", "certificate")
            raise ConfigurationError(f"router.tls_{missing} must be set, because router.tls_{given} is")
        for group in (self.limits, self.timeouts, self.heartbeat):
            check_fields(group, f"router.{type(group).__name__.lower()}")
        if self.limits.body_bytes > self.limits.body_bytes_at_once:
            raise ConfigurationError(
                f"router.limits.body_bytes must be at most {self.limits.body_bytes_at_once}, which all bodies together may "
                f"have, not {self.limits.body_bytes}"
            )
