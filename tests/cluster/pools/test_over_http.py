"""What an operator's HTTP key may not change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import ControllerConfig, TandemConfig
from tandem.cluster.pools.over_http import check_adapters, check_config


def config(**tree: Any) -> TandemConfig:
    base = msgspec.to_builtins(TandemConfig())
    return msgspec.convert(_merged(base, tree), TandemConfig)


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: _merged(base.get(key), value) for key, value in over.items()}


REFUSED: dict[str, dict[str, Any]] = {
    "router.env.LD_PRELOAD": {"router": {"env": {"LD_PRELOAD": "x.so"}}},
    "controller.env.PYTHONPATH": {"controller": {"env": {"PYTHONPATH": "x"}}},
    "pools.decode.env.BROWSER": {"pools": {"decode": {"env": {"BROWSER": "sh"}}}},
    "pools.prefill.transfer_options.x": {"pools": {"prefill": {"transfer_options": {"x": "1"}}}},
    "transfer.connector": {"transfer": {"connector": "os:system"}},
    "transfer.options.x": {"transfer": {"options": {"x": "1"}}},
    "controller.admin_may_run_code": {"controller": {"admin_may_run_code": True}},
    "controller.admin_folders": {"controller": {"admin_folders": ["/"]}},
    "model.path": {"model": {"path": "/etc"}},
    "model.engine_python": {"model": {"engine_python": "/tmp/python"}},
    "model.engine_args.worker_cls": {"model": {"engine_args": {"worker_cls": "os:system"}}},
    "model.draft": {"model": {"draft": "./here"}},
    "model.adapters.a": {"model": {"adapters": {"a": "/home/b/adapter"}}},
    "model.hidden_states_folder": {"model": {"hidden_states_folder": "states"}},
    "scheduler.trace_folder": {"scheduler": {"trace_folder": "/var/traces"}},
    "router.chat_template": {"router": {"chat_template": "/etc/passwd"}},
    "router.api_keys_file": {"router": {"api_keys_file": "keys"}},
    "router.tls_certificate": {"router": {"tls_certificate": "/root/c", "tls_key": "/root/k"}},
    "router.tokenizer_path": {"router": {"tokenizer_path": "/srv/models-else"}},
    "cache.tiers": {"cache": {"tiers": [{"spec": "os:system"}]}},
    "pools.decode.cache.tiers": {"pools": {"decode": {"cache": {"tiers": [{"disk": "kv", "size": 1 << 20}]}}}},
    "pools.decode.scheduler.trace_folder": {"pools": {"decode": {"scheduler": {"trace_folder": "here"}}}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_run_programs_or_reach_files_is_refused_by_name(name: str) -> None:
    wanted = config(**REFUSED[name])
    with pytest.raises(ConfigurationError, match=r"cannot be changed over HTTP.*on a machine of the cluster") as told:
        check_config(config(), wanted, dry_run=False)
    assert str(told.value).startswith(name)
    check_config(wanted, wanted, dry_run=False)  # unchanged
    check_config(config(controller={"admin_may_run_code": True}), wanted, dry_run=False)


def test_other_settings_and_paths_in_a_configured_folder_are_changed() -> None:
    folders = {"admin_folders": ["/srv/models/"]}
    running = config(controller=folders, scheduler={"trace_folder": "/var/traces"})
    wanted = config(
        controller=folders,
        scheduler={"trace_folder": "", "max_num_seqs": 77},
        model={"path": "/srv/models/next", "adapters": {"a": "owner/name"}},
        router={
            "tokenizer_path": "/srv/models/next",
            "chat_template": "{{ messages }}",
            "api_keys": [{"key": "/key", "name": "ops"}],
        },
        pools={"decode": {"nodes": 3, "cache": {"memory_bytes": 1 << 30}}},
    )
    check_config(running, wanted, dry_run=False)
    for escape in ("/srv/models/../../etc", "/srv/models-else", "/srv", "srv/models/../.."):
        with pytest.raises(ConfigurationError, match=r"model\.path"):
            check_config(running, config(controller=folders, model={"path": escape}), dry_run=False)


def test_a_dry_run_may_ask_under_which_path_the_model_is_known() -> None:
    wanted = config(model={"path": "/here"}, router={"tokenizer_path": "/here"})
    check_config(config(), wanted, dry_run=True)
    with pytest.raises(ConfigurationError, match=r"model\.path, router\.tokenizer_path"):
        check_config(config(), wanted, dry_run=False)


def test_adapters_come_from_the_hub_or_from_a_configured_folder() -> None:
    controller = ControllerConfig(admin_folders=["/srv/adapters", "models", ""])  # the others are no whole paths
    loaded = {"old": "/home/old"}
    for where in ("owner/name", "/srv/adapters/new"):
        check_adapters(controller, loaded, {"new": where})
    check_adapters(controller, loaded, {"old": "/home/old"})
    for where in ("/home/new", "/srv/adapters/../new", "/srv/adapters-else", "/models/a"):
        with pytest.raises(ConfigurationError, match=r"admin_folders: /srv/adapters.*machine of the cluster"):
            check_adapters(controller, loaded, {"new": where})
    check_adapters(ControllerConfig(admin_may_run_code=True), {}, {"new": "/home/new"})
