"""Ask a server for completions over OpenAI's protocol, and collect what it states about its evictions."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from conformance.witness.statement import MalformedStatement, Statement, parse_statement
from conformance.witness.transport import open_limited, read_all
from spec.errors import SpecError
from spec.validate import check_seconds

__all__ = ["Answer", "Server", "most_at_once"]

_LONGEST = 300
"""Maximum number of characters of a server's error message."""
_UNREADABLE = (OSError, HTTPException, ValueError, TypeError, AttributeError, RecursionError)
"""Errors of an answer that is late, too long, or not in OpenAI's form."""
_REFUSED = (
    "use a server that accepts token ids as the prompt of POST /v1/completions, with the options logprobs, ignore_eos"
    " and return_token_ids, such as `vllm serve`, or a server that accepts text as the prompt"
)
_CHAT = "a server of chat completions alone cannot be tested, because it tokenizes the prompt itself"
_NEEDED = {404: f"{_CHAT}; {_REFUSED}", 405: f"{_CHAT}; {_REFUSED}"}
"""What to type instead, by HTTP status."""


@dataclass
class Answer:
    """Answer of a server to one prompt.

    Attributes:
        prompt_ids: token ids that were sent.
        answer_ids: token ids of the answer, or None if the server does not send ids.
        logprobs: log-probability of each answer token, or None if the server does not send them.
        stated: the JSON object of the statement, or None.
        digests: digests that came before the answer's end, each with the number of answer tokens before it.
        text: the answer's text.
        times: when each event with answer tokens came, in seconds.
    """

    prompt_ids: list[int]
    answer_ids: list[int] | None = None
    logprobs: list[float] | None = None
    stated: Mapping[str, Any] | None = None
    digests: list[tuple[int, str]] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def can_be_read(self) -> bool:
        """True if the answer has token ids and log-probabilities, or a statement."""
        return self.stated is not None or bool(self.answer_ids and self.logprobs)

    def statement(self) -> Statement:
        """Return the statement, checked by the rules of spec/witness.md.

        Raises:
            MalformedStatement: if the server states nothing, or a value that is not allowed.
        """
        if self.stated is None:
            raise MalformedStatement("kvspec", None, "the answer has no statement (spec/witness.md)")
        answer = {"prompt_ids": self.prompt_ids, "answer_ids": self.answer_ids, "logprobs": self.logprobs}
        return parse_statement(self.stated, {name: value for name, value in answer.items() if value is not None})

    def take(self, event: Mapping[str, Any]) -> None:
        """Add an event of a stream, or a whole answer.

        Raises:
            ValueError: if the event is not in OpenAI's form, or reports an error of the server.
        """
        if not isinstance(event, Mapping) or event.get("error"):
            raise ValueError(str(event)[:_LONGEST])
        stated = event.get("kvspec") or (event.get("kv_transfer_params") or {}).get("kvspec")
        if isinstance(stated, Mapping):
            if "digests" in stated:
                before = len(self.answer_ids or [])
                self.digests += [(before, str(digest)) for digest in stated["digests"]]
            if "evictions" in stated:
                self.stated = stated
        for choice in event.get("choices") or ():
            self.times.append(time.monotonic())
            self.text += choice.get("text") or ""
            logprobs = choice.get("logprobs") or {}
            content = logprobs.get("content") or []  # llama-server answers completions in the form of a chat
            if (ids := choice.get("token_ids", [one.get("id") for one in content] or None)) is not None:
                self.answer_ids = (self.answer_ids or []) + list(ids)
            if (values := logprobs.get("token_logprobs", [one.get("logprob") for one in content] or None)) is not None:
                self.logprobs = (self.logprobs or []) + list(values)


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: address, such as http://127.0.0.1:8000 (with or without /v1).
        model: name of the model, as the server lists it.
        timeout: maximum number of seconds from a request to the last byte of its answer.

    Raises:
        SpecError: if the timeout is not a positive, finite number.
    """

    url: str
    model: str
    timeout: float = 300.0

    def __post_init__(self) -> None:
        check_seconds("timeout", self.timeout)

    @classmethod
    def of(cls, url: str, model: str) -> "Server":
        """Return the server at an address. If the server has several models, one must have the name `model`.

        Raises:
            SpecError: if no server answers, or if none of several models has this name.
        """
        names = cls(url, model).models()
        if len(names) != 1 and model not in names:
            raise SpecError("model", model, f"must be a model of the server: {', '.join(names) or 'none'}")
        return cls(url, model if model in names else names[0])

    @property
    def base(self) -> str:
        """The address without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    def models(self) -> list[str]:
        """Return the names of the server's models.

        Raises:
            SpecError: if no server answers, or if the answer is not in OpenAI's form.
        """
        try:
            with self._open("/v1/models") as reply:
                return [str(one.get("id")) for one in json.loads(read_all(reply)).get("data") or ()]
        except _UNREADABLE as error:
            bound = f'must answer GET /v1/models with JSON such as {{"data":[{{"id":"NAME"}}]}}: {error}'
            raise SpecError("server", self.url, bound) from error

    def version(self) -> str:
        """Return the response of the server to GET /version, or an empty string if there is none."""
        try:
            with self._open("/version") as reply:
                return read_all(reply).decode(errors="replace")
        except (OSError, HTTPException):
            return ""

    def complete(self, ids: Sequence[int], tokens: int, stream: bool = False, seed: int = 0) -> Answer:
        """Ask for exactly `tokens` tokens after a prompt of token ids, drawn at temperature 1.

        A drawn answer has log-probabilities that depend on the whole prompt. A greedy answer of a small model soon
        repeats itself with log-probabilities near 0, for any eviction.

        Raises:
            SpecError: if the server refuses the request, does not answer in time, or sends more tokens.
        """
        answer = Answer(list(ids))

        def take(event: Mapping[str, Any]) -> None:
            answer.take(event)
            _check_length(answer, tokens)

        self._ask(ids, tokens, stream, seed, take)
        return answer

    def complete_text(self, prompt: str, tokens: int) -> str:
        """Ask for the greedy answer to a text, without a penalty for repeated tokens.

        The server may end the answer early.

        llama-cpp-python's server penalizes repeated tokens by default, which changes greedy answers like an eviction.
        If the server refuses this option, the request is sent again without the option.

        Raises:
            SpecError: if the server refuses the request or does not answer in time.
        """
        answer, about = Answer([]), f"a text of {len(prompt)} characters"
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        try:
            self._post({**body, "repeat_penalty": 1.0}, about, answer.take)
        except SpecError as error:
            if not isinstance(error.__cause__, urllib.error.HTTPError):
                raise
            self._post(body, about, answer.take)
        return answer.text

    def cancel(self, ids: Sequence[int], tokens: int, seed: int = 0) -> None:
        """Ask for a streamed answer, and close the connection after the first event.

        Raises:
            SpecError: as in `complete`.
        """
        self._ask(ids, tokens, True, seed, lambda event: True)

    def _ask(
        self, ids: Sequence[int], tokens: int, stream: bool, seed: int, take: Callable[[Mapping[str, Any]], object],
    ) -> None:
        """Call `take` with each event of an answer. If `take` returns a true value, close the connection."""
        self._post({
            "model": self.model, "prompt": list(ids), "max_tokens": tokens, "temperature": 1.0, "seed": seed,
            "logprobs": 1, "stream": stream, "ignore_eos": True, "return_token_ids": True,
        }, f"{len(ids)} ids", take)

    def _post(self, body: Mapping[str, Any], about: str, take: Callable[[Mapping[str, Any]], object]) -> None:
        try:
            with self._open("/v1/completions", body) as reply:
                for event in _events(reply) if body.get("stream") else [json.loads(read_all(reply))]:
                    if take(event):
                        return
        except urllib.error.HTTPError as error:
            raise SpecError("server", self.url, f"answered {error.code} to {about}: {error.msg}") from error
        except _UNREADABLE as error:
            raise SpecError("server", self.url, f"did not answer a prompt of {about}: {error}") from error

    def completes_ids(self) -> bool:
        """Ask for one token. Return True if the server completes token ids, and False if it completes only text.

        Raises:
            SpecError: if the server completes neither. The error has the server's response to token ids.
        """
        try:
            if self.complete([1, 2, 3], 1).can_be_read:
                return True
            refusal = SpecError("server", self.url, "sends no token ids or no log-probabilities of its answer")
        except SpecError as error:
            refusal = error
        try:
            self.complete_text("a b c", 1)
        except SpecError as error:
            needed = _NEEDED.get(int(getattr(refusal.__cause__, "code", 0)), _REFUSED)
            raise SpecError("server", self.url, f"{refusal.bound}; {needed}") from error
        return False

    def complete_all(
        self, prompts: Sequence[Sequence[int]], tokens: int, seed: int = 0, stream: bool | None = None,
    ) -> list[Answer]:
        """Ask for the answers of all prompts at once. By default, every second answer is streamed."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [
                pool.submit(self.complete, ids, tokens, bool(at % 2) if stream is None else stream, seed + at)
                for at, ids in enumerate(prompts)
            ]
            return [one.result() for one in asked]

    def running_at_once(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """Return the largest number of answers that the server writes at the same time, if it gets all prompts at once.

        This number shows whether evicted memory serves other requests. Log-probabilities cannot show that.
        """
        return most_at_once(self.complete_all(prompts, tokens, stream=True))

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"})
        try:
            return open_limited(request, self.timeout)
        except urllib.error.HTTPError as error:
            with error:
                error.msg = _message(error) or error.msg
            raise


def most_at_once(answers: Sequence[Answer]) -> int:
    """Return the largest number of answers that were being sent at the same time."""
    spans = [(one.times[0], one.times[-1]) for one in answers if one.times]
    return max((sum(a <= at < b for a, b in spans) for at, _ in spans), default=0)


def _check_length(answer: Answer, tokens: int) -> None:
    """Check that an answer has no more tokens than requested.

    Raises:
        ValueError: if the answer has more token ids or log-probabilities, or a statement with more token ids.
    """
    for values in (answer.answer_ids, answer.logprobs, (answer.stated or {}).get("answer_ids")):
        if isinstance(values, list) and len(values) > tokens:
            raise ValueError(f"the answer has {len(values)} tokens, and max_tokens is {tokens}")


def _message(error: urllib.error.HTTPError) -> str:
    """Return the start of a server's error message, or an empty string if the message is not complete in time."""
    try:
        return " ".join(error.read(4 * _LONGEST).decode(errors="replace").split())[:_LONGEST]
    except (OSError, HTTPException):
        return ""


def _events(reply: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, up to [DONE]."""
    for line in reply:
        text = line.decode().strip()
        if text == "data: [DONE]":
            return
        if text.startswith("data:"):
            yield json.loads(text.removeprefix("data:"))
