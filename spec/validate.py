"""Input checks that the public functions make before any work.

An error message contains the name of the argument, the given value and the rule that the value breaks.
"""

import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any, cast

import numpy as np

from spec.arrays import BoolVector, IntVector, Matrix, Vector
from spec.errors import SpecError

__all__ = [
    "LISTED_MOST", "MOST_SECONDS", "MOST_TOKENS", "bound_of_names", "check_attention_inputs", "check_attention_tensors",
    "check_choices", "check_diversity", "check_keys", "check_lse", "check_once", "check_penalty", "check_positions",
    "check_scaling", "check_seconds", "check_sentence_ends", "check_shapes", "check_sinks", "check_token_ids",
    "check_types", "check_whole", "did_you_mean",
]

MOST_SECONDS = 10**6
"""Largest number of seconds to wait, eleven days. Python's locks, sockets and processes accept this number."""
MOST_TOKENS = 2**24
"""Largest number of tokens that a constant of a policy may have. No prompt is longer."""
LISTED_MOST = 12
"""Largest number of valid names that an error message lists. If more names are valid, only similar names are listed."""


def check_choices(argument: str, given: Iterable[str], known: Collection[str]) -> None:
    """Check that all given names are known.

    Raises:
        SpecError: if a name is unknown. The message lists all known names, or only similar names if there are many.
    """
    for name in given:
        if name not in known:
            raise SpecError(argument, name, bound_of_names(str(name), known))


def check_once(argument: str, given: Iterable[object]) -> None:
    """Check that a list has no entry twice.

    Raises:
        SpecError: if an entry is given twice.
    """
    seen = set[object]()
    for one in given:
        if one in seen:
            raise SpecError(argument, one, "is given twice: leave out one of the two")
        seen.add(one)


def check_seconds(argument: str, seconds: object) -> None:
    """Check that a timeout is a positive number of seconds, and neither infinite nor NaN.

    Raises:
        SpecError: if the value is not such a number.
    """
    if type(seconds) not in (int, float) or not 0 < cast(float, seconds) <= MOST_SECONDS:
        reason = f"must be a positive number of seconds, at most {MOST_SECONDS}, such as 60"
        raise SpecError(argument, seconds, reason)


def bound_of_names(name: str, known: Collection[str], command: str = "") -> str:
    """Return the error text for an unknown name: all known names, or only similar names if there are many.

    If there are many names, the text also has the command that lists the names, if any.
    """
    if len(known) <= LISTED_MOST:
        return f"must be one of {', '.join(known)}"
    listed = f", see `{command}`" if command else ""
    return f"is none of the {len(known)} known names{listed}" + did_you_mean(name, known)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of an error text with the known names that are similar to a name, or "". Case does not matter."""
    folded = {one.lower(): one for one in sorted(known)}
    near = [folded[one] for one in get_close_matches(name.lower(), folded, n=3, cutoff=0.6)]
    return f"; did you mean {', '.join(near)}?" if near else ""


def check_attention_inputs(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any]) -> None:
    """Check that the arrays q (H, n, d) and k (H_kv, live, d) are valid inputs of attention.

    Values must be finite and of a floating dtype. H must be a multiple of H_kv, and n at most `live`.

    Raises:
        SpecError: if a condition fails.
    """
    for name, array in (("q", q), ("k", k)):
        _check_floats(name, array)
    check_shapes(q, k)


def check_attention_tensors(q: Any, k: Any) -> None:
    """Check tensors q and k by the rules of `check_attention_inputs`, without a copy of the tensors to the host.

    Raises:
        SpecError: if a condition fails.
    """
    for name, tensor in (("q", q), ("k", k)):
        if not hasattr(tensor, "is_floating_point"):
            raise SpecError(name, type(tensor).__name__, f"must have the type of q, {type(q).__name__}")
        if tensor.ndim != 3:
            raise SpecError(name, tuple(tensor.shape), "must be a tensor (heads, tokens, d)")
        _check_kind(name, tensor, tensor.is_floating_point())
        if not bool(tensor.isfinite().all()):
            at = tuple((~tensor.isfinite()).nonzero()[0].tolist())
            raise SpecError(name, float(tensor[at]), f"must be finite; this value is at {at}")
    check_shapes(q, k)


def check_shapes(q: Any, k: Any) -> None:
    """Check the shapes of the arrays or tensors q (H, n, d) and k (H_kv, live, d).

    d must be equal in q and k, H a multiple of H_kv, and n at most `live`.

    Raises:
        SpecError: if a condition fails.
    """
    if q.shape[2] != k.shape[2]:
        raise SpecError("k", tuple(k.shape), f"must have the head dimension of q, {q.shape[2]}")
    if q.shape[0] % k.shape[0]:
        raise SpecError(
            "q", tuple(q.shape), f"the number of heads must be a multiple of {k.shape[0]}, the number of KV heads in k"
        )
    if q.shape[1] > k.shape[1]:
        raise SpecError("q", tuple(q.shape), f"has {q.shape[1]} queries, but k has only {k.shape[1]} keys")


def check_keys(k: np.ndarray[Any, Any]) -> None:
    """Check that k (H_kv, n, d) has a floating dtype and finite values.

    Raises:
        SpecError: if a condition fails.
    """
    _check_floats("k", k)


def check_positions(positions: object, live: int) -> None:
    """Check that `positions` (live,) contains integers of at least 0 that increase strictly.

    Raises:
        SpecError: if a condition fails.
    """
    if not isinstance(positions, np.ndarray) or positions.shape != (live,):
        shape = getattr(positions, "shape", type(positions).__name__)
        raise SpecError("positions", shape, f"must be an array (tokens,), {(live,)}: one position for each key in k")
    if positions.dtype.kind not in "iu":
        raise SpecError("positions", positions.dtype, "must be integers")
    wrong = np.flatnonzero((positions < 0) | np.append(positions[1:] <= positions[:-1], False))
    if len(wrong):
        at = int(wrong[0])
        raise SpecError("positions", int(positions[at]), f"must increase strictly from 0 or more; wrong at index {at}")


def check_lse(lse: np.ndarray[Any, Any] | None, q: np.ndarray[Any, Any]) -> None:
    """Check that lse is None, or has the shape (H, n) of q (H, n, d), a floating dtype and finite values.

    Raises:
        SpecError: if a condition fails.
    """
    if lse is None:
        return
    if not isinstance(lse, np.ndarray) or lse.shape != q.shape[:2]:
        shape = getattr(lse, "shape", type(lse).__name__)
        raise SpecError("lse", shape, f"must be an array (heads, queries), {q.shape[:2]}")
    _check_values("lse", lse)


def check_sinks(sinks: Any, q: Any, *, read: bool = True) -> None:
    """Check that `sinks` is None, or an array or tensor (H,) of finite values of a floating dtype, for q (H, n, d).

    If `read` is False, the values of a tensor are not checked, so the host does not wait for its device.

    Raises:
        SpecError: if a condition fails.
    """
    if sinks is None:
        return
    if not hasattr(sinks, "isfinite"):
        if not isinstance(sinks, np.ndarray) or sinks.shape != (len(q),):
            shape = getattr(sinks, "shape", type(sinks).__name__)
            raise SpecError("sinks", shape, f"must be an array (heads,), {(len(q),)}")
        _check_values("sinks", sinks)
        return
    if tuple(sinks.shape) != (len(q),) or not sinks.is_floating_point():
        raise SpecError("sinks", tuple(sinks.shape), f"must be a floating-point tensor (heads,), {(len(q),)}")
    if read and not bool(sinks.isfinite().all()):
        raise SpecError("sinks", sinks.tolist(), "must be finite")


def _check_floats(name: str, array: np.ndarray[Any, Any]) -> None:
    if not isinstance(array, np.ndarray):
        raise SpecError(name, type(array).__name__, "must be a NumPy array, or a tensor that the backend takes")
    if array.ndim != 3:
        raise SpecError(name, array.shape, "must be an array (heads, tokens, d)")
    _check_values(name, array)


def _check_values(name: str, array: np.ndarray[Any, Any]) -> None:
    _check_kind(name, array, array.dtype.kind == "f")
    with np.errstate(over="ignore"):
        finite = np.isfinite(array if array.dtype.itemsize <= 8 else array.astype(np.float64))
    if not finite.all():
        at = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise SpecError(name, array[at], f"must be finite; this value is at {at}")


def _check_kind(name: str, array: Any, floating: bool) -> None:
    if not floating:
        raise SpecError(name, array.dtype, "must be floating point")
    if 0 in array.shape:
        raise SpecError(name, tuple(array.shape), "no axis may be empty")


def check_token_ids(token_ids: object, tokens: int, vocabulary: int | None = None) -> IntVector:
    """Return the token ids of one sequence as int64 (n,). n must equal the number of keys, `tokens`.

    Raises:
        SpecError: if the rank, dtype or length is wrong, if an id is outside [0, vocabulary), or if n is below 2.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1:
        raise SpecError("token_ids", ids.shape, "must have one axis (n,)")
    if len(ids) < 2:
        raise SpecError(
            "token_ids", ids.tolist(), "must have at least 2 ids; a single token is a decode step, not a segment"
        )
    if ids.dtype.kind not in "iu":
        raise SpecError("token_ids", ids.dtype, "must be integers")
    if len(ids) != tokens:
        raise SpecError("token_ids", len(ids), f"must have one id for each of the {tokens} keys")
    high = np.inf if vocabulary is None else vocabulary
    outside = (ids < 0) | (ids >= high)
    if outside.any():
        at = int(np.argmax(outside))
        raise SpecError("token_ids", int(ids[at]), f"must lie in [0, {high}); this id has index {at}")
    return ids.astype(np.int64)


def check_sentence_ends(sentence_ends: object) -> frozenset[int]:
    """Return the ids of the tokens that end a sentence, as a frozenset.

    Raises:
        SpecError: if `sentence_ends` is empty, or is not a collection of token ids.
    """
    if isinstance(sentence_ends, (str, bytes)) or not isinstance(sentence_ends, Iterable):
        # For a tokenizer the message contains the type, because the repr is pages long.
        shown = sentence_ends if isinstance(sentence_ends, (str, bytes, int)) else type(sentence_ends).__name__
        raise SpecError(
            "sentence_ends", shown, "must be a set of token ids; kvspec.sentence_ends(tokenizer) makes the set"
        )
    ends = list(sentence_ends)
    if not ends:
        raise SpecError(
            "sentence_ends", ends, "must have at least one id; kvspec.sentence_ends(tokenizer) makes the set"
        )
    for end in ends:
        if isinstance(end, (bool, np.bool_)) or not isinstance(end, (int, np.integer)) or end < 0:
            raise SpecError("sentence_ends", end, "must be token ids, integers of at least 0")
    return frozenset(int(end) for end in ends)


def check_whole(argument: str, value: object, least: int = 0, most: int | None = None) -> int:
    """Check and return a whole number of at least `least`, and of at most `most` tokens.

    Raises:
        SpecError: if the value is no whole number, or if it is out of range.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        shown = value if isinstance(value, (str, int, float)) or value is None else type(value).__name__
        raise SpecError(argument, shown, f"must be a whole number of at least {least}")
    if value < least:
        raise SpecError(argument, value, f"must be at least {least}")
    if most is not None and value > most:
        raise SpecError(argument, value, f"must be at most {most} tokens")
    return int(value)


def check_scaling(scaling: float, softcap: float | None) -> None:
    """Check that `scaling` (the factor of the logits) and `softcap` (if not None) are positive and finite.

    Raises:
        SpecError: if a condition fails.
    """
    for name, value in (("scaling", scaling), ("softcap", softcap)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise SpecError(name, value, "must be positive and finite")


def check_types(call: str, **given: tuple[object, type | tuple[type, ...]]) -> None:
    """Check the types of arguments that are easily swapped.

    Args:
        call: the right call of the function, for the error message.
        **given: value and accepted types of each argument.

    Raises:
        SpecError: for the first argument with a different type.
    """
    for name, (value, kinds) in given.items():
        if not isinstance(value, kinds):
            accepted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
            shown = value if isinstance(value, str) else type(value).__name__
            raise SpecError(name, shown, f"must be of type {accepted}; type kvspec.{call}")


def check_penalty(lam: float, name: str = "lam") -> None:
    """Check that the weight `lam` of the redundancy penalty is finite and at least 0.

    `name` is the name of the argument in the error message.

    Raises:
        SpecError: if a condition fails.
    """
    if not (math.isfinite(lam) and lam >= 0):
        raise SpecError(name, lam, "must be finite and not negative")


def check_diversity(s: Vector, V: Matrix, retained: BoolVector, k: int, lam: float) -> None:
    """Check the inputs of set-conditioned selection: s (n,), signatures V (n, d), mask `retained` (n,), k and lam.

    Raises:
        SpecError: if lam is negative or not finite, or if k is outside [number of retained tokens, n]. Also if the
            shapes do not match, or if a signature is not finite.
    """
    check_penalty(lam)
    for name, array, axes, kind in (("s", s, 1, "fiu"), ("V", V, 2, "fiu"), ("retained", retained, 1, "b")):
        if not isinstance(array, np.ndarray) or array.ndim != axes or array.dtype.kind not in kind:
            shape, form = getattr(array, "shape", type(array).__name__), "(n, d)" if axes == 2 else "(n,)"
            raise SpecError(name, shape, f"must be an array {form} of {'True or False' if kind == 'b' else 'numbers'}")
    n, held = len(s), int(np.count_nonzero(retained))
    if len(V) != n:
        raise SpecError("V", V.shape, f"must have a row for each of {n} scores")
    if len(retained) != n:
        raise SpecError("retained", retained.shape, f"must have a value for each of {n} scores")
    check_whole("k", k)
    finite = np.isfinite(V)
    if not finite.all():
        at = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise SpecError("V", V[at], f"signatures must be finite; this one is at {at}")
    if k > n:
        raise SpecError("k", k, f"must not exceed the {n} tokens")
    if k < held:
        raise SpecError("k", k, f"must be at least {held}, the number of tokens that are retained already")
