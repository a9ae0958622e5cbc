"""`kvspec serve` as users start it: responses to clients, and the result of `kvspec verify --server`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from conformance.paths import ROOT
from tests.models_integration.engines.vllm.engine import NEEDS_VLLM, cut, schema

# A server starts in half a minute, and next to other processes in many minutes.
pytestmark = [pytest.mark.law("as-it-is-described"), pytest.mark.nightly, *NEEDS_VLLM]

VLLM = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024",
        "--kv-cache-memory-bytes", "100M"]
START = 900


@contextmanager
def serving(tmp_path: Path, *command: str, wait: str | None = None) -> Iterator[str]:
    """Yield the address of a server in a separate process, which must end within 10 s after SIGTERM.

    Args:
        tmp_path: folder for the log of the server, and for the id of the process.
        command: module of Python and arguments of the server.
        wait: text of the log after which the block begins. If None, the block begins when the server answers.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # a different version of vLLM can be there
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    # vLLM closes a connection after 5 s without a request. A client of a busy machine could just be sending one.
    environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "600"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *VLLM, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log, stderr=log, env=environment, start_new_session=True,
        )
        (tmp_path / "pid").write_text(str(process.pid), encoding="ascii")
        try:
            _wait(url, process, tmp_path / "log", wait)
            yield url
            process.send_signal(signal.SIGTERM)
            process.wait(10)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(url: str, process: Any, log: Path, text: str | None) -> None:
    pause = 1 if text is None else 0.1
    for _ in range(round(START / pause)):
        if text is not None and text in log.read_text():
            return
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                assert text is None, f"the server answers, and its log does not contain {text}"
                return
        except OSError:
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(pause)
    raise AssertionError(f"no server after {START} s: {log.read_text()[-3000:]}")


def kvspec_serve(policy: str, budget: str, model: str = "pocket") -> list[str]:
    return ["kvspec", "serve", model, "--policy", policy, "--budget", budget]


@pytest.fixture(scope="module")
def snapkv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server"), *kvspec_serve("snapkv(W=16)", "0.3")) as url:
        yield url
        # vLLM 0.32 waits for a client that reads nothing, for as long as the client is connected.
        end = metrics(url)["kvspec_seen_tokens_total"] + 8 * 500
        unread = ask_unread(url, n=8, temperature=1, logprobs=20, max_tokens=480, prompt=cut(20), model="pocket")
        wait_until(lambda: metrics(url)["kvspec_seen_tokens_total"] >= end)
    unread.close()


def ask_unread(url: str, **body: Any) -> HTTPConnection:
    """Ask for a stream, of which nothing is read."""
    connection = HTTPConnection(url.removeprefix("http://"))
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sock.connect((connection.host, connection.port))
    text = json.dumps({"stream": True, "ignore_eos": True, **body})
    connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
    return connection


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.5)
    raise AssertionError("the state of the server did not change")


def ask(url: str, **body: Any) -> Any:
    data = json.dumps({"model": "pocket", "max_tokens": 12, "temperature": 0, "ignore_eos": True, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=100)


def events(reply: Any) -> list[Any]:
    lines = [line.decode().strip() for line in reply]
    assert [line for line in lines if line][-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def check_snapkv(body: dict[str, Any], n: int) -> None:
    jsonschema.validate(body, schema())
    assert (body["policy"], body["budget"]) == ("snapkv(W=16)", "0.3")
    (one,) = body["evictions"]
    assert one["seen"] == n
    assert all(sum(b - a for a, b in ranges) <= 0.3 * n for ranges in one["sets"])


def test_an_answer_has_a_statement_for_each_choice(snapkv: str) -> None:
    with ask(snapkv, prompt=cut(200)) as reply:
        check_snapkv(json.load(reply)["kv_transfer_params"]["kvspec"], 200)
    with ask(snapkv, prompt=[cut(200), cut(150, 9)], n=2, temperature=1.0) as reply:
        actual = json.load(reply)
    stated = actual["kv_transfer_params"]["kvspec"]
    assert [one["index"] for one in stated] == [one["index"] for one in actual["choices"]] == [0, 1, 2, 3]
    for one, n in zip(stated, (200, 200, 150, 150), strict=True):
        check_snapkv(one, n)


@pytest.mark.parametrize("several", [False, True])
def test_a_stream_has_digests_and_statements(snapkv: str, several: bool) -> None:
    asked: dict[str, Any] = {"prompt": [cut(200), cut(150, 9)]} if several else {"prompt": cut(200)}
    with ask(snapkv, stream=True, **asked) as reply:
        actual = events(reply)
    assert all(one["choices"] for one in actual)  # Clients read choices[0].
    stated = [one for each in actual if "kvspec" in each for one in (each["kvspec"] if several else [each["kvspec"]])]
    digests = {one.get("index"): one["digests"] for one in stated if "digests" in one}
    whole = [one for one in stated if "evictions" in one]
    assert len(whole) == 1 + several
    for one, n in zip(whole, (200, 150), strict=False):
        check_snapkv(one, n)
        assert digests[one.get("index")] == [each["digest"] for each in one["evictions"]]


def test_metrics_count_tokens_blocks_and_reasons(snapkv: str) -> None:
    before = metrics(snapkv)
    with ask(snapkv, prompt=cut(200)), ask(snapkv, prompt=cut(1)):
        pass
    with ask(snapkv, prompt=cut(200), vllm_xargs={"kvspec": '{"policy": "fullcache"}'}):
        pass
    after = metrics(snapkv)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["kvspec_seen_tokens_total"] == 212 + 13 + 212
    assert grown["kvspec_kept_tokens_total"] == 72 + 13 + 212
    assert grown["kvspec_freed_blocks_total"] == 5  # There are 7 blocks, and 60 tokens fill 2 of them.
    assert grown['kvspec_full_cache_requests_total{reason="the prompt has one token"}'] == 1
    assert grown['kvspec_full_cache_requests_total{reason="the request asks for fullcache"}'] == 1


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = [line.decode().strip() for line in reply if not line.startswith(b"#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_server_that_starts_ends_after_sigterm(tmp_path: Path) -> None:
    """Check SIGTERM during the start of the engine, which vLLM 0.32 without kvspec ignores."""
    with serving(tmp_path, *kvspec_serve("knorm", "0.3"), wait="Initializing a V1 LLM engine"):
        pass
    log = (tmp_path / "log").read_text()
    assert "Started server process" not in log
    assert log.count("kvspec: policies that are not served:") == 1


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("asked", "words"), [
    *(({"stream": stream, "vllm_xargs": {"kvspec": '{"policy": "adakv", "budget": 0.3}'}}, "some heads")
      for stream in (False, True)),
    ({"use_beam_search": True, "n": 2}, "evicts nothing with snapkv(W=16): send"),
    ({"vllm_xargs": {"kvspec": {"policy": "knorm", "budget": 0.5}}}, "body.vllm_xargs.kvspec"),
])
def test_a_bad_policy_is_a_bad_request(snapkv: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(snapkv, prompt=cut(20), **asked)
    assert caught.value.code == 400
    assert words in caught.value.read().decode()


def test_beam_search_with_the_full_cache(snapkv: str) -> None:
    full = {"kvspec": '{"policy": "fullcache"}'}
    with ask(snapkv, prompt=cut(20), use_beam_search=True, n=2, vllm_xargs=full) as reply:
        actual = json.load(reply)
    assert (len(actual["choices"]), actual.get("kv_transfer_params")) == (2, None)


@pytest.mark.law("one-line-with-the-way-out")
def test_a_pool_that_is_too_small_is_one_line_without_a_traceback() -> None:
    command = [sys.executable, "-m", *kvspec_serve("snapkv", "0.3"), *VLLM[:-1], "1M"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START)
    assert done.returncode == 2
    assert "one request can have 1024 tokens: type --kv-cache-memory-bytes" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.law("one-line-with-the-way-out")
def test_a_worker_that_does_not_start_names_the_reason_in_the_log() -> None:
    """Check the log of the server. vLLM's engine adds tracebacks of its own processes."""
    command = [sys.executable, "-m", *kvspec_serve("snapkv", "0.3"), *VLLM[:-2], "--gpu-memory-utilization", "1e-5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START)
    assert done.returncode == 2
    assert "kvspec: Available memory on node" in done.stderr
    assert "kvspec: MODEL = 'pocket': the engine did not start; the log above" in done.stderr


@pytest.mark.law("eviction-equals-masking")
def test_the_witness_confirms_snapkv(snapkv: str) -> None:
    """Check a part of the prompts: shared prefixes, and long answers."""
    command = [sys.executable, "-m", "conformance.verify", "--server", snapkv, "--model", "pocket"]
    parts = ["--", "-q", "-k", "shared or long"]
    done = subprocess.run([*command, *parts], capture_output=True, text=True, check=False, timeout=900)
    assert "10 passed" in done.stdout + done.stderr
