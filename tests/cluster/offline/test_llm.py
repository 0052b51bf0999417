"""`from tandem import LLM`, against a router with fake nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest

from tandem import LLM, SamplingParams
from tandem.base.errors import ConfigurationError, RequestError, Unavailable
from tandem.cluster.offline import llm as llm_module
from tandem.cluster.offline.llm import flags_of
from tandem.wire.pooling import Pooling, PoolingKind, VectorModel
from tests.router.conftest import StartRouter


def test_it_completes_and_chats_by_vllms_names(start_router: StartRouter) -> None:
    router = start_router()
    with LLM(url=router.url) as llm:
        params = SamplingParams(max_tokens=5, seed=3, n=2, temperature=0.7, logprobs=1)
        outputs = llm.generate([f"number {index}" for index in range(30)], params, use_tqdm=False)
        assert [each.prompt for each in outputs] == [f"number {index}" for index in range(30)]
        assert [len(each.outputs) for each in outputs] == [2] * 30
        assert outputs[4].outputs[0].text == router.expected("number 4", 5, seed=3)
        assert len(outputs[4].outputs[0].token_ids) == 5
        assert outputs[4].outputs[0].finish_reason == "length"
        assert outputs[4].outputs[0].logprobs is not None

        (again,) = llm.generate({"prompt_token_ids": outputs[4].prompt_token_ids}, SamplingParams(max_tokens=5, seed=3))
        assert (again.prompt, again.outputs[0].text) == (None, outputs[4].outputs[0].text)
        each_its_own = [SamplingParams(max_tokens=count) for count in (1, 2)]
        counts = [len(one.outputs[0].token_ids) for one in llm.generate(["a", "b"], each_its_own)]
        assert counts == [1, 2]

        stopping = SamplingParams(max_tokens=5, seed=3, stop=outputs[4].outputs[0].text[-1])
        (stopped,) = llm.generate("number 4", stopping)
        assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stopping.stop)

        messages = [{"role": "user", "content": "hi"}]
        (chat,) = llm.chat(messages, SamplingParams(max_tokens=3, seed=1, logprobs=2))
        assert len(chat.outputs[0].token_ids) == 3
        assert len(llm.chat([messages, messages], use_tqdm=False)) == 2


def test_it_makes_vectors(start_router: StartRouter) -> None:
    router = start_router(vectors=VectorModel(Pooling(PoolingKind.MEAN), 8))
    with LLM(url=f"{router.url}/v1") as llm:
        assert [len(each.outputs.embedding) for each in llm.embed(["a", "b"])] == [8, 8]


def test_what_is_wrong_is_named(start_router: StartRouter) -> None:
    router = start_router()
    with pytest.raises(ConfigurationError, match="name a model"):
        LLM()
    with pytest.raises(ConfigurationError, match="max_model_len"):
        LLM(url=router.url, max_model_len=100)
    with pytest.raises(ConfigurationError, match=r"the server did not start: .*'/nowhere' is not there"):
        LLM("/nowhere")
    with pytest.raises(ConfigurationError) as refused:
        LLM("smollm2", no_such_flag=1)
    assert str(refused.value).startswith("the server did not start: tandem serve: error: there is no --no-such-flag")
    with LLM(url=router.url) as llm:
        with pytest.raises(RequestError, match="temperature"):
            llm.generate(["a"] * 40, SamplingParams(temperature=-1))
        with pytest.raises(ConfigurationError, match="1 entries for 2"):
            llm.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(ConfigurationError, match="prompt_token_ids"):
            llm.generate({"text": "a"})


def test_an_interrupt_sends_no_further_requests(start_router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    router = start_router()

    def interrupted(futures: Sequence[Future[object]], **_: object) -> Iterator[Future[object]]:
        yield futures[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_module, "track", interrupted)
    monkeypatch.setattr(llm_module, "AT_ONCE", 1)
    with LLM(url=router.url) as llm, pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 200, SamplingParams(max_tokens=1))
    assert len(router.nodes["p0"].submits) < 100


def test_a_server_that_was_started_in_vain_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, but not a request without the key that its settings ask for."""
    closed: list[str] = []

    class Started:
        def __init__(self, model: str, flags: object) -> None:
            self.url = "http://127.0.0.1:9"

        def close(self) -> None:
            closed.append(self.url)

    monkeypatch.setattr(llm_module, "OwnServer", Started)
    with pytest.raises(Unavailable, match="does not answer"):
        LLM("smollm2")
    assert closed == ["http://127.0.0.1:9"]


def test_its_arguments_are_the_flags_of_tandem_serve() -> None:
    flags = ["--tensor-parallel-size", "2", "--enforce-eager"]
    assert flags_of({"tensor_parallel_size": 2, "enforce_eager": True, "dtype": None}) == flags
