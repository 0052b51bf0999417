from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import ConnectorContext
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.multi import create_connector
from tandem.kvtransfer.registry import CONNECTORS, find_connector


def context(**config: object) -> ConnectorContext:
    return ConnectorContext("n", 1, "127.0.0.1", 16, TransferConfig(**config), lambda: None)  # type: ignore[arg-type]


def test_every_registered_connector_is_there() -> None:
    for name in CONNECTORS:
        assert callable(find_connector(name))


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"no connector 'teleport'; there are .*nixl"):
        find_connector("teleport")


@pytest.mark.parametrize("name", ["", ":", "os:", ":create", "no.such.module:create", "os:no_such_name", "os:sep"])
def test_a_path_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"transfer\.connector"):
        find_connector(name)


def test_a_module_that_fails_to_import_is_a_configuration_error(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken_connector.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="no_such_dependency"):
        find_connector("broken_connector:create")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"direction": "sideways"}, r"transfer\.direction must be one of push, pull, not 'sideways'"),
        ({"options": {"speed": "11"}}, r"transfer\.options of the nixl connector: .*speed"),
        ({"options": {"progress_ms": "0"}}, r"progress_ms must be at least 1"),
        ({"options": {"progress_ms": "often"}}, r"transfer\.options of the nixl connector"),
        ({"options": {"backend": "CARRIER_PIGEON"}}, r"no 'CARRIER_PIGEON' here, only .*UCX"),
        ({"lease_s": 0}, r"transfer\.lease_s must be above 0"),
        ({"lease_s": 1e9}, r"transfer\.lease_s must be at most 3600"),
        ({"timeout_s": -1}, r"transfer\.timeout_s must be above 0"),
        ({"handshake_timeout_s": float("nan")}, r"transfer\.handshake_timeout_s must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(config: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        create_connector(context(**config))


@pytest.mark.slow
def test_naming_a_connector_does_not_load_the_others() -> None:
    """Slow: a Python of its own, to see what it has imported."""
    program = (
        "import sys; import tandem.kvtransfer.registry as r; r.find_connector('json:dumps');"
        "print([m for m in sys.modules if m.startswith(('nixl', 'torch', 'tandem.kvtransfer.nixl'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
