"""What an engine can be told. Plain, frozen, built once; unknown keys are refused by name."""

from __future__ import annotations

import enum
import math

import msgspec

from tandem.wire.errors import ConfigurationError


class SchedulingPolicy(enum.StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"


class HashAlgorithm(enum.StrEnum):
    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


class AsyncScheduling(enum.StrEnum):
    """Whether a step is planned while the one before it runs."""

    AUTO = "auto"  # where the device runs by itself, and not where the step is the CPU's own work
    ALWAYS = "always"
    NEVER = "never"


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str = ""  # a Hugging Face folder or name
    served_name: str = ""  # what clients call it; the folder's name when empty
    dtype: str = "auto"  # auto (the checkpoint's own), float32, bfloat16, float16
    device: str = "auto"  # auto (cuda when there is one), cpu, cuda, cuda:1 ...
    threads: int = 0  # CPU threads for the model; 0 is every core that the process may use


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    block_size: int = 16
    memory_bytes: int | None = None  # None: a share of what is free (`memory_share`)
    memory_share: float | None = (
        None  # None: 0.85 on a GPU, which is the cache's own; 0.5 of a CPU's memory, which is not
    )
    prefix_caching: bool = True
    hash_algorithm: HashAlgorithm = HashAlgorithm.SHA256
    hash_seed: str | None = None  # None: a random root for every process

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigurationError(f"cache.block_size must be a power of two, not {self.block_size}")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigurationError(
                f"cache.memory_share must be above 0 and at most 1, not {self.memory_share}"
            )

    def share_on(self, device: str) -> float:
        """Of the memory that is free there once the weights are loaded."""
        if self.memory_share is not None:
            return self.memory_share
        return 0.85 if device.startswith("cuda") else 0.5


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None  # None: what the model was trained for
    long_prefill_token_threshold: int = 0  # 0 is off: a prompt may fill the whole token budget
    step_target_ms: float = 80.0  # how long a step that also decodes should take; 0: however long it takes
    chunked_prefill: bool = True
    reserve_full_sequence: bool = False  # admit a request only when all that it may ever need is free
    num_speculative_tokens: int = 0
    max_loras: int | None = None
    async_scheduling: AsyncScheduling = AsyncScheduling.AUTO

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"scheduler.{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.step_target_ms < math.inf:
            raise ConfigurationError(
                f"scheduler.step_target_ms must be 0, which is off, or more, not {self.step_target_ms}"
            )
        if self.async_scheduling is AsyncScheduling.ALWAYS and self.num_speculative_tokens:
            raise ConfigurationError(
                "scheduler.async_scheduling cannot be always with scheduler.num_speculative_tokens above 0: "
                "what is drafted follows from the last token"
            )

    def plans_ahead(self, device: str) -> bool:
        if self.async_scheduling is AsyncScheduling.AUTO:
            return device.startswith("cuda") and not self.num_speculative_tokens
        return self.async_scheduling is AsyncScheduling.ALWAYS


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    debug: bool = False  # audit every invariant whenever the engine is idle
