"""Reader of GGUF files: metadata, and tensors in F32, Q8_0 or Q4_1 as float32."""

import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Weights", "read_weights", "sentence_ends"]

Floats = NDArray[Any]
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32
_NORMAL = 1
"""Type of a token that is text."""
_MARKS = frozenset(".!?։؟۔܀܁܂‼‽⁇⁈⁉。！？．।॥｡⸮")
"""Characters that end a sentence, of the scripts in the vocabulary of SmolLM2."""


class Weights(NamedTuple):
    """Metadata and tensors of a file, by name."""

    metadata: dict[str, Any]
    tensors: dict[str, Floats]


class _Cursor:
    """Place in the bytes of a file."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(_NUMBERS[kind])


def read_weights(path: Path) -> Weights:
    """Return the metadata and the dequantised tensors of a GGUF file of version 3."""
    cursor = _Cursor(path.read_bytes())
    if (cursor.number("I"), cursor.number("I")) != (0x46554747, 3):
        raise ValueError(f"{path} must be a GGUF file of version 3")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(keys)}
    entries = [
        (cursor.text(), [cursor.number("Q") for _ in range(cursor.number("I"))], cursor.number("I"), cursor.number("Q"))
        for _ in range(tensors)
    ]
    alignment = metadata.get("general.alignment", 32)
    base = -(-cursor.at // alignment) * alignment
    return Weights(metadata, {
        name: _values(cursor.data, base + offset, prod(shape), kind).reshape(shape[::-1])
        for name, shape, kind, offset in entries
    })


def _values(data: bytes, start: int, count: int, kind: int) -> Floats:
    """Return numbers as float32. A block of Q4_1 has a scale, a minimum and 32 codes of four bits, low halves first."""
    if kind == _F32:
        return np.frombuffer(data, "<f4", count, start)
    blocks = count // _BLOCK
    if kind == _Q8_0:
        rows = np.frombuffer(data, np.uint8, 34 * blocks, start).reshape(blocks, 34)
        return _halves(rows[:, :2]) * rows[:, 2:].copy().view(np.int8)
    if kind != _Q4_1:
        raise ValueError(f"tensors of type {kind} cannot be read: use a file with F32, Q8_0 and Q4_1")
    rows = np.frombuffer(data, np.uint8, 20 * blocks, start).reshape(blocks, 20)
    codes = np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1)
    result: Floats = _halves(rows[:, :2]) * codes + _halves(rows[:, 2:4])
    return result


def _halves(columns: Floats) -> Floats:
    result: Floats = columns.copy().view("<f2").astype(np.float32)
    return result


def sentence_ends(metadata: dict[str, Any]) -> frozenset[int]:
    """Return the ids of tokens whose text contains a newline, or ends in a mark when spaces are removed."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
    pairs = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    letters, ends = set(table), set()
    for at, (token, kind) in enumerate(pairs):
        if kind == _NORMAL and set(token) <= letters:
            text = bytes(table[letter] for letter in token).decode(errors="replace")
            if "\n" in text or text.strip(" ")[-1:] in _MARKS:
                ends.add(at)
    return frozenset(ends)
