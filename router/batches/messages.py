"""/v1/messages/batches: Anthropic's message batches, kept and answered like OpenAI's."""

from __future__ import annotations

import os

from tandem.api.batches.batch_request import BatchRequest
from tandem.api.batches.messages import ENDPOINT, MessageBatchDeleted, MessageBatchList, MessageBatchRequest, shown
from tandem.base.errors import InvalidRequest
from tandem.router.batches.answering import FIELDS, send_file
from tandem.router.batches.job_files import MOST_LINES
from tandem.router.batches.runner import BatchRunner
from tandem.router.batches.store import BatchStore, Form
from tandem.router.batches.store_thread import StoreThread
from tandem.router.batches.uploads import room
from tandem.router.http.body import read_body
from tandem.router.http.exchange import HttpExchange, Query, send_json
from tandem.router.http.services import Services

FORM: Form = "anthropic"
INPUT_PURPOSE = "message_batch"
MOST_IN_PAGE, USUAL_PAGE = 1000, 20


async def batches(thread: StoreThread, runner: BatchRunner, services: Services, exchange: HttpExchange) -> None:
    owner = exchange.owner
    if exchange.scope["method"] == "POST":
        services.refuse_when_draining()
        if ENDPOINT not in services.handlers:
            raise InvalidRequest(f"this server has no {ENDPOINT}, so it answers no batches of messages")
        with services.bodies.share() as share:
            request = await read_body(exchange, MessageBatchRequest, services.config, share, FIELDS)
            count = len(request.requests)
            if count > MOST_LINES:
                raise InvalidRequest(f"requests: {count} are more than {MOST_LINES}; split the batch", "requests")
            made = await thread.ask(lambda store: _add(store, owner, request.lines(), count))
        runner.wake()
        await send_json(exchange.send, made)
        return
    query = Query(exchange)
    if query.text("before_id") is not None:
        raise InvalidRequest("before_id: not read here; page with after_id", "before_id")
    after, limit = query.text("after_id"), query.number("limit", USUAL_PAGE, MOST_IN_PAGE)
    found, more = await thread.ask(lambda store: store.jobs(owner, after, limit, FORM))
    ids = [each.id for each in found]
    page = [shown(each) for each in found]
    await send_json(exchange.send, MessageBatchList(page, ids[0] if ids else None, ids[-1] if ids else None, more))


def _add(store: BatchStore, owner: str, lines: bytes, count: int) -> object:
    """A batch that is refused leaves no file."""
    file_id, path = room(store, owner)
    try:
        with path.open("xb") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        store.files.add(file_id, owner, "messages.jsonl", INPUT_PURPOSE, len(lines), None)
        return shown(store.add_job(owner, BatchRequest(file_id, ENDPOINT), FORM, count))
    except BaseException:
        store.files.drop(file_id)
        raise


async def one_batch(thread: StoreThread, services: Services, exchange: HttpExchange) -> None:
    batch_id, owner = exchange.scope["path_params"]["batch_id"], exchange.owner
    if exchange.scope["method"] == "DELETE":
        await thread.ask(lambda store: store.delete_job(batch_id, owner, FORM))
        await send_json(exchange.send, MessageBatchDeleted(batch_id))
    else:
        await send_json(exchange.send, shown(await thread.ask(lambda store: store.job(batch_id, owner, FORM))))


async def cancel(thread: StoreThread, runner: BatchRunner, services: Services, exchange: HttpExchange) -> None:
    batch_id, owner = exchange.scope["path_params"]["batch_id"], exchange.owner
    cancelled = await thread.ask(lambda store: store.cancel(batch_id, owner, FORM))
    runner.wake()
    await send_json(exchange.send, shown(cancelled))


async def results(thread: StoreThread, services: Services, exchange: HttpExchange) -> None:
    batch_id, owner = exchange.scope["path_params"]["batch_id"], exchange.owner
    batch = await thread.ask(lambda store: store.job(batch_id, owner, FORM))
    if batch.output_file_id is None:
        raise InvalidRequest(f"{batch_id} is {batch.status} and has no results", "batch_id")
    await send_file(thread, exchange, batch.output_file_id, owner)
