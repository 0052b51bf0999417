"""One configuration is built from four sources, and every mistake in them is reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.commands.show_config import as_values, render
from tandem.cluster.describe import format_size, parse_size, ranges
from tandem.cluster.settings.combined import Settings, SettingsError, resolve
from tandem.cluster.settings.layers import Layer, read_assignments, read_environment, read_file
from tandem.cluster.settings.names import dotted, known_settings
from tandem.engine.config import CacheConfig, Reserve
from tandem.router.config import PolicyName
from tandem.wire.nodes import Role


def settings(
    folder: Path,
    text: str = "",
    environment: dict[str, str] | None = None,
    flags: list[tuple[str, str, str]] | None = None,
) -> Settings:
    file = folder / "tandem.yaml"
    file.write_text(text, encoding="utf-8")
    return resolve([read_file(file), read_environment(environment or {}), read_assignments(flags or [])])


def mistakes(folder: Path, *sources: object) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        settings(folder, *sources)  # type: ignore[arg-type]
    return [mistake.replace(str(folder / "tandem.yaml"), "FILE") for mistake in raised.value.mistakes]


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        "router: {port: 1, host: 10.0.0.1, policy: round_robin}",
        {"TANDEM_ROUTER__PORT": "2", "TANDEM_ROUTER__HOST": "10.0.0.2"},
        [("router.port", "3", "--port")],
    )
    assert (found.config.router.port, found.config.router.host) == (3, "10.0.0.2")
    assert found.config.router.policy is PolicyName.ROUND_ROBIN
    assert found.origins["router", "port"] == "--port"
    assert found.origins["router", "host"] == "TANDEM_ROUTER__HOST"


def test_a_plain_value_stands_for_a_section_where_there_is_an_obvious_one(tmp_path: Path) -> None:
    found = settings(tmp_path, "model: org/name\npools: {prefill: 3, decode: {nodes: 2, threads: 4}}").config
    assert found.model.path == "org/name"
    assert (found.pools.prefill.nodes, found.pools.decode.nodes, found.pools.decode.threads) == (3, 2, 4)


@pytest.mark.parametrize(
    ("text", "flags", "counts"),
    [
        ("", {}, (1, 1, 0)),
        ("", {"pools.aggregated": "2"}, (0, 0, 2)),
        ("", {"pools.prefill": "3"}, (3, 1, 0)),
        ("pools: {prefill: 2, decode: 4}", {"pools.aggregated": "1"}, (0, 0, 1)),
        ("pools: {aggregated: 2}", {"pools.decode": "3"}, (1, 3, 0)),
        ("pools: {aggregated: 2}", {}, (0, 0, 2)),
        ("pools: {prefill: 2}", {"pools.aggregated": "0"}, (2, 1, 0)),
    ],
)
def test_asking_for_one_layout_does_not_bring_the_other(
    tmp_path: Path, text: str, flags: dict[str, str], counts: tuple[int, int, int]
) -> None:
    pools = settings(tmp_path, text, {}, [(name, value, "--set") for name, value in flags.items()]).config.pools
    assert (pools.prefill.nodes, pools.decode.nodes, pools.aggregated.nodes) == counts


def refusals(layers: list[Layer]) -> list[str]:
    try:
        resolve(layers)
    except SettingsError as error:
        return error.mistakes
    return []


def flags(*assignments: tuple[str, str]) -> list[tuple[str, str, str]]:
    return [(name, value, "--set") for name, value in assignments]


MISTAKES = [
    ("pools: {prefil: 2}", "pools.prefil is not a setting; did you mean pools.prefill?"),
    ("port: 80", "port is not a setting; did you mean router.port?"),
    ("zzz: 1", "zzz is not a setting"),
    ("router: {port: eighty}", "router.port must be a whole number, not 'eighty'"),
    ("router: {port: 99999}", "router.port must be from 0 to 65535, not 99999"),
    ("router: 8000", "router is a section: set what is in it, such as router.model_aliases"),
    ("router: {policy: round_robbin}",
     "router.policy must be one of least_wait, round_robin, prefix_affinity, session_affinity, " "not 'round_robbin'; did you mean round_robin?"),
    ("router: {tokenizer_path: /x}", "router.tokenizer_path cannot be set: it follows from model.path"),
    ("router: {model_name: x}", "router.model_name cannot be set: set model.served_name instead"),
    ("model: 7", "model.path must be text, not 7; put it in quotes"),
    ("model: {dtype: float8}", "model.dtype must be one of auto, bfloat16, float16, float32, not 'float8'; did you mean float32?"),
    ("model: ''", "model.path must not be empty, not ''"),
    ("pools: {prefill: 0, decode: 0}",
     "pools.prefill.nodes and every other pool that answers is 0: no node would answer; " "set prefill and decode to at least 1 each, or aggregated"),
    ("pools: {decode: 0}", "pools.decode.nodes is 0, but pools.prefill is 1: set it to at least 1"),
    ("pools: {prefill: 0}", "pools.prefill.nodes is 0, but pools.decode is 1: set it to at least 1, or use pools.aggregated"),
    ("pools: {prefill: 1, decode: 2, aggregated: 3}",
     "pools.aggregated.nodes is 3, but pools.prefill is 1 and pools.decode is 2: " "choose one layout and set the other's counts to 0"),
    (
        "{pools: {decode: {nodes: 1, tensor_parallel: 2}}, model: {device: 'cuda:0'}, transfer: {connector: nccl}}",
        "pools.decode.tensor_parallel is 2, and each rank keeps its KV on a GPU of its own, which transfer.connector nccl does not "
        "transfer: set transfer.connector to nixl",
    ),
    (
        "{pools: {decode: {nodes: 1, tensor_parallel: 2}}, model: {device: 'cuda:0'}, transfer: {options: {staging: host}}}",
        "pools.decode.tensor_parallel is 2, and each rank keeps its KV on a GPU of its own, but transfer.options.staging is host, "
        "which copies from one GPU only: set it to none",
    ),
    ("pools: {aggregated: {nodes: 1, tensor_parallel: 4, resources: {GPU: 1}}}",
     "pools.aggregated.resources has {GPU: 1}, but a node's 4 ranks need a GPU each: set {GPU: 4}"),
    ("pools: {aggregated: {tensor_parallel: 2}}",
     "pools.aggregated.tensor_parallel is 2, but pools.aggregated.nodes is 0: set it to at least 1"),
    ("pools: {decode: {nodes: 1, tensor_parallel: 8, pipeline_parallel: 4}}",
     "pools.decode.pipeline_parallel is 4, and tensor_parallel 8: a node would have 32 ranks, but at most 16 are possible"),
    ("{pools: {decode: {nodes: 1, pipeline_parallel: 2}}, model: {hidden_states_folder: /tmp/x}}",
     "pools.decode.pipeline_parallel is 2, but model.hidden_states_folder asks for layers that other stages compute: leave it out"),
    ("{pools: {prefill: {nodes: 1, context_parallel: 2}}, model: {hidden_states_folder: /tmp/x}}",
     "pools.prefill.context_parallel is 2, but model.hidden_states_folder asks for tokens that other ranks compute: leave it out"),
    (
        "{pools: {prefill: {nodes: 1, pipeline_parallel: 2, context_parallel: 2}}}",
        "pools.prefill.pipeline_parallel is 2, but each of its ranks has only some of the layers, and context_parallel shares tokens among "
        "ranks that have all: set one of the two to 1",
    ),
    ("{pools: {aggregated: {nodes: 1, tensor_parallel: 2}}, scheduler: {max_loras: 2}}",
     "pools.aggregated.tensor_parallel is 2, but scheduler.max_loras asks for adapters, whose matrices are not cut: set it to 0"),
    ("{pools: {aggregated: {nodes: 1, tensor_parallel: 2}}, scheduler: {num_speculative_tokens: 2}, model: {draft: a/b}}",
     "pools.aggregated.tensor_parallel is 2, but model.draft would be computed by one rank alone: leave it out"),
    (
        "pools: {aggregated: {nodes: 1, tensor_parallel: 3, machines: 2}}",
        "pools.aggregated.machines is 2, but a node's 3 ranks (tensor_parallel times pipeline_parallel times context_parallel) cannot be divided equally among them: set "
        "pools.aggregated.tensor_parallel or pipeline_parallel so that the product is a multiple of it",
    ),
    (
        "pools: {decode: {nodes: 1, machines: 2}}",
        "pools.decode.machines is 2, but a node's 1 rank (tensor_parallel times pipeline_parallel times context_parallel) cannot be divided equally among them: set "
        "pools.decode.tensor_parallel or pipeline_parallel so that the product is a multiple of it",
    ),
    ("{pools: {decode: {nodes: 1, tensor_parallel: 2, machines: 2}}, cache: {tiers: [{cpu: 1GiB}]}}",
     "pools.decode.machines is 2, and each machine keeps the KV of its own ranks, but cache.tiers would copy one rank's only: leave cache.tiers out"),
    (
        "{pools: {decode: {nodes: 1, tensor_parallel: 2, machines: 2}}, transfer: {connector: nccl}}",
        "pools.decode.tensor_parallel is 2, and each rank keeps its KV on its own machine, which transfer.connector nccl does not "
        "transfer: set transfer.connector to nixl",
    ),
    ("pools: {decode: {nodes: 1, tensor_parallel: 2, machines: 2, resources: {GPU: 3}}}",
     "pools.decode.resources has {GPU: 3}, which cannot be divided equally among 2 machines: set {GPU: 2}"),
    ("model: {draft: a/b}", "model.draft needs scheduler.num_speculative_tokens: how many tokens it guesses, such as 4"),
    ("cache: {block_size: 24}", "cache.block_size must be a power of two, not 24"),
    ("cache: {memory_share: 1.5}", "cache.memory_share must be above 0 and at most 1, not 1.5"),
    ("cache: {memory_bytes: lots}", "cache.memory_bytes must be a size such as 2GiB or 500MB, not 'lots'"),
    ("cache: {memory_bytes: 10}", "cache.memory_bytes must be at least 1048576, not 10"),
    (f"cache: {{memory_bytes: {10**30}TiB}}",
     f"cache.memory_bytes must be a size that a machine can have, such as 2GiB, not '{10**30}TiB'"),
    ("cache: {prefix_caching: 1}", "cache.prefix_caching must be true or false, not 1"),
    (f"scheduler: {{max_num_seqs: {2**63}}}",
     f"scheduler.max_num_seqs must be at most {2**63 - 1}: messages cannot carry a larger number"),
    ("transfer: {timeout_s: .inf}", "transfer.timeout_s must be a finite number"),
    ("rollout: {surge: 0, max_unavailable: 0}",
     "rollout.surge is 0, and rollout.max_unavailable, too: no node could be replaced; set one of them to at least 1"),
    (
        "rollout: {surge: 0}",
        "rollout.surge is 0, but the only decode node serves until another one does: set it to at least 1, or "
        "rollout.max_unavailable to 1, which serves nothing meanwhile",
    ),
    ("pools: {decode: {nodes: 5, min: 1, max: 3}}", "pools.decode.max is 3, which is less than pools.decode.nodes (5)"),
    ("pools: {decode: {nodes: 1, context_parallel: 2}}",
     "pools.decode.context_parallel cannot be set: its nodes read short prompts alone: set pools.prefill.context_parallel"),
    ("pools: {prefill: 0, decode: 0, aggregated: {nodes: 1, transfer_options: {backend: UCX}}}",
     "pools.aggregated.transfer_options cannot be set: nodes that do both transfer nothing"),
    ("pools: {encode: {nodes: 1, transfer_options: {backend: UCX}}}",
     "pools.encode.transfer_options cannot be set: nodes that encode images transfer nothing"),
    ("pools: {encode: {nodes: 1, max: 2}}",
     "pools.encode.max cannot be set: this pool is not scaled by its load: set pools.encode.nodes"),
    ("pools: {encode: {nodes: 1, tensor_parallel: 2}}",
     "pools.encode.tensor_parallel cannot be set: a vision tower is not divided among ranks: set pools.encode.nodes to more"),
    ("pools: {decode: {cache: {block_size: 24}}}",
     "pools.decode.cache does not fit: cache.block_size must be a power of two, not 24"),
    ("pools: {decode: {cache: {block_size: 0}}}", "pools.decode.cache: cache.block_size must be at least 1, not 0"),
    ("pools: {decode: {cache: {dtype: fp8}}}",
     "pools.decode.cache has dtype, which must be the same for all nodes: set cache.dtype"),
    ("pools: {prefill: {scheduler: {max_num_seq: 4}}}",
     "pools.prefill.scheduler has 'max_num_seq', which is not a setting of scheduler; did you mean max_num_seqs?"),
    ("pools: {prefill: {scheduler: 4}}", "pools.prefill.scheduler must be settings of scheduler, such as {max_num_seqs: 64}"),
    ("pools: {decode: {env: {UCX-TLS: tcp}}}",
     "pools.decode.env has 'UCX-TLS', which is not a name for an environment variable: use letters, digits and '_'"),
    ("pools: {decode: {env: {OMP_NUM_THREADS: '4'}}}",
     "pools.decode.env has OMP_NUM_THREADS, which Tandem sets: set pools.decode.threads"),
    ("pools: {decode: {env: {CUDA_VISIBLE_DEVICES: '1'}}}",
     "pools.decode.env has CUDA_VISIBLE_DEVICES, which Tandem sets: Ray chooses GPUs by pools.decode.resources: {GPU: 1}"),
    ("pools: {decode: {label_selector: {zone: in(a}}}",
     "pools.decode.label_selector has 'in(a' for zone: it must be `VALUE`, `!VALUE`, `in(A, B)` or `!in(A, B)`"),
    ("pools: {decode: {label_selector: {'zone of mine': a}}}",
     "pools.decode.label_selector has 'zone of mine', which is not a label's name: use letters, digits, '.', '_' and '-', " "optionally after DOMAIN/"),
    ("pools: {prefill: {env: {RAY_worker_niceness: '0'}}}",
     "pools.prefill.env has RAY_worker_niceness, which Ray reads when it starts: set it in the environment of `ray start`"),
    ("router: {env: {OTEL_TOKEN: x}}",
     "router.env has OTEL_TOKEN, but Ray shows a process's environment to everyone who reads its state: set it in the " "environment of `ray start`"),
    ("pools: {prefill: {nodes: 1, min: 2}}", "pools.prefill.min is 2, which is more than pools.prefill.nodes (1)"),
    ("pools: {decode: {min: 4, max: 3}}", "pools.decode.min is 4, which is more than pools.decode.max (3)"),
    ("pools: {decode: {nodes: null, max: 3}}",
     "pools.decode.max is 3, but pools.decode.nodes is null: a pool follows the machines or its load, " "not both"),
    ("slo: {ttft_s: 0}", "slo.ttft_s must be above 0 and at most 1000000, not 0"),
    ("autoscaling: {shrink_after_s: 0.5}", "autoscaling.shrink_after_s must be at least 1, the time between two looks at the load"),
    ("timeouts: {unresponsive_s: 1}", "timeouts.unresponsive_s must be at least 2, the time that a node's answer may take, not 1"),
    (
        "scheduler: {chunked_prefill: false, max_model_len: 9999}",
        "scheduler.max_model_len is 9999, but without chunked prefill no prompt longer than "
        "scheduler.max_num_batched_tokens (2048) can run: raise that, or allow chunks",
    ),
    ("router: {api_keys: [{name: a}]}", "router.api_keys is not right: Object missing required field `key` - at `$[0]`"),
    ("[1, 2]", "must be a mapping from sections to settings, not a list"),
    ("pools: {prefill: {resources: {GPU: .inf}}}", "pools.prefill.resources is not right: it has inf, which is no number"),
    ("pools: {decode: {resources: {GPU: 0}}}", "pools.decode.resources is not right: its values must be above 0"),
    ("controller: {admin_folders: [/a, 'models']}", "controller.admin_folders has 'models', which is no whole path, such as /models"),
    ("controller: {admin_folders: [/a, '~/models']}", "controller.admin_folders has '~/models', which is no whole path, such as /models"),
    ("controller: {admin_folders: [/a, '']}", "controller.admin_folders has '', which is no whole path, such as /models"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), MISTAKES)
def test_a_mistake_is_a_sentence_that_says_what_to_change(tmp_path: Path, text: str, sentence: str) -> None:
    assert mistakes(tmp_path, text) == [f"FILE: {sentence}"]


TOGETHER = [  # right only together: one of each alone is refused, by the defaults of the other
    {"router.tls_certificate": "c.pem", "router.tls_key": "k.pem"},
    {"cache.events.endpoint": "tcp://127.0.0.1:5557", "cache.events.replay_endpoint": "tcp://127.0.0.1:5558"},
    {"model.draft": "a/b", "scheduler.num_speculative_tokens": "4"},
    {"model.adapters": "{a: b/c}", "scheduler.max_loras": "2"},
    {"cache.remote": "true", "cache.tiers": "[{cpu: 1GiB}]"},
    {"scheduler.chunked_prefill": "false", "scheduler.max_num_batched_tokens": "4096", "scheduler.max_model_len": "4096"},
    {"pools.aggregated.nodes": "1", "pools.aggregated.tensor_parallel": "2"},
    {"pools.decode.max": "4", "pools.decode.min": "2", "pools.decode.nodes": "3"},
]  # fmt: skip


@pytest.mark.parametrize("values", TOGETHER, ids="+".join)
def test_settings_that_are_right_together_load_together_also_from_two_sources(
    tmp_path: Path, values: dict[str, str]
) -> None:
    (first, text), *others = values.items()
    variables = {f"TANDEM_{first.replace('.', '__').upper()}": text}
    loaded = as_values(settings(tmp_path, "", variables, flags(*others)))
    for name, value in values.items():
        assert loaded[name]["origin"] != "default"
        assert name == "cache.tiers" or loaded[name]["value"] == yaml.safe_load(value)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("router: {limits: {body_bytes: 2000000000}}",
         ["FILE: router.limits.body_bytes must be at most 268435456, which all bodies together may have, not 2000000000"]),
        (
            "router: {limits: {body_bytes: 2000000000}, port: -1}",
            [
                "FILE: router.port must be from 0 to 65535, not -1",
                "FILE: router.limits.body_bytes must be at most 268435456, which all bodies together may have, not 2000000000",
            ],
        ),
        ("router: {tls_key: k}", ["FILE: router.tls_certificate must be set, because router.tls_key is"]),
        # What only follows from another mistake is not one more.
        ("router: {tls_certificate: 7, tls_key: k}", ["FILE: router.tls_certificate must be text or null, not 7; put it in quotes"]),
        (
            "cache: {events: {endpoint: 'tcp://*:1', replay_endpoint: 'tcp://10.0.0.1:2'}}",
            [
                "FILE: cache.events.endpoint must be tcp://ADDRESS:PORT with an IP address of this machine, not 'tcp://*:1': what is "
                "published there is open to all that reach it"
            ],
        ),
        (
            "{cache: {block_size: 24, tiers: [{cpu: 1GiB}], prefix_caching: false}, model: {dtype: x}}",
            [
                "FILE: model.dtype must be one of auto, bfloat16, float16, float32, not 'x'",
                "FILE: cache.tiers needs cache.prefix_caching: a tier finds blocks by their hashes",
                "FILE: cache.block_size must be a power of two, not 24",
            ],
        ),
    ],
)  # fmt: skip
def test_settings_that_are_wrong_together_are_one_mistake(tmp_path: Path, text: str, sentences: list[str]) -> None:
    assert mistakes(tmp_path, text) == sentences


def test_a_deployments_name_must_do_as_a_name_anywhere(tmp_path: Path) -> None:
    for name in ("Chat", "a b", "-a", "a-", "a" * 41, "''", "My_Cluster"):
        (mistake,) = mistakes(tmp_path, f"name: {name}")
        assert "name must" in mistake
    assert mistake == "FILE: name must be of the form ^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$, not 'My_Cluster'"
    (mistake,) = mistakes(tmp_path, "", {}, [("name", "chat\n", "--name")])
    assert mistake == "--name: name must be of the form ^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$, not 'chat\\n'"
    assert mistakes(tmp_path, "transfer: {connector: ''}")[0].startswith("FILE: transfer.connector must not be empty")


def test_every_mistake_is_reported_at_once_wherever_it_stands(tmp_path: Path) -> None:
    found = mistakes(
        tmp_path,
        "pools: {prefil: 2}\ncache: {block_size: 3}\nrouter: {port: x}",
        {"TANDEM_MODEL__DTYPE": "int4", "TANDEM_POOLS__DECOED": "1"},
        [("pools.decode", "two", "--decode"), ("nonsense", "1", "--set")],
    )
    assert len(found) == 7
    text = "\n".join(found)
    for origin in ("FILE:", "TANDEM_MODEL__DTYPE:", "TANDEM_POOLS__DECOED:", "--decode:", "--set:"):
        assert origin in text


def test_a_key_that_stands_twice_is_refused_unless_one_is_merged_in(tmp_path: Path) -> None:
    text = "pools: {prefill: &p {nodes: 1, threads: 3}, decode: {<<: *p, nodes: 2}}"
    pools = settings(tmp_path, text).config.pools
    assert [(pool.nodes, pool.threads) for pool in (pools.prefill, pools.decode)] == [(1, 3), (2, 3)]
    twice = "pools: {prefill: &p {nodes: 1}, decode: {<<: *p, nodes: 2, nodes: 3}}"
    assert "'nodes' stands twice" in mistakes(tmp_path, twice)[0]
    assert "'model' stands twice" in mistakes(tmp_path, "model: a\nmodel: b")[0]
    assert "is not valid YAML" in mistakes(tmp_path, "a: [")[0]


@pytest.mark.parametrize("value", ["2024-99-99", "0b_", "{{ port }}", "!!int ''", "[" * 600])
def test_what_the_parser_stumbles_over_is_a_mistake_like_any_other(tmp_path: Path, value: str) -> None:
    (mistake,) = mistakes(tmp_path, f"router: {{port: {value}}}")
    assert mistake.startswith("FILE: is not valid YAML: ")
    (mistake,) = mistakes(tmp_path, "", {}, flags(("pools.prefill.cache", f"{{block_size: {value}}}")))
    assert mistake == "--set: pools.prefill.cache is not valid YAML"


def test_what_no_message_can_carry_is_refused(tmp_path: Path) -> None:
    text = "model: {engine: vllm, engine_python: /x, engine_args: {a: [{b: 99999999999999999999}]}}"
    largest = f"FILE: model.engine_args must be at most {2**63 - 1}: messages cannot carry a larger number"
    assert mistakes(tmp_path, text)[0] == largest
    broken = mistakes(tmp_path, "", {}, [("model.path", "\udcff/x", "--model")])
    assert broken[0] == "--model: model.path has bytes that are no UTF-8"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"missing\.yaml: cannot be read: No such file"):
        resolve([read_file(tmp_path / "missing.yaml")])


def test_variables_that_are_not_settings_are_left_alone_unless_they_almost_are(tmp_path: Path) -> None:
    # Kubernetes sets the second for a Service called tandem-router.
    settings(tmp_path, "", {"TANDEM_CACHE": "/x", "TANDEM_ROUTER_PORT": "tcp://10.0.0.1:80", "OTHER__X": "1"})
    assert mistakes(tmp_path, "", {"TANDEM_POOLS_PREFILL": "2"}) == [
        "TANDEM_POOLS_PREFILL: is not a setting; did you mean TANDEM_POOLS__PREFILL?"
    ]


def test_text_from_flags_becomes_every_type(tmp_path: Path) -> None:
    typed = flags(
        ("cache.memory_bytes", "2GiB"), ("cache.prefix_caching", "false"), ("transfer.options", "{backend: UCX}"),
        ("scheduler.max_model_len", "null"), ("transfer.timeout_s", "2.5"), ("router.model_aliases", "[a, b]"),
        ("model", "0123"),
    )  # fmt: skip
    found = settings(tmp_path, "", {}, typed).config
    assert (found.cache.memory_bytes, found.cache.prefix_caching) == (2 << 30, False)
    assert (found.transfer.options, found.transfer.timeout_s) == ({"backend": "UCX"}, 2.5)
    assert (found.scheduler.max_model_len, found.model.path) == (None, "0123")
    assert found.router.model_aliases == ("a", "b")


@pytest.mark.parametrize(
    ("setting", "text", "meant"),
    [
        ("pools.decode.resources", "{GPU:1}", "{GPU: 1}"),
        ("pools.decode.env", "{A:b}", "{A: b}"),
        ("cache.tiers", "[{cpu:1GiB}]", "{cpu: 1GiB}"),
        ("pools.decode.cache", "{block_size:32}", "{block_size: 32}"),
    ],
)
def test_a_mapping_without_a_space_is_answered_with_how_it_is_written(
    tmp_path: Path, setting: str, text: str, meant: str
) -> None:
    said = f"--set: {setting} needs a space after the colon, and in a shell quotes: '{meant}'"
    assert mistakes(tmp_path, "", {}, flags((setting, text))) == [said]


def test_what_config_prints_is_a_file_that_makes_the_same_config(tmp_path: Path) -> None:
    text = "model: 'yes'\ncache: {memory_bytes: 1GiB}\nrouter: {model_aliases: ['1', 'a: b']}"
    first = settings(tmp_path, text, {}, [("pools.aggregated", "2", "--aggregated")])
    printed = render(first)
    assert settings(tmp_path, printed).config == first.config
    assert "nodes: 2  # --aggregated" in printed


def test_neither_config_nor_a_refusal_shows_a_key(tmp_path: Path) -> None:
    printed = render(settings(tmp_path, "router: {api_keys: [{name: me, key: s3cr3t}]}"))
    assert "s3cr3t" not in printed
    assert "me" in printed
    assert "s3cr3t" not in mistakes(tmp_path, "router: {api_keys: [{name: 1, key: s3cr3t}]}")[0]


@given(st.dictionaries(st.sampled_from(sorted(map(dotted, known_settings()))), st.text(max_size=8), max_size=6))
def test_any_text_for_any_setting_is_taken_or_refused_in_words(assignments: dict[str, str]) -> None:
    layer = read_assignments([(name, value, "--set") for name, value in assignments.items()])
    assert all(mistake.startswith("--set: ") or "router." in mistake for mistake in refusals([layer]))


_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["model", "pools", "prefill", "cache", "router", "limits", "x"]), inner)
    ),
    max_leaves=12,
)


@given(_trees)
def test_any_yaml_is_taken_or_refused_in_words(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    file = tmp_path_factory.mktemp("settings") / "tandem.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert all(mistake.startswith(f"{file}: ") for mistake in refusals([read_file(file)]))


def test_sizes_and_numbers_in_a_row_are_as_people_write_them() -> None:
    sizes = {"1024": 1024, "2GiB": 2 << 30, "2 gb": 2 * 10**9, "1.5KiB": 1536, "3M": 3 * 10**6}
    assert {text: parse_size(text, "it") for text in sizes} == sizes
    assert [format_size(size) for size in (5, 2048, 3 << 30)] == ["5 B", "2.0 KiB", "3.0 GiB"]
    assert [ranges(numbers) for numbers in ([0, 1, 2, 3, 8], [0, 4, 1, 5], [])] == ["0-3,8", "0,4,1,5", ""]


def test_tiers_have_sizes_in_words_and_their_mistakes_are_named(tmp_path: Path) -> None:
    text = "cache: {tiers: [{cpu: 8GiB, policy: arc}, {cpu: 512MiB, block_factor: 4, store_threshold: 2}]}"
    near, far = settings(tmp_path, text).config.cache.tiers
    assert (near.cpu, near.policy.value, near.block_factor) == (8 << 30, "arc", 1)
    assert (far.cpu, far.policy.value, far.block_factor, far.store_threshold) == (512 << 20, "lru", 4, 2)
    found = settings(tmp_path, "", {"TANDEM_CACHE__TIERS": "[{cpu: 1GiB}]"}).config.cache
    assert (found.host_bytes_of_tiers, found.shared_hash_seed) == (1 << 30, None)
    (disk,) = (kept := settings(tmp_path, "cache: {tiers: [{disk: /x, size: 2GiB}]}").config.cache).tiers
    assert (disk.disk, disk.size) == ("/x", 2 << 30)
    assert kept.shared_hash_seed is not None, "the next process must find the blocks"
    assert CacheConfig(hash_seed="s", tiers=[disk]).shared_hash_seed == "s"
    for wrong, why in (
        ("[{cpu: much}]", "must be a size such as 2GiB"),
        ("[{policy: arc}]", "each entry is one of"),
        ("[{disk: /x}]", "go together"),
        ("[{cpu: 1GiB, size: 1GiB}]", "go together"),
        ("[{cpu: 1GiB, disk: /x, size: 1GiB}]", "each entry is one of"),
        ("[{cpu: 1GiB, options: {a: 1}}]", "options"),
        ("[{cpu: 1GiB, policy: fifo}]", "fifo"),
        ("[{cpu: 1GiB, polcy: arc}]", "polcy"),
        ("{cpu: 1GiB}", "must be a list"),
        ("[{cpu: 0}]", ">= 1"),
        ("[{cpu: 1GiB, block_factor: 0}]", ">= 1"),
    ):
        (mistake,) = mistakes(tmp_path, f"cache: {{tiers: {wrong}}}")
        assert "cache.tiers" in mistake
        assert why in mistake
    (mistake,) = mistakes(tmp_path, "cache: {tiers: [{cpu: 1GiB}], prefix_caching: false}")
    assert "cache.prefix_caching" in mistake


def test_a_pool_sets_for_itself_what_nodes_need_not_have_alike(tmp_path: Path) -> None:
    text = """
    cache: {block_size: 16}
    scheduler: {max_num_seqs: 8}
    pools:
      decode:
        cache: {block_size: 32, memory_bytes: 2MiB, tiers: [{cpu: 1MiB}]}
        scheduler: {num_speculative_tokens: 3}
    """
    flags = [("pools.prefill.scheduler", "{max_num_batched_tokens: 512, reserve: none}", "--set")]
    config = settings(tmp_path, text, {}, flags).config
    prefill, decode = config.engine_of(Role.PREFILL), config.engine_of(Role.DECODE)
    assert (prefill.cache, prefill.scheduler.max_num_seqs) == (config.cache, 8)
    assert (prefill.scheduler.max_num_batched_tokens, prefill.scheduler.reserve) == (512, Reserve.NONE)
    assert (decode.cache.block_size, decode.cache.memory_bytes) == (32, 2 << 20)
    assert (decode.cache.host_bytes_of_tiers, decode.scheduler.num_speculative_tokens) == (1 << 20, 3)
    assert config.engine == config.engine_of(Role.AGGREGATED)


def test_what_nodes_copy_between_each_other_lies_in_host_memory(tmp_path: Path) -> None:
    cache = settings(tmp_path, "cache: {remote: true, mirror: true, tiers: [{cpu: 1GiB}]}").config.cache
    assert cache.shared_hash_seed is not None, "nodes hash alike"
    for name in ("remote", "mirror"):
        (mistake,) = mistakes(tmp_path, f"cache: {{{name}: true, tiers: [{{disk: /x, size: 1GiB}}]}}")
        assert f"cache.{name} needs a tier in host memory" in mistake
        (mistake,) = mistakes(tmp_path, f"cache: {{{name}: true, tiers: [{{cpu: 1GiB, store_threshold: 2}}]}}")
        assert "leave store_threshold out" in mistake
