"""/v1/files and /v1/batches: OpenAI's files and batches."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from urllib.parse import quote

from tandem.api.anthropic.answer_types import MessagesError
from tandem.api.batches.answer_types import BatchList, BatchObject, FileDeleted, FileList, FileObject
from tandem.api.batches.batch_request import BatchRequest
from tandem.api.batches.messages import MessageBatch, MessageBatchDeleted, MessageBatchList, MessageBatchRequest
from tandem.router.batches import messages
from tandem.router.batches.answering import FIELDS, send_file
from tandem.router.batches.runner import BatchRunner
from tandem.router.batches.store import BatchStore
from tandem.router.batches.store_thread import StoreThread
from tandem.router.batches.uploads import upload
from tandem.router.http.body import read_body
from tandem.router.http.exchange import HttpExchange, Query, send_json
from tandem.router.http.operation import ApiOperation
from tandem.router.http.services import Services
from tandem.router.wings import RouteRow, RouterWing

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MOST_IN_PAGE, USUAL_PAGE = 10_000, 20
MOST_BATCHES_IN_PAGE = 100

_ERRORS = ("400", "401", "404", "503", "507")
_BODY_ERRORS = (*_ERRORS, "408", "413", "415")
_MESSAGE = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 60}
_of_messages = partial(ApiOperation, errors=_ERRORS, error=MessagesError)


def state_folder(folder: str, model_name: str) -> Path:
    """Returns `router.batches_folder`, or the default: a folder of this model in the user's folder for state."""
    if folder:
        return Path(folder).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "tandem" / "batches" / quote(model_name, safe="")


class Batches(RouterWing):
    # fmt: off
    operations = (
        ApiOperation("get", "/v1/files", "The files of this key", FileList, errors=_ERRORS),
        # Its body is multipart/form-data, and the page to try the API has no form for that.
        ApiOperation(
            "post", "/v1/files", "Keep a file, sent as a form with `file` and `purpose`", FileObject,
            errors=(*_ERRORS, "408", "413"),
        ),
        ApiOperation("get", "/v1/files/{file_id}", "One file's name and size", FileObject, errors=_ERRORS),
        ApiOperation("delete", "/v1/files/{file_id}", "Delete it", FileDeleted, errors=_ERRORS),
        ApiOperation("get", "/v1/batches", "The batches of this key, the newest first", BatchList, errors=_ERRORS),
        ApiOperation(
            "post", "/v1/batches", "Have a file of requests answered when the cluster is idle", BatchObject, BatchRequest,
            _BODY_ERRORS, example={"input_file_id": "file-…", "endpoint": "/v1/chat/completions"},
        ),
        ApiOperation("get", "/v1/batches/{batch_id}", "One batch, as it is now", BatchObject, errors=_ERRORS),
        ApiOperation("post", "/v1/batches/{batch_id}/cancel", "Answer no more of its lines", BatchObject, errors=_ERRORS),
        _of_messages("get", "/v1/messages/batches", "The batches of messages, the newest first", MessageBatchList),
        _of_messages(
            "post", "/v1/messages/batches", "Have messages answered when the cluster is idle", MessageBatch,
            request=MessageBatchRequest, errors=_BODY_ERRORS,
            example={"requests": [{"custom_id": "a", "params": _MESSAGE}]},
        ),
        _of_messages("get", "/v1/messages/batches/{batch_id}", "One batch of messages", MessageBatch),
        _of_messages("delete", "/v1/messages/batches/{batch_id}", "Forget it", MessageBatchDeleted),
        _of_messages("post", "/v1/messages/batches/{batch_id}/cancel", "Answer no more of it", MessageBatch),
    )
    # fmt: on

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        folder = state_folder(services.config.batches_folder, services.config.model_name)
        self.thread = StoreThread(BatchStore(folder))
        self.runner = BatchRunner(services, self.thread)

    @property
    def endpoints(self) -> list[str]:
        """The paths whose requests a batch may have: those that this server has."""
        return [path for path in ENDPOINTS if path in self.services.handlers]

    def routes(self) -> list[RouteRow]:
        return [
            ("/v1/files", partial(files, self), ["GET", "POST"]),
            ("/v1/files/{file_id}", partial(one_file, self), ["GET", "DELETE"]),
            ("/v1/files/{file_id}/content", partial(content, self), ["GET"]),
            ("/v1/batches", partial(batches, self), ["GET", "POST"]),
            ("/v1/batches/{batch_id}", partial(one_batch, self), ["GET"]),
            ("/v1/batches/{batch_id}/cancel", partial(cancel, self), ["POST"]),
            ("/v1/messages/batches", partial(messages.batches, self.thread, self.runner), ["GET", "POST"]),
            ("/v1/messages/batches/{batch_id}", partial(messages.one_batch, self.thread), ["GET", "DELETE"]),
            ("/v1/messages/batches/{batch_id}/cancel", partial(messages.cancel, self.thread, self.runner), ["POST"]),
            ("/v1/messages/batches/{batch_id}/results", partial(messages.results, self.thread), ["GET"]),
        ]

    async def start(self) -> None:
        self.runner.start()

    async def ending(self) -> None:
        await self.runner.stop()

    async def close(self) -> None:
        await self.runner.stop()
        await self.thread.close()


async def files(wing: Batches, services: Services, exchange: HttpExchange) -> None:
    if exchange.scope["method"] == "POST":
        services.refuse_when_draining()
        await send_json(exchange.send, await upload(wing.thread, services, exchange))
        return
    query = Query(exchange)
    after, limit = query.text("after"), query.number("limit", USUAL_PAGE, MOST_IN_PAGE)
    purpose, newest_first = query.text("purpose"), query.text("order") != "asc"
    owner = exchange.owner
    found, more = await wing.thread.ask(
        lambda store: store.files.page(owner, after, limit, purpose, newest_first=newest_first)
    )
    ids = [each.id for each in found]
    await send_json(exchange.send, FileList(found, ids[0] if ids else None, ids[-1] if ids else None, more))


async def one_file(wing: Batches, services: Services, exchange: HttpExchange) -> None:
    file_id, owner = exchange.scope["path_params"]["file_id"], exchange.owner
    if exchange.scope["method"] == "DELETE":
        await wing.thread.ask(lambda store: store.files.delete(file_id, owner))
        await send_json(exchange.send, FileDeleted(file_id))
    else:
        await send_json(exchange.send, await wing.thread.ask(lambda store: store.files.one(file_id, owner)))


async def content(wing: Batches, services: Services, exchange: HttpExchange) -> None:
    """Sends the file in pieces, as fast as the client reads."""
    file_id, owner = exchange.scope["path_params"]["file_id"], exchange.owner
    await send_file(wing.thread, exchange, file_id, owner)


async def batches(wing: Batches, services: Services, exchange: HttpExchange) -> None:
    owner = exchange.owner
    if exchange.scope["method"] == "POST":
        services.refuse_when_draining()
        with services.bodies.share() as share:
            request = await read_body(exchange, BatchRequest, services.config, share, FIELDS)
        request.check(wing.endpoints)
        made = await wing.thread.ask(lambda store: store.add_job(owner, request))
        wing.runner.wake()
        await send_json(exchange.send, made)
        return
    query = Query(exchange)
    after, limit = query.text("after"), query.number("limit", USUAL_PAGE, MOST_BATCHES_IN_PAGE)
    found, more = await wing.thread.ask(lambda store: store.jobs(owner, after, limit))
    ids = [each.id for each in found]
    await send_json(exchange.send, BatchList(found, ids[0] if ids else None, ids[-1] if ids else None, more))


async def one_batch(wing: Batches, services: Services, exchange: HttpExchange) -> None:
    batch_id, owner = exchange.scope["path_params"]["batch_id"], exchange.owner
    await send_json(exchange.send, await wing.thread.ask(lambda store: store.job(batch_id, owner)))


async def cancel(wing: Batches, services: Services, exchange: HttpExchange) -> None:
    batch_id, owner = exchange.scope["path_params"]["batch_id"], exchange.owner
    cancelled = await wing.thread.ask(lambda store: store.cancel(batch_id, owner))
    wing.runner.wake()
    await send_json(exchange.send, cancelled)


WING = Batches
