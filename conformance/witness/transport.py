"""HTTP requests whose answers have a maximum time and a maximum size. Redirects are errors."""

import time
from contextlib import suppress
from functools import cache, partial
from http.client import HTTPResponse
from io import BufferedReader, RawIOBase
from socket import socket
from typing import Any
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

__all__ = ["MOST_BYTES", "open_limited", "read_all"]

MOST_BYTES = 2**24
"""Maximum number of bytes of an answer. JSON of this size can take 450 MB of memory, and 32 answers are stored."""
_PIECE = 2**16
"""Number of bytes that are read at once."""


def open_limited(request: Request, timeout: float) -> Any:
    """Send a request, and return the response.

    Args:
        request: request with an address of http or https.
        timeout: maximum number of seconds until the last byte of the answer.

    Raises:
        OSError: if the address is of a different scheme, or if the server does not answer in time. Also if the status
            is an error or a redirect. Reading the response raises the same error after the time or the size.
        HTTPException: if the answer is not in the form of HTTP.
    """
    if request.type not in ("http", "https"):
        raise OSError("the address must begin with http:// or https://")
    return _opener().open(request, timeout=timeout)


def read_all(response: Any) -> bytes:
    """Return the bytes of a response. The response's Content-Length reserves no memory."""
    return b"".join(iter(partial(response.read1, _PIECE), b""))


@cache
def _opener() -> OpenerDirector:
    """Return the opener of urllib, without redirects and without other schemes."""
    result = OpenerDirector()
    for handler in (ProxyHandler(), HTTPDefaultErrorHandler(), HTTPErrorProcessor(), _LimitedHandler()):
        result.add_handler(handler)
    return result


class _LimitedHandler(HTTPHandler, HTTPSHandler):
    """Handler of http and https whose responses have a deadline."""

    def do_open(self, http_class: Any, req: Request, **options: Any) -> HTTPResponse:
        timeout: float = req.timeout or 0.0
        limited = partial(_LimitedResponse, timeout=timeout, end=time.monotonic() + timeout)

        def connection(host: str, **given: Any) -> Any:
            result = http_class(host, **given)
            result.response_class = limited
            return result

        return super().do_open(connection, req, **options)


class _LimitedResponse(HTTPResponse):
    """Response that is read, with its headers, up to a deadline and a number of bytes."""

    def __init__(self, sock: socket, *args: Any, timeout: float, end: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp = BufferedReader(_LimitedBytes(self.fp.detach(), sock, timeout, end))


class _LimitedBytes(RawIOBase):
    """Bytes of a socket.

    The timeout of a socket is the maximum time between two bytes, so it is set again before each read.
    """

    def __init__(self, raw: RawIOBase, sock: socket, timeout: float, end: float) -> None:
        self._raw, self._sock, self._timeout, self._end, self._left = raw, sock, timeout, end, MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        remaining = self._end - time.monotonic()
        if remaining > 0:
            self._sock.settimeout(remaining)
            with suppress(TimeoutError):
                count = int(self._raw.readinto(buffer) or 0)
                self._left -= count
                if self._left < 0:
                    raise OSError(f"the answer has more than {MOST_BYTES} bytes")
                return count
        raise TimeoutError(f"the answer was not complete after {self._timeout:g} s")

    def close(self) -> None:
        self._raw.close()
        super().close()
