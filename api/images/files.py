"""From a data URL to an image file that a node can read.

Here an image library handles untrusted bytes, so only four formats are read, of a size that is checked before
pixels are made. Every file is decoded whole, so a truncated file is refused here and not in the middle of a
step. Addresses are never fetched: a client could make the server ask machines that only the server can reach.
"""

from __future__ import annotations

import base64
import binascii
import re

import msgspec
from PIL.Image import DecompressionBombError

from tandem.api.openai.chat_request import ImagePart
from tandem.api.settings import RequestLimits
from tandem.base.errors import InvalidImage
from tandem.wire.images import FORMATS, open_image, upright_rgb

_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.IGNORECASE)
_TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
_SAME = {"MPO": "JPEG"}  # a JPEG with further pictures after the first, as some cameras write
# Each scan of a JPEG goes over all its pixels, and may have thirty bytes: a small file could keep a router and a node for hours.
# Progressive ones have about ten. These two bytes begin a scan, and stand elsewhere only in what a camera adds.
_SCAN, _MOST_SCANS = b"\xff\xda", 50
# Each part before the pixels begins with such a byte, and Pillow goes over these parts in Python. The pixels of a file of 8 MiB have
# about 23,000.
_PART, _MOST_PARTS = b"\xff", 200_000
_FEWEST_PIXELS = 4  # of a side: processors take a shorter one for the colours
_LONGEST_RATIO = 200  # of the longer side to the shorter


class ImageFile(msgspec.Struct, frozen=True):
    data: bytes
    width: int  # as the image is displayed
    height: int


def read_file(part: ImagePart, limits: RequestLimits) -> ImageFile:
    """Decodes and checks one image. Blocks for as long as decoding takes. Raises InvalidImage with the
    reason."""
    data, declared = _decoded(part, limits)
    try:
        return _checked(part, data, declared, limits)
    except InvalidImage:
        raise
    except Exception as error:  # a decoder may raise anything for a malformed file
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _refusal(part, f"cannot be read as {declared}: {what}") from error


def _decoded(part: ImagePart, limits: RequestLimits) -> tuple[bytes, str]:
    url = part.url
    begin = _DATA_URL.match(url[:256])
    if begin is None:
        if re.match(r"[a-z][a-z0-9+.-]*://", url[:64], re.IGNORECASE):
            raise _refusal(
                part,
                "must be a data URL (data:image/png;base64,...): this server fetches no addresses, because a client could have it ask "
                "machines that only the server can reach",
            )
        raise _refusal(part, "must be a data URL, such as data:image/png;base64,...")
    declared = begin[1].lower()
    if declared not in _TYPES:
        raise _refusal(part, f"must be of type {', '.join(sorted(_TYPES))}, not {declared}")
    if begin[3] is None:
        raise _refusal(part, "must be encoded as base64: data:image/png;base64,...")
    most = limits.image_bytes
    if (len(url) - begin.end()) * 3 // 4 > most + 2:
        raise _refusal(part, f"may have {most} bytes, and has more")
    try:
        data = base64.b64decode(url[begin.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(part, f"is not base64: {error}") from error
    if len(data) > most:
        raise _refusal(part, f"may have {most} bytes, and has {len(data)}")
    return data, declared


def _checked(part: ImagePart, data: bytes, declared: str, limits: RequestLimits) -> ImageFile:
    if data.startswith(b"\xff\xd8"):  # a JPEG, which opening would read up to its pixels
        if (scans := data.count(_SCAN)) > _MOST_SCANS:
            raise _refusal(part, f"is drawn in {scans} scans, more than {_MOST_SCANS}: save it again")
        if data.count(_PART) > _MOST_PARTS:
            raise _refusal(part, f"has more than the {_MOST_PARTS} marks that a JPEG may have: save it again")
    try:
        image = open_image(data)
    except DecompressionBombError as error:
        raise _refusal(part, f"has too many pixels: {error}") from error
    kind = _SAME.get(image.format or "", image.format)
    if kind not in FORMATS or kind != _TYPES[declared]:
        raise _refusal(part, f"says that it is {declared}, and is {kind}")
    width, height = image.size
    if width * height > limits.image_pixels:
        raise _refusal(part, f"has {width} x {height} pixels, more than {limits.image_pixels}: send a smaller copy")
    if min(width, height) < _FEWEST_PIXELS or max(width, height) > _LONGEST_RATIO * min(width, height):
        raise _refusal(
            part,
            f"has {width} x {height} pixels: each side must have at least {_FEWEST_PIXELS}, and the longer at most {_LONGEST_RATIO} times "
            "as many as the shorter",
        )
    width, height = upright_rgb(image).size
    return ImageFile(data, width, height)


def _refusal(part: ImagePart, why: str) -> InvalidImage:
    return InvalidImage(f"{part.where}: the image {why}", part.where)
