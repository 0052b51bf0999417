"""Fields that several endpoints share. Their ranges serve both the checks and the API document."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.api.lark import JsonObject
from tandem.base.settings import END

MAX_STOPS = 16
MAX_LOGPROBS = 20

Temperature = Annotated[float, Meta(ge=0, le=2, description="0 is greedy")]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1 are off")]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Logits are divided by it, and dividing by almost 0 would make them infinite.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=10)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
StopTokenIds = Annotated[list[TokenId], Meta(max_length=128)]
BadWord = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWords = Annotated[list[BadWord], Meta(max_length=128)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
JobId = Annotated[
    str, Meta(min_length=1, max_length=256, description="names the agent's work that the request is a turn of")
]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="lower runs first")]
MaxTokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MinTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
PromptLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
AllowedTokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=4096)]
TruncatePromptTokens = Annotated[
    int, Meta(ge=-1, le=2**31 - 1, description="keeps this many of the prompt's last tokens; -1: what fits")
]
Text = Annotated[str, Meta(min_length=1)]
TextChoice = Annotated[list[Text], Meta(min_length=1, max_length=1024)]
SchemaName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}" + END)]
PatternSize = Annotated[int, Meta(ge=1, le=512)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: SchemaName
    schema: JsonObject
    description: str | None = None
    strict: bool | None = None  # without effect: the answer always follows the schema


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of them. `grammar` is Lark, as llguidance reads it."""

    json: JsonObject | None = None
    regex: Text | None = None
    choice: TextChoice | None = None
    grammar: Text | None = None


class RepetitionFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends an answer that says the same again and again: one pattern of so many tokens, at least so many times in a row."""

    max_pattern_size: PatternSize
    min_pattern_size: PatternSize = 1
    min_count: Annotated[int, Meta(ge=2, le=1024)] = 2


FileName = Annotated[
    str,
    Meta(
        pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}" + END,
        description="the prompt's hidden states are wanted in a file of this name",
    ),
]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted without effect: there is no padding to leave out
    continuous_usage_stats: bool | None = None  # usage in every chunk


class CommonFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat, completions and responses all take. `null` means the default everywhere, as with OpenAI."""

    model: str | None = None  # the served model or one of its adapters; None: the model
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stop: Stop | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Seed | None = None
    # Extensions to OpenAI's API, under vLLM's names where it has them.
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: MinTokens | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: BadWords | None = None
    ignore_eos: bool | None = None
    repetition_detection: RepetitionFields | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    skip_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    job_id: JobId | None = None
    is_last_step: bool | None = None  # the job's last turn, whose KV need not be kept
    skip_reading_prefix_cache: bool | None = None  # the prompt is computed, whatever is cached of it


class SamplingFields(CommonFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions both take beyond that."""

    n: Choices | None = None
    stream_options: StreamOptions | None = None
    regex: Text | None = None  # SGLang's names of the fields of `structured_outputs`
    json_schema: JsonObject | str | None = None
    ebnf: Text | None = None
    guided_json: JsonObject | str | None = None  # vLLM's older names of the same
    guided_regex: Text | None = None
    guided_choice: TextChoice | None = None
    guided_grammar: Text | None = None
    prompt_logprobs: PromptLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # of log-probabilities: "token_id:5" in place of the token's text
    add_special_tokens: bool | None = None
    hidden_states: FileName | None = None
    response_format: ResponseFormat | None = None
    lora_path: str | None = None  # SGLang's way to name the adapter
