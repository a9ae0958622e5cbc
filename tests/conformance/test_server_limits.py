"""Limits of the witness's client: time, size, redirects, schemes and length of an answer."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from conformance.server_suite.prompts import LENGTHS
from conformance.witness import transport
from conformance.witness.client import Server
from spec.errors import SpecError
from tests.conformance.local_server import running

pytestmark = pytest.mark.law("one-line-with-the-way-out")

STARTED = b"HTTP/1.0 200 OK\r\n"
SECONDS = 4.0
"""Time after which an endless answer ends, so that a client without a deadline fails its test."""


@contextmanager
def sending(pieces: Callable[[str], Iterator[bytes]]) -> Iterator[str]:
    """Yield the address of a server that sends bytes, from the path of a request."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with suppress(OSError):  # The client leaves before the end.
                for piece in pieces(self.path):
                    self.wfile.write(piece)

    with running(Handler) as url:
        yield url


def slowly(first: bytes, piece: bytes) -> Iterator[bytes]:
    """Yield a piece again and again, with pauses that are shorter than the timeout of the client."""
    end = time.monotonic() + SECONDS
    yield first
    while time.monotonic() < end:
        yield piece
        time.sleep(0.02)


@pytest.mark.parametrize(("first", "piece"), [
    (STARTED + b"\r\n", b": keep-alive\n"), (STARTED + b"\r\n", b" "), (STARTED + b"X-Name: ", b"x"),
    (STARTED + b"Content-Length: 1000000000000\r\n\r\n", b" "),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_has_a_deadline(first: bytes, piece: bytes, stream: bool) -> None:
    with sending(lambda path: slowly(first, piece)) as url:
        server = Server(url, "tiny", timeout=0.3)
        with pytest.raises(SpecError, match=r"did not answer a prompt of 3 ids: .*not complete after 0\.3 s"):
            server.complete([1, 2, 3], 1, stream)
        with pytest.raises(SpecError, match=r"must answer GET /v1/models .*not complete after 0\.3 s"):
            server.models()


def test_an_error_message_has_a_deadline() -> None:
    with sending(lambda path: slowly(b"HTTP/1.0 500 No\r\n\r\n", b"x")) as url:
        server = Server(url, "tiny", timeout=0.3)
        with pytest.raises(SpecError, match=r"answered 500 to 3 ids: No$") as raised:
            server.complete([1, 2, 3], 1)
    assert isinstance(raised.value.__cause__, HTTPError)
    assert raised.value.__cause__.closed


def body(value: object) -> bytes:
    return STARTED + b"\r\n" + (value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_has_a_maximum_size(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST_BYTES", 10_000)
    with sending(lambda path: iter([body({"choices": [], "padding": "x" * 20_000})])) as url:
        server = Server(url, "tiny")
        with pytest.raises(SpecError, match="the answer has more than 10000 bytes"):
            server.complete([1, 2, 3], 1, stream)


def test_the_longest_statement_is_read() -> None:
    """40 layers of 40 KV heads keep every second token of the longest prompt of the witness."""
    ranges = [[at, at + 1] for at in range(0, max(LENGTHS), 2)]
    sets = [[*range(layer * 40, layer * 40 + 40)] for layer in range(40)]
    eviction = {"seen": max(LENGTHS), "sets": [ranges] * 1600, "layers": sets, "digest": "0"}
    with sending(lambda path: iter([body({"kvspec": {"evictions": [eviction]}})])) as url:
        assert Server(url, "tiny").complete([1, 2, 3], 1).stated == {"evictions": [eviction]}


def test_an_answer_takes_at_most_a_gigabyte_of_memory() -> None:
    """A list of empty objects takes 27 times as much memory as its text."""
    with sending(lambda path: iter([body(b"[" + b"{}," * 2**23 + b"{}]")])) as url:
        server = Server(url, "tiny")
        with pytest.raises(SpecError, match="the answer has more than 16777216 bytes"):
            server.complete([1, 2, 3], 1)


def test_a_redirect_is_not_followed() -> None:
    models = {"/elsewhere": body({"data": [{"id": "tiny"}]})}
    redirect = b"HTTP/1.0 302 Found\r\nLocation: /elsewhere\r\n\r\n"
    with sending(lambda path: iter([models.get(path, redirect)])) as url:
        server = Server(url, "tiny")
        with pytest.raises(SpecError, match=r"must answer GET /v1/models .*HTTP Error 302"):
            server.models()


def test_an_address_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_bytes(json.dumps({"data": [{"id": "tiny"}]}).encode())
    server = Server(tmp_path.as_uri(), "tiny")
    with pytest.raises(SpecError, match="the address must begin with http:// or https://"):
        server.models()


@pytest.mark.parametrize("listed", [[], 5, {"data": 5}, {"data": [5]}, b"[" * 100_000])
def test_a_list_of_models_in_a_different_form_is_one_sentence(listed: object) -> None:
    sentence = r'must answer GET /v1/models with JSON such as \{"data"'
    with sending(lambda path: iter([body(listed)])) as url, pytest.raises(SpecError, match=sentence):
        Server.of(url, "tiny")


CHOICE = {"text": "a", "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}


@pytest.mark.parametrize("event", [
    {"choices": [CHOICE, CHOICE, CHOICE]}, {"choices": [{"text": "a", "logprobs": {"token_logprobs": [-0.5] * 3}}]},
    {"choices": [], "kvspec": {"evictions": [], "answer_ids": [7, 7, 7]}},
])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_with_more_tokens_than_requested_is_refused(event: Mapping[str, Any], stream: bool) -> None:
    answer = json.dumps(event).encode()
    with sending(lambda path: iter([body(b"data: " * stream + answer + b"\n")])) as url:
        server = Server(url, "tiny")
        with pytest.raises(SpecError, match="the answer has 3 tokens, and max_tokens is 2"):
            server.complete([1, 2, 3], 2, stream)
        assert server.complete([1, 2, 3], 3, stream).can_be_read == ("token_ids" in str(event) or "kvspec" in event)
