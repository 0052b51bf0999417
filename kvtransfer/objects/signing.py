"""Signs requests to object stores: AWS's signature version 4, which every S3-compatible store checks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from datetime import datetime

from tandem.kvtransfer.objects.options import AccessKeys

_ALGORITHM = "AWS4-HMAC-SHA256"
_SERVICE = "s3"


def signed(
    method: str, path: str, headers: Mapping[str, str], body_sha256: str, keys: AccessKeys, region: str, now: datetime
) -> dict[str, str]:
    """Returns these headers and those that prove that the holder of the keys sends them. `path` is as in the request's
    first line, quoted, without a query. `headers` has `host`. `now`: in UTC."""
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    named = {name.lower(): value.strip() for name, value in headers.items()}
    named |= {"x-amz-content-sha256": body_sha256, "x-amz-date": moment}
    if keys.token:
        named["x-amz-security-token"] = keys.token
    names = ";".join(sorted(named))
    lines = "".join(f"{name}:{named[name]}\n" for name in sorted(named))
    canonical = "\n".join((method, path, "", lines, names, body_sha256))
    scope = f"{moment[:8]}/{region}/{_SERVICE}/aws4_request"
    to_sign = "\n".join((_ALGORITHM, moment, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{keys.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    named["authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return named
