"""`kvspec serve` with SmolLM2, OpenAI's client and curl: chats, streams, tools, and hundreds of requests."""

import asyncio
import json
import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from conformance.paths import ROOT
from models_integration.pocket import model_folder
from spec.errors import SpecError
from tests.models_integration.engines.vllm.engine import NEEDS_VLLM
from tests.models_integration.engines.vllm.test_vllm_server import (
    ask_unread,
    kvspec_serve,
    metrics,
    serving,
    wait_until,
)

openai: Any = pytest.importorskip("openai")
pytestmark = [pytest.mark.law("as-it-is-described"), pytest.mark.nightly, *NEEDS_VLLM]

MODEL, BUDGET, WINDOW = "smollm2", 0.3, 16
TEXT = (ROOT / "docs" / "examples" / "lighthouse.txt").read_text(encoding="utf-8")
REQUESTS, AT_ONCE = int(os.environ.get("KVSPEC_VLLM_LOAD", "500")), 16
"""Number of requests, and of requests at once."""
PARTS, WARM = 10, 4
"""Number of measurements of the memory, and of the measurement from which the memory must not grow."""
GROWTH = 2**25
"""Largest growth of the memory after the warm-up, in bytes, beyond the growth of vLLM without eviction."""
FULL = json.dumps({"policy": "fullcache"})
FAILING = json.dumps({"policy": "crystalcache", "budget": BUDGET, "sentence_ends": [5], "observed_layer": 99})
"""Arguments of a policy that fails in the worker, because the model has no such layer."""
JSON = json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
LAMP = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}


class Running(NamedTuple):
    """Server in a separate process."""

    url: str
    session: int

    def client(self) -> Any:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=600, max_retries=0)

    def is_idle(self) -> bool:
        """Return True if the server has no request, and no block of a request."""
        values = metrics(self.url)
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(count(values, f"vllm:{name}") for name in names)

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of each process of the server, without pages of files, which Linux may take."""
        total = dict[str, int]()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name, _, fields = (process / "stat").read_text().rpartition(")")
                _, _, anonymous = (process / "status").read_text().partition("RssAnon:")
            except OSError:  # the process has ended
                continue
            if int(fields.split()[3]) == self.session and anonymous:
                total[name] = 1024 * int(anonymous.split()[0])
        return total


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a server that must end within 10 s after SIGTERM, also if four clients do not read their streams."""
    try:
        model_folder(MODEL)
    except SpecError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("server")
    command = kvspec_serve(f"snapkv(W={WINDOW})", str(BUDGET), MODEL)
    with serving(folder, *command, "--structured-outputs-config", JSON, *TOOLS) as url:
        yield Running(url, int((folder / "pid").read_text(encoding="ascii")))
        body = {"model": MODEL, "prompt": TEXT[:180], "max_tokens": 900, "logprobs": 5}
        unread = [ask_unread(url, **body) for _ in range(4)]
        wait_until(lambda: count(metrics(url), "vllm:num_requests_running") == len(unread))
    for one in unread:
        one.close()


def count(values: dict[str, float], name: str) -> float:
    """Return the sum of a metric over all labels."""
    samples = [value for key, value in values.items() if key.split("{")[0] == name]
    assert samples, f"no metric {name}"
    return sum(samples)


def check_statement(body: Any, tokens: int) -> None:
    """Check that the prompt of an answer was evicted to the budget. The window is always kept."""
    assert body["policy"] == f"snapkv(W={WINDOW})"
    assert len(body["evictions"]) == 1, body
    one = body["evictions"][0]
    assert one["seen"] == tokens
    assert {sum(b - a for a, b in ranges) for ranges in one["sets"]} == {max(WINDOW, math.ceil(BUDGET * tokens))}


async def answer(client: Any, at: int, **options: Any) -> Any:
    """Ask for an answer, by a chat or by a completion, in a stream or whole, and return the statement."""
    start = 7 * at % (len(TEXT) - 180)
    part = TEXT[start : start + 180]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, **options}
    if streams := at % 2:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    if at % 4 < 2:
        response = await client.completions.create(prompt=part, **asked)
    else:
        response = await client.chat.completions.create(messages=[{"role": "user", "content": part}], **asked)
    if not streams:
        return response.kv_transfer_params["kvspec"], response.usage.prompt_tokens
    stated: Any = None
    usage: Any = None
    async for event in response:
        stated = (event.model_extra or {}).get("kvspec", stated)
        usage = event.usage or usage
    return stated, usage.prompt_tokens


async def outcome(client: Any, at: int, full: bool) -> str:
    """Send one request of the load, and return how it ended."""
    given: dict[str, Any] = {"ignore_eos": True}  # Nothing is evicted for an answer of one token.
    if full:
        given["vllm_xargs"] = {"kvspec": FULL}
    if at % 5 == 0:  # the client leaves before, while or after the prompt is read
        leaving = answer(client, at, max_tokens=400, extra_body=given)
        with suppress(TimeoutError):  # a fast machine may answer before the client leaves
            await asyncio.wait_for(leaving, Random(at).uniform(0, 4))
        return "cancelled"
    if at % 20 == 3 and not full:
        body, _ = await answer(client, at, extra_body={"vllm_xargs": {"kvspec": FAILING}})
        assert not body["evictions"]
        return str(body["reason"].partition(":")[0])
    body, tokens = await answer(client, at, extra_body=given)
    if not full:
        check_statement(body, tokens)
    return "answered"


async def load(server: Running, full: bool) -> tuple[list[str], int]:
    """Send all requests, and return how they ended, and the growth of the idle server's memory after the warm-up."""
    places, memory, ends, part = asyncio.Semaphore(AT_ONCE), list[dict[str, int]](), list[str](), REQUESTS // PARTS

    async def limited(client: Any, at: int) -> str:
        async with places:
            return await outcome(client, at, full)

    async with server.client() as client:
        for first in range(0, REQUESTS, part):
            ends += await asyncio.gather(*(limited(client, at) for at in range(first, first + part)))
            wait_until(server.is_idle)
            memory.append(server.memory())
    print([{name: size >> 20 for name, size in one.items()} for one in memory], "MiB")
    total = [sum(one.values()) for one in memory]
    return ends, max(total[WARM:]) - total[WARM - 1]


def test_tools_are_called_after_an_eviction(server: Running) -> None:
    function = {"name": "lamp", "description": "Switch the lamp on or off.", "parameters": LAMP}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        actual = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": TEXT[:180]}], max_tokens=64, temperature=0,
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "lamp"}},
        )
    (call,) = actual.choices[0].message.tool_calls
    assert call.function.name == "lamp"
    json.loads(call.function.arguments)  # Unless a function is strict, vLLM 0.32 accepts any JSON value.
    check_statement(actual.kv_transfer_params["kvspec"], actual.usage.prompt_tokens)


def test_answers_of_the_responses_api_have_a_statement(server: Running) -> None:
    """Check the last event of a stream too. A stream with a bad policy was HTTP 200, and broke off."""
    async def respond(stream: bool, **options: Any) -> Any:
        asked = {"model": MODEL, "input": TEXT[:180], "max_output_tokens": 6, "temperature": 0, "stream": stream}
        async with server.client() as client:
            actual = await client.responses.create(**asked, **options)
            return [event async for event in actual][-1].response if stream else actual

    unserved = {"vllm_xargs": {"kvspec": json.dumps({"policy": "adakv", "budget": BUDGET})}}
    for stream in (False, True):
        actual = asyncio.run(respond(stream))
        check_statement(actual.kv_transfer_params["kvspec"], actual.usage.input_tokens)
        with pytest.raises(openai.BadRequestError, match="adakv keeps more tokens in some heads"):
            asyncio.run(respond(stream, extra_body=unserved))


def test_curl_gets_a_statement(server: Running) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": TEXT[:180]}], "max_tokens": 4})
    command = ["curl", "-sS", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    actual = json.loads(done.stdout)
    check_statement(actual["kv_transfer_params"]["kvspec"], actual["usage"]["prompt_tokens"])


def test_nothing_is_left_of_five_hundred_requests(server: Running) -> None:
    """One in five requests is cancelled, and the policy of one in twenty fails.

    vLLM's own memory grows with the requests (vLLM 0.32 on a CPU), so the first load has no eviction.
    """
    _, alone = asyncio.run(load(server, full=True))
    before = metrics(server.url)
    ends, growth = asyncio.run(load(server, full=False))
    assert {end: ends.count(end) for end in ends} == {
        "answered": REQUESTS * 3 // 4, "cancelled": REQUESTS // 5, "SpecError": REQUESTS // 20,
    }
    after = metrics(server.url)
    failed = 'kvspec_full_cache_requests_total{reason="SpecError"}'
    assert after[failed] - before.get(failed, 0) == REQUESTS // 20
    assert growth - alone < GROWTH, (growth, alone)
