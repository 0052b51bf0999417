"""What a router can be told. Plain, frozen, built once; unknown keys are refused by name."""

from __future__ import annotations

import enum
import re
from urllib.parse import urlsplit

import msgspec

from tandem.wire.errors import ConfigurationError


class PolicyName(enum.StrEnum):
    LEAST_WAIT = "least_wait"
    ROUND_ROBIN = "round_robin"
    PREFIX_AFFINITY = "prefix_affinity"
    SESSION_AFFINITY = "session_affinity"


class LocalPrefill(enum.StrEnum):
    """Whether a decode node may read a prompt itself although a prefill node could."""

    AUTO = "auto"  # when the measured rates say that sending it away costs more
    NEVER = "never"  # only when no prefill node is there
    ALWAYS = "always"


class RouterPlacement(enum.StrEnum):
    """Which machines have a router. Whoever puts them there reads it."""

    HEAD = "head"
    EVERY_HOST = "every_host"


class ToolFormat(enum.StrEnum):
    """How the model writes tool calls."""

    AUTO = "auto"  # as its chat template shows
    HERMES = "hermes"  # <tool_call>{...}</tool_call>
    LLAMA3 = "llama3"  # a JSON object, perhaps behind <|python_tag|>
    MISTRAL = "mistral"  # [TOOL_CALLS] and a list
    NONE = "none"  # calls stay text


class UnknownFields(enum.StrEnum):
    """What happens to a request's fields that this server does not know."""

    IGNORE = "ignore"  # they are named in the answer's header and in the log
    REFUSE = "refuse"


class SamplingDefaults(enum.StrEnum):
    """Where the sampling of a request comes from that says nothing about it."""

    MODEL = "model"  # the model's generation_config.json, and OpenAI's defaults for what it leaves out
    OPENAI = "openai"


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of anything a client may ask for, or a crowd of them."""

    header_bytes: int = 32 << 10
    body_bytes: int = 16 << 20
    body_bytes_at_once: int = 256 << 20  # of all requests that are being read
    json_depth: int = 64
    json_containers: int = 100_000  # objects and arrays in one body
    connections: int = 4096
    prompts_per_request: int = 128
    choices_per_request: int = 128  # prompts times max(n, best_of)
    inflight_per_node: int = 256  # sequences at once, for every node that can decode
    queued: int = 1024  # sequences waiting in the router beyond those


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds. Every wait in a request's life ends with one of these."""

    header: float = 10.0
    body: float = 30.0
    queue: float = 30.0  # waiting in the router for a place
    first_token: float = 120.0  # from submission to the first token
    token_idle: float = 30.0  # between two tokens; then somebody else goes on with the request
    total: float = 1800.0
    slow_reader: float = 30.0  # a client that takes nothing of its answer for so long is cut off
    keep_alive: float = 75.0
    failover_wait: float = 10.0  # for a node to appear, when the last one was lost


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ping_interval: float = 0.5
    # A node that said nothing for so long is lost. With the time until that is noticed it is less than 3 s.
    silence: float = 2.5
    wedged: float = 60.0  # a node whose engine has not completed a step for so long gets nothing new


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request is traced when its caller asks: a `traceparent` that says sampled, or an `x-tandem-trace` header."""

    sample: float = 0.0  # besides, this share of the requests whose caller says nothing
    keep: int = 64  # how many traces `tandem trace` can show: the last ones
    otlp_endpoint: str = ""  # OpenTelemetry's collector, such as http://localhost:4318; "" exports nothing
    otlp_headers: dict[str, str] = {}  # a collector's key
    service_name: str = "tandem"

    def __post_init__(self) -> None:
        if not 0 <= self.sample <= 1:
            raise ConfigurationError(f"router.tracing.sample must be from 0 to 1, not {self.sample}")
        if self.keep < 1:
            raise ConfigurationError(f"router.tracing.keep must be at least 1, not {self.keep}")
        if self.otlp_endpoint and not _is_http_url(self.otlp_endpoint):
            raise ConfigurationError(
                f"router.tracing.otlp_endpoint must be an http or https URL, not {self.otlp_endpoint!r}"
            )
        for name, value in self.otlp_headers.items():
            if not _is_header(name, value):
                raise ConfigurationError(
                    f"router.tracing.otlp_headers: {name!r} must be a header's name with a value in printable ASCII"
                )


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for one that is none
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii() and url.isprintable()


def _is_header(name: str, value: str) -> bool:
    is_name = re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) is not None
    return is_name and value.isascii() and value.isprintable()


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant. Its quotas are per router; None is no limit."""

    name: str
    key: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and output together
    concurrent_requests: int | None = None

    def mistake(self) -> str | None:
        """What cannot be meant, without the key itself: it may end in a log."""
        if not self.key:
            return "key must not be empty"
        if not all("!" <= character <= "~" for character in self.key):
            return (
                "key must be of letters, digits and signs in ASCII, without spaces: "
                "clients send it in an HTTP header, which carries nothing else"
            )
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent_requests"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                return f"{name} must be at least 1, not {limit}; without it there is no limit"
        return None


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokenizer_path: str  # a folder with tokenizer.json, and the chat template if there is one
    model_name: str  # what clients call it, and what nodes must announce as theirs
    model_aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    placement: RouterPlacement = RouterPlacement.HEAD
    inbox_host: str = "127.0.0.1"  # where nodes answer; an address that they can reach
    policy: PolicyName = PolicyName.LEAST_WAIT
    local_prefill: LocalPrefill = LocalPrefill.AUTO
    tool_format: ToolFormat = ToolFormat.AUTO
    chat_template: str | None = None  # a file, or the template itself; None is the model's own
    unknown_fields: UnknownFields = UnknownFields.IGNORE
    sampling_defaults: SamplingDefaults = SamplingDefaults.MODEL
    max_failovers: int = 3
    api_keys: tuple[ApiKey, ...] = ()
    api_keys_file: str | None = None  # one key per line, or a JSON list of {name, key, quotas}
    cors_origins: tuple[str, ...] = ()  # whose web pages may ask from a browser; "*" is everybody's
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    heartbeat: Heartbeat = Heartbeat()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        if not self.tokenizer_path:
            raise ConfigurationError("router.tokenizer_path must name the model's folder")
        if not self.model_name:
            raise ConfigurationError("router.model_name must not be empty")
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"router.port must be from 0 to 65535, not {self.port}")
        for key in self.api_keys:
            if mistake := key.mistake():
                raise ConfigurationError(f"router.api_keys: {key.name}: {mistake}")
        if self.max_failovers < 0:
            raise ConfigurationError(f"router.max_failovers must not be negative, not {self.max_failovers}")
        for group in (self.limits, self.timeouts, self.heartbeat):
            for name in group.__struct_fields__:
                value = getattr(group, name)
                if value <= 0:
                    kind = type(group).__name__.lower()
                    raise ConfigurationError(f"router.{kind}.{name} must be above 0, not {value}")
        if self.limits.body_bytes_at_once < self.limits.body_bytes:
            raise ConfigurationError(
                "router.limits.body_bytes_at_once must be at least body_bytes, "
                f"{self.limits.body_bytes}, not {self.limits.body_bytes_at_once}"
            )
        if self.heartbeat.silence <= self.heartbeat.ping_interval:
            raise ConfigurationError("router.heartbeat.silence must be longer than ping_interval")
