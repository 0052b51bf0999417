"""What an operator may set of the API. A router's configuration has these and its own (`router/config.py`)."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.base.settings import AtLeastOne, about, fixed
from tandem.wire.embeds import MOST_BYTES


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


class RequestLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what one request may hold."""

    # fmt: off
    image_bytes: Annotated[AtLeastOne, fixed("bytes of one image's file; `body_bytes` bounds those of a request")] = 8 << 20
    image_pixels: Annotated[Annotated[int, Meta(ge=1, le=89_000_000)], fixed(
        "pixels of one image; checking decodes it, with up to 10 bytes a pixel, and models see a smaller copy"
    )] = 40_000_000
    prompt_embeds_bytes: Annotated[Annotated[int, Meta(ge=1, le=MOST_BYTES)], fixed(
        "bytes of one tensor of `prompt_embeds`; the model's context is a closer limit"
    )] = 8 << 20
    images_per_request: Annotated[AtLeastOne, about("images in the messages of one request")] = 16
    json_depth: Annotated[AtLeastOne, fixed("how deep a body nests; no API has a body of ten levels")] = 64
    json_containers: Annotated[AtLeastOne, fixed(
        "objects and arrays in a body; `body_bytes` and the model's context are closer limits"
    )] = 100_000
    json_items: Annotated[AtLeastOne, fixed("items in those; a token id is one, and no model reads so many")] = 1_000_000
    json_members: Annotated[AtLeastOne, fixed("names in a body's objects; `body_bytes` is a closer limit")] = 100_000
    prompts_per_request: Annotated[AtLeastOne, fixed("prompts in one request; a client sends more in further requests")] = 128
    inputs_per_request: Annotated[AtLeastOne, fixed(
        "texts in one request for vectors or scores; OpenAI takes 2048, and their answer is one body"
    )] = 1024
    choices_per_request: Annotated[AtLeastOne, fixed("prompts times `n` or `best_of`; OpenAI's limit of `n`")] = 128
    # fmt: on


class ApiSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokenizer_path: str  # a folder with tokenizer.json and, if the model has one, the chat template
    model_name: str  # the name that clients use, and that nodes must announce
    # fmt: off
    model_aliases: Annotated[tuple[str, ...], about("further names of the model")] = ()
    other_models: Annotated[dict[str, str], about(
        "models of other deployments and their routers: `{code: 'http://10.0.0.7:8000'}`. Requests for them are passed on: "
        "[operations](operations.md#several-models-at-one-address)"
    )] = {}
    tool_format: Annotated[ToolFormat, about(
        "how the model writes tool calls: `auto`, as its chat template does; or a [format](api.md#tools)"
    )] = ToolFormat.AUTO
    reasoning_format: Annotated[ReasoningName, about(
        "how the model marks its reasoning: `auto`, as its chat template does; or a [format](api.md#reasoning)"
    )] = ReasoningName.AUTO
    prompt_embeds: Annotated[bool, about(
        "completions may have tensors in place of prompts ([api](api.md#prompts-as-embeddings)): clients then reach states of "
        "the model that no text reaches"
    )] = False
    include_usage: Annotated[bool, about(
        "streams of chats and completions end with their usage, whether or not `stream_options` asks for it"
    )] = False
    sampling_defaults: Annotated[SamplingDefaults, about(
        "sampling where a request says nothing: by the model's `generation_config.json` (`model`), or OpenAI's defaults "
        "(`openai`)"
    )] = SamplingDefaults.MODEL
    # fmt: on
    limits: RequestLimits = RequestLimits()
