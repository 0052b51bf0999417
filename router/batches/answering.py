"""What the routes of files and batches share."""

from __future__ import annotations

from tandem.api.batches import batch_request, messages
from tandem.api.field_table import FieldTable
from tandem.router.batches.store_thread import StoreThread
from tandem.router.batches.stored_files import FileNotHere
from tandem.router.http.exchange import HttpExchange

READ_BYTES = 256 << 10
# Apart from the fields of requests that are answered: none of those belongs here.
FIELDS = FieldTable((*batch_request.FIELDS, *messages.FIELDS))


async def send_file(thread: StoreThread, exchange: HttpExchange, file_id: str, owner: str) -> None:
    about = await thread.ask(lambda store: store.files.one(file_id, owner))
    try:
        file = await thread.ask(lambda store: store.files.path_of(file_id).open("rb"))
    except FileNotFoundError:
        raise FileNotHere(f"there is no file {file_id} any more") from None
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(about.bytes).encode())]

    async def write() -> None:
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        left = about.bytes
        while left:
            data = await thread.ask(lambda _: file.read(READ_BYTES))
            left -= len(data)
            await exchange.send({"type": "http.response.body", "body": data, "more_body": left > 0 and bool(data)})
            if not data:
                return

    try:
        await exchange.until_disconnect(write)
    finally:
        thread.soon(lambda _: file.close())
