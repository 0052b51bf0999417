"""The engine's settings: frozen structs, built once. Unknown keys are refused by name."""

from __future__ import annotations

import enum
import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tandem.base.errors import ConfigurationError
from tandem.base.settings import AtLeastOne, NotEmpty, NotNegative, about, check_fields, fixed
from tandem.kvtransfer.config import TierConfig


class SchedulingPolicy(enum.StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    CONTINUUM = "continuum"


class HashAlgorithm(enum.StrEnum):
    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


class AsyncScheduling(enum.StrEnum):
    """When the scheduler plans a step while the one before it still computes."""

    AUTO = "auto"  # on GPUs, which compute while the CPU plans
    ALWAYS = "always"
    NEVER = "never"


class Reserve(enum.StrEnum):
    """Which blocks must be free before a request is admitted."""

    NONE = "none"  # those of its first step
    PROMPT = "prompt"  # those of all its present tokens
    SEQUENCE = "sequence"  # all that it and every request with blocks may ever need


OWN_ENGINE = "tandem"
OWN_HEAD = "mtp"


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # fmt: off
    path: Annotated[str, about(
        "a folder with `config.json`, a GGUF file beside its model's `tokenizer.json`, `owner/name` on the Hugging Face hub, or "
        "`smollm2`. `model: NAME` is short for it"
    )] = ""
    revision: Annotated[str, about(
        "a branch, tag or commit of a model on the hub; empty: the default branch. It becomes one commit when the cluster "
        "starts, and every node loads that"
    )] = ""
    served_name: Annotated[str, about("what clients call it; empty: the folder's or the hub's name")] = ""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], about(
        "`float32`, `bfloat16`, `float16`; `auto` is the checkpoint's own"
    )] = "auto"
    exact: Annotated[Literal["auto", "require"], about(
        "`require` refuses what cannot promise the same bits whatever else is served, and lets only nodes that compute alike "
        "work on one request; `auto`: the same bits where they cost nothing: [the same bits](exact.md)"
    )] = "auto"
    device: Annotated[NotEmpty, about("`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one")] = "auto"
    threads: Annotated[NotNegative, about("CPU threads that compute; 0: as many as the node has cores")] = 0
    engine: Annotated[NotEmpty, about(
        "what computes the model on every node: `tandem`, or `vllm`, which runs from an environment of its own: "
        "[engines](engines.md)"
    )] = OWN_ENGINE
    engine_args: Annotated[dict[str, Any], about(
        "with another engine: its own arguments by name, as vLLM's `EngineArgs` has them, such as `{enforce_eager: true}`; "
        "those that follow from other settings are refused"
    )] = {}
    engine_python: Annotated[str, about(
        "with another engine: the Python of the environment that has it, at the same path on every machine, such as "
        "`/opt/vllm/bin/python`"
    )] = ""
    adapters: Annotated[dict[str, str], about(
        "LoRA adapters, each a name that clients put into `model`, and a folder as PEFT writes it or `owner/name` on the "
        "Hugging Face hub, such as `{sql: ./sql-lora}`: [adapters](adapters.md)"
    )] = {}
    max_lora_rank: Annotated[AtLeastOne, about("the highest rank of an adapter that is served")] = 16
    draft: Annotated[str, about(
        "a small model with the same tokenizer, named as `path` is, an EAGLE head made for the model, or `mtp`: the head that "
        "the checkpoint itself has. It guesses the next `scheduler.num_speculative_tokens` tokens "
        "([guesses](scheduler.md#guesses)); its memory counts to the node's. Empty: the text so far makes the guesses"
    )] = ""
    pooling: Annotated[Literal["auto", "none", "mean", "last", "cls"], about(
        "how `/v1/embeddings` makes one vector of a text: the `mean` of its tokens, its `last` or its first (`cls`), "
        "normalized; `none`: no vectors; `auto`: as sentence-transformers' files beside the checkpoint say, or not at all "
        "without them"
    )] = "auto"
    hidden_states_folder: Annotated[str, about(
        "where nodes write the hidden states of prompts, a file for each request that asks for one ([hidden "
        "states](connectors.md#hidden-states)); transformers then computes the model as it is, which is slower. Empty: nowhere"
    )] = ""
    hidden_states_layers: Annotated[tuple[int, ...], about(
        "the layers of these, as transformers' `output_hidden_states` counts: 0 are the tokens' embeddings, -1 is what the head "
        "reads"
    )] = (-1,)
    # fmt: on


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a node publishes KV events for other programs than Tandem."""

    # fmt: off
    endpoint: Annotated[str, about(
        "`tcp://ADDRESS:PORT` where each node publishes what it caches and evicts, in vLLM's format: "
        "[events](scale.md#events-for-other-programs). A further node of the machine takes the next free port. Empty: nowhere"
    )] = ""
    replay_endpoint: Annotated[str, about(
        "where a subscriber asks for batches that it has missed, in the same form; empty: nowhere"
    )] = ""
    topic: Annotated[str, about("topic that each message begins with")] = ""
    buffer_steps: Annotated[AtLeastOne, fixed(
        "the last batches that can be asked for again: minutes of steps, and a subscriber that was away longer lists the cache"
    )] = 10_000
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self, "cache.events")
        for name in ("endpoint", "replay_endpoint"):
            if (endpoint := getattr(self, name)) and not _names_an_address(endpoint):
                raise ConfigurationError(
                    f"cache.events.{name} must be tcp://ADDRESS:PORT with an IP address of this machine, not {endpoint!r}: what "
                    "is published there is open to all that reach it"
                )
        if self.replay_endpoint and not self.endpoint:
            raise ConfigurationError(
                "cache.events.replay_endpoint needs cache.events.endpoint: there is nothing to ask for"
            )


def _names_an_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        return (
            parts.scheme == "tcp" and bool(parts.port) and not ipaddress.ip_address(parts.hostname or "").is_unspecified
        )
    except ValueError:
        return False


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # fmt: off
    block_size: Annotated[AtLeastOne, about("tokens of a block; a power of two")] = 16
    memory_bytes: Annotated[Annotated[int, Meta(ge=1 << 20)] | None, about(
        "KV cache of each node, such as `4GiB`; `null`: `cache.memory_share` of the free memory"
    )] = None
    memory_share: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, about(
        "the KV cache's share of free memory, divided among the nodes of one device; `null`: 0.85 on a GPU, 0.5 on a CPU"
    )] = None
    dtype: Annotated[Literal["auto", "fp8"], about(
        "type of keys and values: `auto`, the model's own; `fp8`, half as much memory and less to hand over, rounded to three "
        "bits after the point. All nodes of a cluster must have the same"
    )] = "auto"
    encoder_tokens: Annotated[AtLeastOne, about(
        "with images: tokens of the vision tower's output that a node keeps, for prompts in progress and for later ones; at "
        "least as many as one part of an image has"
    )] = 16384
    prefix_caching: Annotated[bool, about("blocks of earlier prompts are found again")] = True
    checkpoint_tokens: Annotated[NotNegative, fixed(
        "with recurrent states: a prompt's states are kept where they save a later prompt at least this many tokens, and an "
        "answer's are mirrored this many tokens apart"
    )] = 256
    hash_algorithm: Annotated[HashAlgorithm, about(
        "how blocks are hashed to be found again: `sha256`, `sha256_cbor`, `xxhash`, `xxhash_cbor`. The latter two are faster, "
        "and not safe from tenants who make collisions"
    )] = HashAlgorithm.SHA256
    hash_seed: Annotated[str | None, about(
        "what every chain of hashes begins with; `null`: random for each process, fixed with a tier that is not `cpu` and with "
        "`cache.remote` or `cache.mirror`"
    )] = None
    tiers: Annotated[list[TierConfig], about(
        "where each node keeps copies of full blocks, the nearest first, such as `[{cpu: 8GiB, policy: arc}]`: "
        "[tiers](connectors.md#tiers)"
    )] = []
    tell_routers: Annotated[bool, about(
        "nodes tell routers which blocks they have; if not, routers go by what they sent where"
    )] = True
    events: EventsConfig = EventsConfig()
    remote: Annotated[bool, about(
        "a node that misses a prefix copies it from another node's `cpu` tier, over NIXL, when that costs less than computing "
        "it: [peers](connectors.md#other-nodes-tiers)"
    )] = False
    mirror: Annotated[bool, about(
        "another decode node copies the blocks of running requests to its `cpu` tier as they fill, and continues these requests "
        "when their node dies"
    )] = False
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self, "cache")
        if self.tiers and not self.prefix_caching:
            raise ConfigurationError("cache.tiers needs cache.prefix_caching: a tier finds blocks by their hashes")
        if self.events.endpoint and not self.prefix_caching:
            raise ConfigurationError("cache.events.endpoint needs cache.prefix_caching: without it nothing is cached")
        if self.block_size & (self.block_size - 1):
            raise ConfigurationError(f"cache.block_size must be a power of two, not {self.block_size}")

    @property
    def shared_hash_seed(self) -> str | None:
        """The hash seed. A fixed one is used by default when hashes must agree between processes: with a tier that may outlive the
        process, as all but host memory may, and with tiers that other nodes read."""
        shared = self.remote or self.mirror or any(not tier.cpu for tier in self.tiers)
        return "tandem" if self.hash_seed is None and shared else self.hash_seed

    @property
    def host_bytes_of_tiers(self) -> int:
        """How many bytes of host memory the tiers of a node take."""
        return sum(tier.cpu or 0 for tier in self.tiers)

    def share_on(self, device: str) -> float:
        """The KV cache's share of the device's memory that is free after the weights are loaded."""
        if self.memory_share is not None:
            return self.memory_share
        return 0.85 if device.startswith("cuda") else 0.5


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # fmt: off
    policy: Annotated[SchedulingPolicy, about(
        "`fcfs`; `priority`: by the requests' `priority`; `continuum`: as `fcfs`, and an agent's turn keeps its KV while a "
        "quick tool runs ([agents](scheduler.md#agents))"
    )] = SchedulingPolicy.FCFS
    pin_seconds: Annotated[Annotated[float, Meta(gt=0, le=600)], fixed(
        "with `continuum`: how long an ended turn keeps its KV for its job's next turn; a turn whose tool should take longer, "
        "as measured, keeps none"
    )] = 2.0
    max_num_seqs: Annotated[AtLeastOne, about("requests that run at once on a node")] = 256
    max_num_batched_tokens: Annotated[AtLeastOne, about("tokens that one step computes")] = 2048
    max_model_len: Annotated[AtLeastOne | None, about(
        "longest prompt and answer together; `null`: what the model was trained for"
    )] = None
    max_encoder_tokens: Annotated[AtLeastOne, fixed(
        "with images: tokens that the vision tower makes in one step; a larger part of an image gets a step of its own"
    )] = 2048
    long_prefill_token_threshold: Annotated[NotNegative, about("most tokens of one prompt in a step; 0: no such limit")] = 0
    step_target_ms: Annotated[Annotated[float, Meta(ge=0, le=1e6)], about(
        "target time of a step while requests decode: prompts beside them get shorter chunks if this node's steps take longer "
        "([scheduler](scheduler.md#how-long-a-step-takes)); 0: no limit"
    )] = 80.0
    chunked_prefill: Annotated[bool, about("a prompt may be computed in several steps")] = True
    reserve: Annotated[Reserve, about(
        "what must be free before a request is admitted: `none`, the blocks of its first step; `prompt`, those of its whole "
        "prompt; `sequence`, all that it and the others may ever need, so no request is preempted"
    )] = Reserve.PROMPT
    num_speculative_tokens: Annotated[NotNegative, about(
        "most tokens that are guessed, from the text so far or by `model.draft`, and checked in one step"
    )] = 0
    max_draft_loss: Annotated[Annotated[float, Meta(ge=0, le=1)], fixed(
        "share of decoding's time that guesses may cost more than they save; beyond it guessing stops until it pays"
    )] = 0.02
    max_loras: Annotated[NotNegative, about(
        "how many different LoRA adapters one step may have; 0: no adapters are served: [adapters](adapters.md)"
    )] = 0
    async_scheduling: Annotated[AsyncScheduling, about(
        "`auto`, `always`, `never`: whether a step is planned while the one before it runs; `auto` is on GPUs. A step after "
        "which tokens are guessed is not"
    )] = AsyncScheduling.AUTO
    trace_folder: Annotated[str, about(
        "where each node writes what its scheduler saw and decided in every step, for `tandem replay`: a folder on its machine, "
        "such as `/var/tmp/tandem`; empty: nowhere"
    )] = ""
    trace_bytes: Annotated[Annotated[int, Meta(ge=1 << 20)], fixed(
        "bytes of one node's scheduler trace; the oldest steps make room"
    )] = 256 << 20
    # fmt: on

    def __post_init__(self) -> None:
        check_fields(self, "scheduler")
        if self.trace_folder and not self.trace_folder.startswith("/"):
            raise ConfigurationError(
                f"scheduler.trace_folder must be a whole path such as /var/tmp/tandem, not {self.trace_folder!r}: nodes run in folders of their own"
            )

    @property
    def pins_for_s(self) -> float:
        """How many seconds an ended turn keeps its blocks; 0: turns are not pinned."""
        return self.pin_seconds if self.policy == SchedulingPolicy.CONTINUUM else 0.0

    def plans_ahead(self, device: str) -> bool:
        if self.async_scheduling is AsyncScheduling.AUTO:
            return device.startswith("cuda")
        return self.async_scheduling is AsyncScheduling.ALWAYS


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    debug: bool = False  # check every invariant whenever the engine is idle
