"""What the API has wings for: tool and reasoning formats, images in messages, and prompts as tensors.

Each is one module with the functions of its protocol here. Where its folder was deleted, answers are plain text, and what asks
for more is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tandem.api.answer_format import AnswerFormat, PlainText
from tandem.api.settings import ApiSettings, ReasoningName, RequestLimits, ToolFormat
from tandem.base.errors import ConfigurationError, InvalidRequest
from tandem.base.wings import find_wing

if TYPE_CHECKING:
    from tandem.api.openai.chat_request import ImagePart
    from tandem.api.openai.completion_request import CompletionRequest
    from tandem.api.text.chat_template import ChatTemplate
    from tandem.api.text.tokenizer import Tokenizer
    from tandem.wire.embeds import PromptEmbeds
    from tandem.wire.images import MediaFeature

FORMATS = "tandem.api.formats.joined"
IMAGES = "tandem.api.images.reader"
EMBEDS = "tandem.api.prompt_embeds.reading"


class FormatsWing(Protocol):
    def format_of(
        self, tool_format: ToolFormat, reasoning_format: ReasoningName, template: ChatTemplate | None
    ) -> AnswerFormat: ...
    def told_in_words(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool
    ) -> Sequence[Mapping[str, Any]]: ...


class PromptImages(Protocol):
    """The images of one request, checked."""

    @property
    def files(self) -> list[bytes]: ...
    def expanded(self, text: str) -> str:
        """Returns the prompt with every placeholder expanded for its image."""

    def features(self, token_ids: Sequence[int]) -> list[MediaFeature]:
        """Returns where the images are in the prompt."""


class ImageReader(Protocol):
    async def read(self, parts: Sequence[ImagePart], tenant: str) -> PromptImages:
        """Decodes the images, those of one key in turn. Raises InvalidImage for the first that cannot be read."""


class ImagesWing(Protocol):
    def image_reader(self, folder: str, tokenizer: Tokenizer, limits: RequestLimits) -> ImageReader | None: ...


class EmbedsWing(Protocol):
    async def embeds_of(self, request: CompletionRequest, config: ApiSettings) -> list[PromptEmbeds]: ...


def format_of(config: ApiSettings, template: ChatTemplate | None) -> AnswerFormat:
    """How the model writes its answers."""
    if formats := find_wing(FORMATS):
        return cast("FormatsWing", formats).format_of(config.tool_format, config.reasoning_format, template)
    for name, chosen in (("tool_format", config.tool_format), ("reasoning_format", config.reasoning_format)):
        if chosen not in ("auto", "none"):
            raise ConfigurationError(f"router.{name}: {chosen} is not read: this server has no api/formats")
    return PlainText()


def told_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> Sequence[Mapping[str, Any]]:
    """Tells a model of tools whose template has none."""
    if formats := find_wing(FORMATS):
        return cast("FormatsWing", formats).told_in_words(messages, tools, has_system=has_system)
    raise no_calls()


def no_calls() -> InvalidRequest:
    return InvalidRequest("tools: this server reads no calls (it has no api/formats); leave them out", "tools")


def image_reader(folder: str, tokenizer: Tokenizer, limits: RequestLimits) -> ImageReader | None:
    """A reader for the model in this folder. None when the model reads no images, or none are read here."""
    if images := find_wing(IMAGES):
        return cast("ImagesWing", images).image_reader(folder, tokenizer, limits)
    return None


async def embeds_of(request: CompletionRequest, config: ApiSettings) -> list[PromptEmbeds] | None:
    """Returns the request's embeddings, or None when its prompt is text or tokens."""
    if request.prompt_embeds is None:
        return None
    if not config.prompt_embeds:
        raise InvalidRequest("prompt_embeds: this server takes none (router.prompt_embeds)", "prompt_embeds")
    if embeds := find_wing(EMBEDS):
        return await cast("EmbedsWing", embeds).embeds_of(request, config)
    raise InvalidRequest("prompt_embeds: this server takes none (it has no api/prompt_embeds)", "prompt_embeds")
