"""What an operator may set of the API: the settings that this package is handed by who serves it.

The structs with their defaults and descriptions are the router's (`router/config.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol


class ToolFormat(enum.StrEnum):
    """How the model writes tool calls."""

    AUTO = "auto"  # as its chat template does
    NONE = "none"  # calls stay text
    HERMES = "hermes"  # <tool_call>{...}</tool_call>: Hermes, Qwen 2.5 and 3, Granite 4, and many others
    LLAMA3 = "llama3"  # a JSON object, perhaps after <|python_tag|>
    PYTHONIC = "pythonic"  # [f(a=1)]: Llama 4, Llama 3.2
    MISTRAL = "mistral"  # [TOOL_CALLS] and a list
    MISTRAL_NAMED = "mistral_named"  # [TOOL_CALLS]name[ARGS]{...}
    QWEN3_CODER = "qwen3_coder"  # <function=f><parameter=a>
    GLM = "glm"  # <arg_key>, <arg_value>
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    DEEPSEEK_V32 = "deepseek_v32"
    KIMI_K2 = "kimi_k2"
    HARMONY = "harmony"  # gpt-oss
    GRANITE = "granite"  # <|tool_call|> and a list
    MINIMAX = "minimax"  # <minimax:tool_call>
    MINIMAX_M1 = "minimax_m1"  # <tool_calls>
    FUNCTION_GEMMA = "function_gemma"  # <start_function_call>
    GEMMA4 = "gemma4"  # <|tool_call>
    PHI4 = "phi4"  # functools[...]
    SEED_OSS = "seed_oss"  # <seed:tool_call>
    LFM2 = "lfm2"  # <|tool_call_start|>
    OLMO3 = "olmo3"  # <function_calls>


class ReasoningName(enum.StrEnum):
    """How the model marks its reasoning."""

    AUTO = "auto"  # as its chat template does
    NONE = "none"  # reasoning stays text
    THINK = "think"  # <think>...</think>
    SEED_THINK = "seed_think"  # <seed:think>
    MISTRAL = "mistral"  # [THINK]
    GEMMA4 = "gemma4"  # <|channel>thought
    COHERE = "cohere"  # <|START_THINKING|>
    GRANITE = "granite"  # Here is my thought process:
    KIMI = "kimi"  # ◁think▷
    HARMONY = "harmony"  # gpt-oss's channels


class SamplingDefaults(enum.StrEnum):
    """Where sampling parameters come from that a request leaves out."""

    MODEL = "model"  # the model's generation_config.json, and OpenAI's defaults for what it leaves out
    OPENAI = "openai"


class RequestLimits(Protocol):
    """Limits on what one request may hold. `router.limits` says what each means."""

    @property
    def prompts_per_request(self) -> int: ...
    @property
    def inputs_per_request(self) -> int: ...
    @property
    def choices_per_request(self) -> int: ...
    @property
    def images_per_request(self) -> int: ...
    @property
    def image_bytes(self) -> int: ...
    @property
    def image_pixels(self) -> int: ...
    @property
    def prompt_embeds_bytes(self) -> int: ...


class ApiSettings(Protocol):
    @property
    def tokenizer_path(self) -> str: ...
    @property
    def model_name(self) -> str: ...
    @property
    def model_aliases(self) -> tuple[str, ...]: ...
    @property
    def other_models(self) -> Mapping[str, str]: ...
    @property
    def tool_format(self) -> ToolFormat: ...
    @property
    def reasoning_format(self) -> ReasoningName: ...
    @property
    def sampling_defaults(self) -> SamplingDefaults: ...
    @property
    def prompt_embeds(self) -> bool: ...
    @property
    def include_usage(self) -> bool: ...
    @property
    def limits(self) -> RequestLimits: ...
