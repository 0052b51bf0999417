"""What an operator writes about an object store, and how its requests are signed."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.config import EvictionPolicy, TierConfig
from tandem.kvtransfer.objects.options import AccessKeys, CredentialFile, ObjectOptions
from tandem.kvtransfer.objects.signing import signed
from tandem.kvtransfer.offload.spec import create_tier


def test_a_request_is_signed_as_in_awss_own_example() -> None:
    """The example "GET Object" in Amazon's description of signature version 4."""
    keys = AccessKeys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    headers = {"Host": "examplebucket.s3.amazonaws.com", "Range": "bytes=0-9"}
    moment = datetime(2013, 5, 24, tzinfo=UTC)
    made = signed("GET", "/test.txt", headers, hashlib.sha256(b"").hexdigest(), keys, "us-east-1", moment)
    assert made["authorization"].endswith(
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "url"),
        ({"url": "https://host/bucket", "bucket": "b"}, "bucket"),
        ({"url": "s3://bucket"}, "must be http"),
        ({"url": "https://key:secret@host/bucket"}, "without a key"),
        ({"url": "https://host"}, "names no bucket"),
        ({"url": "https://host/a/../b"}, "names no bucket"),
        ({"url": "https://host:99999/bucket"}, "not right"),
        ({"url": "https://host/bucket", "credentials": "/nowhere"}, "'/nowhere', cannot be read"),
        ({"url": "https://host/bucket", "ca_file": "/nowhere"}, "ca_file"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(ConfigurationError, match=said):
        create_tier(TierConfig(spec="objects", options=options))


def test_a_policy_of_evicting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no policy"):
        create_tier(TierConfig(spec="objects", policy=EvictionPolicy.ARC, options={"url": "https://h/b"}))


def test_keys_come_from_a_file_that_may_be_replaced_or_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text("[a]\naws_access_key_id = x\naws_secret_access_key = y%z\n")
    ring = CredentialFile(ObjectOptions("https://h/b", credentials=str(file), profile="a"))
    assert ring.keys() == AccessKeys("x", "y%z")
    file.write_text("[a]\naws_access_key_id = x2\naws_secret_access_key = y2\naws_session_token = t\n")
    os.utime(file, (1, 1))
    assert ring.keys() == AccessKeys("x2", "y2", "t")
    assert "y2" not in repr(ring.keys()), "a secret is shown nowhere"
    with pytest.raises(ConfigurationError, match=r"\[default\] with aws_access_key_id"):
        CredentialFile(ObjectOptions("https://h/b", credentials=str(file))).keys()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "e")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "f")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    assert CredentialFile(ObjectOptions("https://h/b")).keys() == AccessKeys("e", "f")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigurationError, match="no key to its store"):
        CredentialFile(ObjectOptions("https://h/b")).keys()
