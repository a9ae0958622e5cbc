"""The witness on servers that cannot be tested: one sentence has the reason, and no server breaks a rule for that."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from conformance.server_suite.judge import Reading, Witness, check_eviction
from conformance.server_suite.reading import with_noise
from conformance.verify import __main__ as verify_main
from conformance.witness.client import Answer, Server
from spec.errors import SpecError
from tests.conformance.local_server import running
from tests.conformance.server_verdicts import verdicts
from tests.conformance.test_server_suite import FAULTS, Evicting, serving

Reply = Callable[[Mapping[str, Any]], tuple[int, object]]
"""Function from a request to the status and the JSON value of the response."""


@contextmanager
def replying(reply: Reply) -> Iterator[str]:
    """Yield the address of a server with a model named tiny. `reply` makes each response."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            self.send_json(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            self.send_json(*reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def send_json(self, status: int, body: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with running(Handler) as url:
        yield url


@pytest.mark.parametrize(("status", "body", "words"), [
    (422, {"detail": "Unexpected fields"}, ['answered 422 to 3 ids: {"detail": "Unexpected fields"}', "vllm serve"]),
    (400, {"detail": "prompt must be a string."}, ["must be a string", "token ids as the prompt"]),
    (404, {"detail": "Not Found"}, ["a server of chat completions alone cannot be tested", "vllm serve"]),
    (200, ["no object"], ["did not answer a prompt of 3 ids: ['no object']"]),
    (200, {"error": {"message": "out of memory"}}, ["did not answer a prompt of 3 ids", "out of memory"]),
])
def test_a_server_that_cannot_be_tested_is_one_sentence(
    status: int, body: object, words: list[str], tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with replying(lambda asked: (status, body)) as url:
        monkeypatch.setattr("sys.argv", ["verify", "--server", url, "--model", str(tiny_llama)])
        assert verify_main.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [one for one in words if one not in printed.err] == [], printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_here_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with replying(lambda asked: (200, {"choices": []})) as url:
        monkeypatch.setattr("sys.argv", ["verify", "--server", url, "--model", "no-such-model"])
        assert verify_main.main() == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "no-such-model" in printed.err
    assert "Traceback" not in printed.err


def test_a_server_that_stops_to_answer_breaks_no_rule(model: PreTrainedModel) -> None:
    asked = []

    def reply(request: Mapping[str, Any]) -> tuple[int, object]:
        asked.append(request)
        return 500, {"error": "the engine is dead"}

    with replying(reply) as url:
        witness = Witness(model, Server.of(url, "tiny"))
        for _ in range(2):
            with pytest.raises(pytest.skip.Exception, match=r"lengths: .* answered 500 to 2 ids: .*engine is dead"):
                witness.readings("lengths")
        assert len(asked) == 1
        with pytest.raises(pytest.skip.Exception, match=r"to 400 ids|prompt of 400 ids"):
            witness.running_at_once()


@pytest.mark.parametrize(("changed", "words"), [
    ({"answer_ids": None}, "sends no token ids or no log-probabilities"),
    ({"logprobs": None}, "sends no token ids or no log-probabilities"),
    ({"answer_ids": [], "logprobs": []}, "sends no token ids or no log-probabilities"),
    ({"logprobs": [None, -1.0]}, "sends no token ids or no log-probabilities"),
    ({"logprobs": [-1.0, float("nan")]}, "sends no token ids or no log-probabilities"),
    ({"logprobs": [-1.0, "-1"]}, "sends no token ids or no log-probabilities"),
    ({"answer_ids": [5, -1]}, "sends no token ids or no log-probabilities"),
    ({"answer_ids": [5, "6"]}, "sends no token ids or no log-probabilities"),
    ({"logprobs": [-1.0]}, "sends 2 token ids and 1 log-probabilities"),
    ({"answer_ids": [5, 70_000]}, "answers with the token id 70000, and the model of --model has 256 ids"),
])
def test_an_answer_that_cannot_be_read_is_undecided(model: PreTrainedModel, changed: Any, words: str) -> None:
    right = Answer(list(range(3, 43)), answer_ids=[5, 6], logprobs=[-1.0, -1.0])
    reading = Reading(Witness(model, Server("http://127.0.0.1:1", "tiny")), replace(right, **changed))
    with pytest.raises(pytest.skip.Exception, match=words):
        check_eviction(reading)


def test_a_server_with_different_weights_does_not_evict_for_that(model: PreTrainedModel) -> None:
    """The server states nothing and evicts nothing. Its log-probabilities differ from those of the full cache."""
    with serving(Evicting(with_noise(model, 0.05, 0), fault=FAULTS["no eviction"][0], states=False)) as url:
        witness = Witness(model, Server.of(url, "tiny"))
        assert set(verdicts(witness, "shared prefixes")["eviction"]) == {"undecided"}
        with pytest.raises(pytest.skip.Exception, match="the server has different weights or a different dtype"):
            check_eviction(witness.readings("shared prefixes")[0])


def test_log_probabilities_of_llama_server_are_read() -> None:
    """llama-server gives log-probabilities of completions in the form of chat completions, with ids."""
    answer = Answer([1, 2])
    for token, logprob in ((7, -0.5), (9, -2.0)):
        content = [{"id": token, "token": "a", "logprob": logprob, "top_logprobs": []}]
        answer.take({"choices": [{"text": "a", "logprobs": {"content": content}}]})
    answer.take({"choices": [{"text": "", "logprobs": None}]})
    assert (answer.answer_ids, answer.logprobs, answer.text) == ([7, 9], [-0.5, -2.0], "aa")


def test_an_error_in_a_stream_is_no_answer() -> None:
    with pytest.raises(ValueError, match="out of memory"):
        Answer([1, 2]).take({"error": "out of memory"})


def test_a_model_that_the_server_lacks_is_an_error_before_the_tests() -> None:
    class Two(Server):
        def models(self) -> list[str]:
            return ["a", "b"]

    with pytest.raises(SpecError, match="must be a model of the server: a, b"):
        Two.of("http://127.0.0.1:1", "c")
