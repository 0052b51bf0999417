"""What a router serves: its model's names, tokenizer, template, and how it writes answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from tandem.api import wings
from tandem.api.openai.fields import SamplingFields
from tandem.api.openai.sampling import defaults_of
from tandem.api.settings import ApiSettings
from tandem.api.text.chat_template import ChatTemplate, SpecialTextGuard
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import InvalidRequest, RequestError, UnknownModel
from tandem.wire.adapters import identity_of
from tandem.wire.pooling import VectorModel

RequestT = TypeVar("RequestT", bound=SamplingFields)


class NotHere(RequestError):
    """What a path names by its id, which names no model, is not here. Another deployment may have it."""

    http_status = 404


class ModelElsewhere(UnknownModel):
    """A model of another deployment whose router is known here."""

    def __init__(self, model: str) -> None:
        super().__init__(f"the model {model[:200]!r} is another deployment's, which cannot be asked this here")
        self.model = model


class ServedModel:
    """What this router serves, and what the checks need to know about it."""

    def __init__(
        self,
        config: ApiSettings,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: Callable[[], int | None],
        created: int,
        vectors: Callable[[], VectorModel | None] = lambda: None,
        adapters: Callable[[], Mapping[str, str]] = dict,
        images: wings.ImageReader | None = None,
    ) -> None:
        """`images`: None when the model reads no images."""
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.guard = SpecialTextGuard(tokenizer)
        self.created = created
        self.defaults = defaults_of(config)
        self.format = wings.format_of(config, template)
        self.names = (config.model_name, *config.model_aliases)
        self._max_model_len = max_model_len
        self._vectors = vectors
        self._adapters = adapters
        self.images = images

    @property
    def max_model_len(self) -> int | None:
        """The shortest context length of the nodes, because any of them may get the request. None while there
        is no node."""
        return self._max_model_len()

    @property
    def vectors(self) -> VectorModel | None:
        """How the model makes vectors. None when it makes none, or while there is no node."""
        return self._vectors()

    def name_of(self, name: str | None) -> str:
        """The model's name in an answer: the one that the request used, or the first."""
        return self.names[0] if name is None else name

    @property
    def adapters(self) -> Mapping[str, str]:
        """The digests, by name, of the LoRA adapters that requests may use."""
        return self._adapters()

    def check_name(self, name: str | None) -> None:
        if name is not None and name not in self.names and name not in self.adapters:
            if name in self.config.other_models:
                raise ModelElsewhere(name)
            known = ", ".join((*self.names, *sorted(self.adapters), *self.config.other_models))
            raise UnknownModel(f"the model {name[:200]!r} does not exist; this server has {known[:2000]}")

    def named_by(self, request: RequestT) -> RequestT:
        """Checks the names of model and adapter. Returns the request with the adapter of `lora_path` as its model."""
        self.check_name(request.model)
        adapter = request.lora_path
        if adapter is None or adapter == request.model:
            return request
        if request.model is not None and request.model not in self.names:
            raise InvalidRequest(f"lora_path: contradicts model, the adapter {request.model!r}; set one", "lora_path")
        if adapter not in self.adapters:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise InvalidRequest(
                f"lora_path: {adapter[:200]!r} is no adapter of this server; it has {known[:2000]}", "lora_path"
            )
        return msgspec.structs.replace(request, model=adapter)

    def adapter_of(self, name: str | None) -> str | None:
        """Returns the identity of the adapter that a request names as its model; None for the model
        itself."""
        if name is None or name in self.names:
            return None
        digest = self.adapters.get(name)
        if digest is None:  # it was unloaded since the name was checked
            raise UnknownModel(f"the model {name[:200]!r} does not exist any more")
        return identity_of(name, digest)
