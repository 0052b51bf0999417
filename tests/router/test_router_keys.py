from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.api.text.tokenizer import Tokenizer, read_json
from tandem.base.errors import ConfigurationError
from tandem.router.config import ApiKey, RouterConfig, name_of_key
from tandem.router.keys import DEFAULT_ANSWER, KeyRing, QuotaExceeded, Tenant, load_keys
from tests.clock import Clock
from tests.router.conftest import RunningRouter, StartRouter, bearer, error_of
from tests.router.paths import of_served
from tests.router.raw_http import connect, post, read_answer
from tests.small_model import CountedBackend

AB = (ApiKey("a", "secret-a"), ApiKey("b", "secret-b"))


def ask(router: RunningRouter, key: str | None = "secret-a", **fields: Any) -> httpx.Response:
    return router.ask("/v1/completions", key, **{"prompt": "x", "max_tokens": 2, **fields})


def refused_for_quota(answer: httpx.Response) -> bool:
    if answer.status_code != 429:
        return False
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    return True


def test_no_key_can_replace_anothers_file_of_hidden_states(start_router: StartRouter) -> None:
    names = ("team-a", "team-b", "../team-a", "team-a/x", "Team \u00e4", ".", "..", "%2E", "", "a" * 300)
    keys = tuple(ApiKey(name, f"secret-{place}") for place, name in enumerate(names))
    router = start_router(prefill=0, api_keys=keys)
    for key in keys:
        assert ask(router, key.key, hidden_states="one").status_code == 200
    told = [submit.sampling.hidden_states or "" for submit in router.nodes["d0"].submits]
    assert told[:2] == ["team-a/one", "team-b/one"]
    assert len(set(told)) == len(names)
    for path in told:
        folder, _, file = path.partition("/")
        assert (file, folder.startswith(".")) == ("one", False)
        assert 0 < len(folder.encode()) <= 255


def test_a_key_is_asked_for_and_probes_have_none(start_router: StartRouter) -> None:
    router = start_router(api_keys=(*AB, ApiKey("op", "secret-op", operator=True)))
    for key in ("secret-a", "secret-b", "secret-op"):
        assert ask(router, key).status_code == 200
    wrong = ("secret", "SECRET-A", "secret-ab", "secret-a secret-a", "\u00e4", "\udcff", "secret-\u0430")
    for said in (None, "Basic c2VjcmV0LWE=", *(f"Bearer {key}" for key in wrong)):
        headers = {} if said is None else {"authorization": said.encode("utf-8", "surrogateescape")}
        answer = router.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=headers)
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert answer.headers["www-authenticate"] == "Bearer"
    for path, status in (("/health", 200), ("/metrics", 200), ("/cluster", 401), ("/v1/models", 401), ("/none", 401)):
        assert router.client.get(path).status_code == status
    assert router.metric("tandem_requests_refused_total", reason="unauthorized") > 5

    assert router.client.get("/cluster", headers=bearer("secret-op")).status_code == 200
    refused = router.client.get("/cluster", headers=bearer("secret-a"))
    assert error_of(refused, 403)["code"] == "permission_denied"
    assert "operator: true" in refused.json()["error"]["message"]


def test_tenants_never_share_a_prefix_cache(start_router: StartRouter) -> None:
    router = start_router(prefill=0, api_keys=AB)
    for key, fields in (("secret-a", {}), ("secret-b", {}), ("secret-a", {}), ("secret-a", {"cache_salt": "mine"})):
        assert ask(router, key, **fields).status_code == 200
    salts = [submit.cache_salt for submit in router.nodes["d0"].submits]
    assert salts[0] == salts[2]
    assert len({salts[0], salts[1], salts[3]}) == 3
    assert all(salt and "secret" not in salt for salt in salts)


def test_no_request_is_more_urgent_than_its_key_allows(start_router: StartRouter) -> None:
    keys = (ApiKey("a", "batch", priority=10), ApiKey("b", "plain"), ApiKey("c", "urgent", priority=-5))
    keyed, open_to_all = start_router(prefill=0, api_keys=keys), start_router(prefill=0)
    expected: dict[str | None, dict[int | None, int]] = {
        "batch": {None: 10, -7: 10, 10: 10, 12: 12},
        "plain": {None: 0, -7: 0, 12: 12},
        "urgent": {None: 0, -7: -5, -5: -5, 12: 12},
        None: {-7: -7},  # without keys a request is as urgent as it says
    }
    for key, cases in expected.items():
        router = open_to_all if key is None else keyed
        for asked, runs_with in cases.items():
            assert ask(router, key, **({} if asked is None else {"priority": asked})).status_code == 200
            assert router.nodes["d0"].submits[-1].priority == runs_with


def test_quotas(start_router: StartRouter) -> None:
    keys = (ApiKey("a", "secret-a", requests_per_minute=2), AB[1])
    router = start_router(api_keys=keys)
    for _ in range(3):
        wrong = router.ask("/v1/completions", "secret-a")
        assert wrong.status_code == 400, "what is refused for what it says is not counted"
    assert [ask(router).status_code for _ in range(2)] == [200, 200]
    assert all(refused_for_quota(ask(router)) for _ in range(2))
    assert router.metric("tandem_requests_refused_total", reason="quota") == 2
    with closing(connect(router)) as connection:  # a body that is never sent is answered all the same
        connection.sendall(post(b"", authorization="Bearer secret-a", content_length="100"))
        assert read_answer(connection)[0] == 429
    assert ask(router, "secret-b").status_code == 200


SECRET = " ".join(f"word{index}" for index in range(40))
TEXT_REQUESTS = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]}}


def ask_for_text(router: RunningRouter) -> list[httpx.Response]:
    return [router.ask(path, "secret-a", **fields) for path, fields in TEXT_REQUESTS.items()]


def test_tokenizing_is_a_request_and_uses_no_tokens(start_router: StartRouter) -> None:
    router = start_router(api_keys=(ApiKey("a", "secret-a", requests_per_minute=2),))
    assert [answer.status_code for answer in ask_for_text(router)] == [200, 200]
    assert all(refused_for_quota(answer) for answer in (ask(router), *ask_for_text(router)))
    router = start_router(api_keys=(ApiKey("a", "secret-a", tokens_per_minute=2, concurrent_requests=1),))
    assert ask(router).status_code == 200
    router.wait_for(router.idle, "its tokens are counted")
    assert refused_for_quota(ask(router))
    assert [answer.status_code for answer in ask_for_text(router)] == [200, 200]


def test_so_many_requests_at_once(start_router: StartRouter) -> None:
    router = start_router(prefill=0, api_keys=(ApiKey("a", "secret-a", concurrent_requests=1),))
    router.nodes["d0"].set(pause_at=1)
    with router.stream(headers=bearer("secret-a"), max_tokens=2) as first:
        first.text(count=1)
        assert all(refused_for_quota(answer) for answer in (ask(router), *ask_for_text(router)))
        router.nodes["d0"].resume()
        assert first.rest()[-1] == "[DONE]"
    router.wait_for(router.idle, "it has ended")
    assert ask(router).status_code == 200


def tenant_with(clock: Clock, **quotas: int) -> Tenant:
    tenant = KeyRing([ApiKey("a", "k", **quotas)], clock).find(b"k")  # type: ignore[arg-type]
    assert tenant is not None
    return tenant


def test_a_bucket_refills_with_time() -> None:
    clock = Clock()
    tenant = tenant_with(clock, requests_per_minute=60, tokens_per_minute=600)
    for _ in range(60):
        tenant.enter()
    with pytest.raises(QuotaExceeded) as refused:
        tenant.enter()
    assert 0 < refused.value.retry_after_s <= 1
    clock.now += 1
    tenant.enter().settle(0, [5000])  # a long answer is paid for afterwards
    clock.now += 60
    with pytest.raises(QuotaExceeded, match="tokens per minute"):
        tenant.enter()
    clock.now += 500
    tenant.enter()


def test_tokens_are_taken_before_they_are_used_and_given_back_after() -> None:
    tenant = tenant_with(Clock(), tokens_per_minute=1000)
    first, second, third = tenant.enter(), tenant.enter(), tenant.enter()
    first.take_tokens(100, [400])
    second.take_tokens(100, [400])
    with pytest.raises(QuotaExceeded, match="may take 500 tokens") as refused:
        third.take_tokens(100, [400])
    assert refused.value.retry_after_s == pytest.approx(30)
    third.void()
    first.settle(100, [40])  # 360 of what it had reserved comes back
    tenant.enter().take_tokens(60, [300])


def test_a_request_for_more_than_a_minute_has_waits_for_all_of_it() -> None:
    clock = Clock()
    tenant = tenant_with(clock, tokens_per_minute=1000)
    tenant.enter().take_tokens(10, [5000])
    with pytest.raises(QuotaExceeded):
        tenant.enter()
    clock.now += 30
    with pytest.raises(QuotaExceeded):
        tenant.enter().take_tokens(10, [5000])
    clock.now += 30
    tenant.enter().take_tokens(10, [5000])


def test_an_answer_of_unsaid_length_reserves_what_is_usual() -> None:
    clock = Clock()
    tenant = tenant_with(clock, tokens_per_minute=100_000)
    reservation = tenant.enter()
    reservation.take_tokens(0, [None, None])
    reservation.settle(0, [10, 10])
    assert tenant.typical_answer() == 10
    used = tenant_with(clock, tokens_per_minute=DEFAULT_ANSWER)
    used.enter().take_tokens(0, [None])
    with pytest.raises(QuotaExceeded):
        used.enter()


def test_what_is_refused_is_none_of_the_quota() -> None:
    clock = Clock()
    tenant = tenant_with(clock, requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1)
    for _ in range(3):
        reservation = tenant.enter()
        reservation.take_tokens(1, [5])
        reservation.void()
        reservation.void()
    reservation = tenant.enter()
    reservation.settle(1, [2])
    reservation.void()  # nothing any more
    assert tenant.running == 0
    with pytest.raises(QuotaExceeded, match="requests per minute"):
        tenant.enter()


@pytest.mark.parametrize(
    ("path", "body"),
    of_served(
        ("/tokenize", {"prompt": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": SECRET}]}),
    ),
)
def test_what_one_key_asked_is_tokenized_anew_for_another(
    start_router: StartRouter, model_folder: str, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    backend: Any = CountedBackend(model_folder)
    tokenizer = Tokenizer(backend, read_json(Path(model_folder) / "tokenizer_config.json"))
    monkeypatch.setattr(Tokenizer, "from_folder", lambda folder: tokenizer)
    router = start_router(api_keys=(ApiKey("alice", "key-a"), ApiKey("bob", "key-b")))
    work: list[int] = []
    for key in ("key-a", "key-a", "key-b", "key-b"):
        backend.texts.clear()
        assert router.ask(path, key, **body).status_code == 200
        work.append(sum(map(len, backend.texts)))
    assert work[0] == work[2] >= 64
    assert work[1] == work[3] < 64


def test_keys_from_a_file(tmp_path: Path) -> None:
    plain = tmp_path / "keys"
    plain.write_text("# ours\nfirst\n\nsecond\n")
    assert [key.key for key in load_keys([ApiKey("x", "zero")], str(plain))] == ["zero", "first", "second"]
    plain.write_bytes(b"\xef\xbb\xbffirst\r\n")  # as some editors begin a text
    assert [key.key for key in load_keys([], str(plain))] == ["first"]
    rich = tmp_path / "keys.json"
    rich.write_text(json.dumps([{"name": "a", "key": "k", "requests_per_minute": 5}]))
    assert load_keys([], str(rich)) == [ApiKey("a", "k", requests_per_minute=5)]


def test_a_file_that_cannot_be_meant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text in (
        "",
        "# nothing\n",
        "[{]",
        '[{"name": "a"}]',
        '[{"name": "a", "key": "k", "quota": 1}]',
        '[{"name": "a", "key": ""}]',
        '[{"name": "a", "key": "schl\u00fcssel"}]',
        "schl\u00fcssel",
        "secret # of alice",
        "\ud800",
    ):
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ConfigurationError, match=r"router\.api_keys_file"):
            load_keys([], str(file))
    with pytest.raises(ConfigurationError):
        load_keys([], str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (ApiKey("alice", ""), "alice: key must not be empty"),
        (ApiKey("alice", "schl\u00fcssel"), "alice: key must be of letters, digits and signs in ASCII"),
        (ApiKey("alice", "\udcff"), "in ASCII"),
        (ApiKey("alice", "two words"), "without spaces"),
        (ApiKey("alice", "k\n"), "without spaces"),
        (ApiKey("alice", "k", requests_per_minute=0), "requests_per_minute must be at least 1, not 0"),
        (ApiKey("alice", "k", tokens_per_minute=-5), "tokens_per_minute must be at least 1, not -5"),
        (ApiKey("alice", "k", concurrent_requests=0), "concurrent_requests must be at least 1, not 0"),
    ],
)
def test_a_key_that_cannot_be_meant(key: ApiKey, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        RouterConfig(tokenizer_path="x", model_name="x", api_keys=(key,))
    assert "schl" not in str(refused.value)


def one_name_twice(kind: str, folder: Path) -> tuple[tuple[ApiKey, ...], str | None, tuple[str, str]]:
    """Returns keys, a file, and the two places that an error must name."""
    alice, file = ApiKey("alice", "one"), str(folder / "keys")
    listed = [{"name": "alice", "key": "two"}]
    if kind == "settings":
        return (alice, ApiKey("bob", "x"), ApiKey("alice", "two")), None, ("api_keys[0]", "api_keys[2]")
    if kind == "settings and list":
        Path(file).write_text(json.dumps(listed))
        return (alice,), file, ("router.api_keys[0]", f"router.api_keys_file {file}[0]")
    if kind == "list":
        Path(file).write_text(json.dumps([*listed, {"name": "alice", "key": "three"}]))
        return (), file, (f"{file}[0]", f"{file}[1]")
    Path(file).write_text("# ours\nx\n")
    named_alike = ApiKey(name_of_key("x"), "one")
    return (named_alike,), file, ("router.api_keys[0]", f"router.api_keys_file {file}, line 2")


@pytest.mark.parametrize("kind", ["settings", "settings and list", "list", "settings and lines"])
def test_two_keys_of_one_name_are_refused_at_start_by_every_door(kind: str, tmp_path: Path) -> None:
    keys, file, places = one_name_twice(kind, tmp_path)

    def start() -> None:
        config = RouterConfig(tokenizer_path="x", model_name="x", api_keys=keys, api_keys_file=file)
        load_keys(config.api_keys, config.api_keys_file)

    with pytest.raises(ConfigurationError, match="have the same name") as refused:
        start()
    assert all(place in str(refused.value) for place in places)


def test_one_key_for_two_tenants_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"api_keys\[0\] and router.api_keys\[1\] are the same key"):
        RouterConfig(tokenizer_path="x", model_name="x", api_keys=(ApiKey("a", "k"), ApiKey("b", "k")))
    file = tmp_path / "keys"
    file.write_text("secret\nother\nsecret\n")
    with pytest.raises(ConfigurationError, match=r"line 1 and .*line 3 are the same key") as refused:
        load_keys([], str(file))
    assert "secret" not in str(refused.value)


def test_a_key_without_a_name_keeps_its_name_when_one_before_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\nthird\n")
    before = {key.key: key.name for key in load_keys([], str(file))}
    file.write_text("third\nsecond\n")
    after = {key.key: key.name for key in load_keys([], str(file))}
    assert after == {key: before[key] for key in ("third", "second")}
    assert len(set(before.values())) == 3
    assert not any(key in name for key, name in before.items())
