from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kvtransfer.objects.seaweed import WEED, SeaweedStore


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedStore]:
    if not WEED.exists():
        pytest.skip(f"{WEED} is not there: `make test-objects` installs it")
    store = SeaweedStore(tmp_path_factory.mktemp("seaweed"))
    yield store
    store.close()
