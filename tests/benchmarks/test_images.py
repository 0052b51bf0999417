"""What the benchmark of encoder nodes starts, and the images that it sends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from benchmarks import images
from tandem.api.images.files import read_file
from tandem.api.openai.chat_request import ImagePart
from tandem.cluster.cli import make_parser
from tandem.cluster.commands.setting_options import read_settings
from tandem.router.config import Limits


@pytest.mark.parametrize("apart", [False, True])
def test_its_two_systems_differ_in_an_encoder_node_alone(apart: bool, tmp_path: Path) -> None:
    alone, beside = (
        read_settings(make_parser().parse_args(system.command[3:])).config.pools
        for system in images._systems(tmp_path, apart=apart)
    )
    sizes = (1, 1, 0) if apart else (0, 0, 1)
    for pools in (alone, beside):
        assert (pools.prefill.nodes, pools.decode.nodes, pools.aggregated.nodes) == sizes
    assert (alone.encode.first_size, beside.encode.first_size) == (0, 1)


def test_each_image_is_another_one_that_a_router_reads() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        (image, _text) = json.loads(request.content)["messages"][0]["content"]
        asked.append(image["image_url"]["url"])
        return httpx.Response(200)

    async def send() -> None:
        async with httpx.AsyncClient(base_url="http://router", transport=httpx.MockTransport(answer)) as http:
            for number in range(2):
                await images._send_image(http, "m", number)

    asyncio.run(send())
    assert len(set(asked)) == 2
    for url in asked:
        read = read_file(ImagePart(url, "messages[0]"), Limits())
        assert (read.width, read.height) == (512, 512)
