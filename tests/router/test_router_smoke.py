from __future__ import annotations

from tests.router.conftest import StartRouter


def test_smoke(start_router: StartRouter) -> None:
    router = start_router()
    answer = router.client.post(
        "/v1/completions", json={"model": "fake", "prompt": "the quick fox", "max_tokens": 8}
    )
    print(answer.status_code, answer.headers, answer.text)
    assert answer.status_code == 200
    answer = router.client.post(
        "/v1/chat/completions",
        json={
            "model": "fake",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    print(answer.text)
    assert answer.status_code == 200
    for path in ("/health", "/cluster", "/metrics", "/v1/models", "/nothing"):
        answer = router.client.get(path)
        print(path, answer.status_code, answer.text[:500])
