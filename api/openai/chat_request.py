"""The request of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.api.field_table import FieldRefusal, PathFields
from tandem.api.lark import JsonObject
from tandem.api.openai.fields import MaxTokens, SamplingFields, TopLogprobs
from tandem.base.errors import InvalidRequest
from tandem.base.settings import END

ReasoningEffort = Annotated[str, Meta(pattern="^[a-z_]{1,20}" + END, description="such as none, low, medium, high")]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}" + END)]


class ImageUrl(msgspec.Struct, frozen=True):
    """`detail` says how fine an image is to be read; here each model's own settings do."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None

    @property
    def url(self) -> str | None:
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """Fields that it does not name are dropped: clients send back what other servers gave them in an answer."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, frozen=True):
    name: FunctionName


class NamedToolChoice(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: NamedFunction


ThinkingBudget = Annotated[int, Meta(ge=0, le=2**31 - 1, description="the most tokens of reasoning")]


class ThinkingOptions(msgspec.Struct, frozen=True):
    """As Anthropic's API, and those of DeepSeek and GLM, have them."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ThinkingBudget | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: a call that is required is the only one
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None  # keeps a conversation on its nodes, under session affinity
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingOptions | None = None
    thinking_token_budget: ThinkingBudget | None = None  # vLLM's name of thinking.budget_tokens
    include_reasoning: bool | None = None  # false: the reasoning is left out of the answer
    documents: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


FIELDS = PathFields(
    "/v1/chat/completions",
    ChatRequest,
    generates=True,
    refused={
        "echo": FieldRefusal("only in completions; continue_final_message goes on with a message that the client has"),
        "best_of": FieldRefusal("only in completions; n gives several answers", (1,)),
        "reasoning": FieldRefusal("use reasoning_effort"),
        "max_output_tokens": FieldRefusal("use max_completion_tokens"),
        "stop_sequences": FieldRefusal("use stop"),
        "system": FieldRefusal("send a message of the role system"),
        "instructions": FieldRefusal("send a message of the role system"),
        "text": FieldRefusal("use response_format"),
        "output_config": FieldRefusal("use response_format and reasoning_effort"),
    },
)  # fmt: skip


def thinks(request: ChatRequest) -> bool | None:
    """Returns whether the model is to reason; None: as its template has it."""
    options = request.thinking
    if options is None:
        return request.enable_thinking
    wanted = options.type != "disabled"
    if request.enable_thinking not in (None, wanted):
        raise InvalidRequest("enable_thinking: contradicts thinking; set one", "enable_thinking")
    return wanted


def thinking_budget(request: ChatRequest) -> tuple[int | None, str]:
    """Returns the most tokens of reasoning, and the name of the field that says so."""
    theirs = request.thinking.budget_tokens if request.thinking is not None else None
    own = request.thinking_token_budget
    if own is None:
        return theirs, "thinking.budget_tokens"
    if theirs not in (None, own):
        raise InvalidRequest(
            "thinking_token_budget: contradicts thinking.budget_tokens; set one", "thinking_token_budget"
        )
    return own, "thinking_token_budget"


class ImagePart(msgspec.Struct, frozen=True):
    """An image in a message. `where` names its field, for errors."""

    url: str
    where: str
