"""What a router serves: the model's names, its tokenizer and template, and what the checks of a request need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tandem.router.config import RouterConfig
from tandem.router.formats.detection import format_of
from tandem.router.images.reader import ImageReader
from tandem.router.openai.sampling import defaults_of
from tandem.router.text.chat_template import ChatTemplate, SpecialTextGuard
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.adapters import identity_of
from tandem.wire.errors import UnknownModel
from tandem.wire.pooling import VectorModel


class ModelElsewhere(UnknownModel):
    """Another deployment's, whose router is known here."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model[:200]!r} is another deployment's, which cannot be asked this here"
        )
        self.model = model


class ServedModel:
    """What this router serves, and what the checks need to know of it."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: Callable[[], int | None],
        created: int,
        vectors: Callable[[], VectorModel | None] = lambda: None,
        adapters: Callable[[], Mapping[str, str]] = dict,
        images: ImageReader | None = None,
    ) -> None:
        """`images`: None where the model reads none."""
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.guard = SpecialTextGuard(tokenizer)
        self.created = created
        self.defaults = defaults_of(config)
        self.format = format_of(config.tool_format, config.reasoning_format, template)
        self.names = (config.model_name, *config.model_aliases)
        self._max_model_len = max_model_len
        self._vectors = vectors
        self._adapters = adapters
        self.images = images

    @property
    def max_model_len(self) -> int | None:
        """The shortest of the nodes': any of them may get the request. None while there is no node."""
        return self._max_model_len()

    @property
    def vectors(self) -> VectorModel | None:
        """None where the nodes' model makes none, or while there is no node."""
        return self._vectors()

    def name_of(self, name: str | None) -> str:
        """As an answer gives it: what the request called it, which may be nothing."""
        return self.names[0] if name is None else name

    @property
    def adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that requests may name, by name: their digests."""
        return self._adapters()

    def check_name(self, name: str | None) -> None:
        if name is not None and name not in self.names and name not in self.adapters:
            if name in self.config.other_models:
                raise ModelElsewhere(name)
            known = ", ".join((*self.names, *sorted(self.adapters), *self.config.other_models))
            raise UnknownModel(f"the model {name[:200]!r} does not exist; this server has {known[:2000]}")

    def adapter_of(self, name: str | None) -> str | None:
        """The identity of the adapter that a request calls its model; None for the model itself."""
        if name is None or name in self.names:
            return None
        digest = self.adapters.get(name)
        if digest is None:  # a node that lacks it has come since the name was checked
            raise UnknownModel(f"the model {name[:200]!r} does not exist any more")
        return identity_of(name, digest)
