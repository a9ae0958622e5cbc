"""What happens in a simulated life, as data: drawn from a seed, written as a script, one operation in each line.

An operation knows nothing of the world. The world applies it to what is there, or skips it, so that any part of a
script is a script.
"""

import errno
import json
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NamedTuple

__all__ = ["POLICIES", "WRONG", "Operation", "drawn", "read_script", "written"]

POLICIES = (
    "breathing", "crystalcache", "stream", "streamingllm", "fullcache", "snapkv", "adakv", "nestedkv", "h2o", "tova",
    "rkv", "lagkv", "criticalkv", "chunkkv", "pyramidkv",
)
WRONG = ("width", "positions", "hole", "ids", "rows", "use_cache", "embeds")
"""Forwards that must be refused."""
LIVES, TEXTS = 3, 3
Values = dict[str, Any]


class Operation(NamedTuple):
    """A kind, which is the name of a method of the world, and its arguments."""

    kind: str
    values: Values


def written(operations: Iterable[Operation]) -> str:
    """The script: a JSON array in each line."""
    return "".join(f"{json.dumps(operation)}\n" for operation in operations)


def read_script(text: str) -> list[Operation]:
    """The operations of `written`."""
    return [Operation(*json.loads(line)) for line in text.splitlines() if line.strip()]


def drawn(seed: int, length: int) -> list[Operation]:
    """The script of a seed: knobs, a first life, then anything."""
    rng = Random(seed)
    kinds = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=length)
    # Half of the seeds are about caches or about the archive alone: what needs a long history gets one.
    if alone := rng.choice([None, None, OF_CACHES, set(KINDS) - OF_CACHES]):
        kinds = [kind for kind in kinds if kind in alone]
    return [Operation(kind, ({**KINDS, "knobs": (0, _knobs)}[kind][1])(rng)) for kind in ["knobs", "begin", *kinds]]


def _knobs(rng: Random) -> Values:
    """Sizes that only long lives would reach are drawn small."""
    return {
        "long_run": rng.choice([1, 2, 64]), "spare": rng.choice([1, 4, 64]),
        "room": rng.choice([None, None, 2, 3]),
    }


def _life(rng: Random, **values: Any) -> Values:
    return {"life": rng.randrange(LIVES), **values}


def _text(rng: Random, n: int) -> Values:
    return {"n": n, "seed": rng.randrange(1000)}


def _trip(rng: Random) -> list[Any] | None:
    """Where an exception is raised, at which call."""
    if rng.random() < 0.85:
        return None
    return [rng.choice(["attention", "layer", "decision", "decision", "compaction"]), rng.choice([0, 0, 1, 2])]


def _cuts(rng: Random, n: int) -> list[int]:
    """Where a segment is cut into forwards."""
    return sorted(rng.sample(range(1, n), min(n - 1, rng.choice([0, 0, 0, 1, 2])))) if n > 1 else []


def _begin(rng: Random) -> Values:
    n = rng.choice([3, 9, 30, 45, 60])
    rows = rng.choice([1, 1, 1, 2, 3])
    padding = [rng.choice([0, 0, 1, n // 3]) for _ in range(rows)]
    if rng.random() < 0.5:
        padding = [0] * rows
    return _life(
        rng, policy=rng.choice(POLICIES), padding=padding, cuts=_cuts(rng, n), trip=_trip(rng), **_text(rng, n)
    )


def _turn(rng: Random) -> Values:
    n = rng.choice([2, 3, 7, 12, 25])
    padding = [rng.randrange(n) for _ in range(3)] if rng.random() < 0.2 else [0, 0, 0]
    other = rng.choice(POLICIES) if rng.random() < 0.15 else None
    return _life(rng, padding=padding, cuts=_cuts(rng, n), other=other, trip=_trip(rng), **_text(rng, n))


def _steps(rng: Random) -> Values:
    other = rng.choice(POLICIES) if rng.random() < 0.1 else None
    return _life(rng, other=other, trip=_trip(rng), **_text(rng, rng.choice([1, 1, 3, 9])))


def _wrong(rng: Random) -> Values:
    how, reading = rng.choice(WRONG), rng.random() < 0.2
    return _life(rng, how=how, reading=reading, **_text(rng, rng.choice([1, 1, 3])))


def _rows(rng: Random) -> Values:
    return _life(rng, how=rng.choice(["reorder", "repeat", "select"]), order=[rng.randrange(4) for _ in range(4)])


def _keep(rng: Random) -> Values:
    granularity = rng.choice(["model", "layer", "head"])
    return _life(
        rng, granularity=granularity, share=rng.choice([0.3, 0.7, 1.0]), unstored=rng.random() < 0.4,
        seed=rng.randrange(1000), trip=_trip(rng),
    )


def _fault(rng: Random) -> list[Any] | None:
    """A full disk with so many bytes for a file; or the call of a number that fails, or does half of what it should."""
    kind, at = rng.choice(["well"] * 5 + ["full", "error", "short"]), rng.randrange(1, 50)
    if kind == "error":
        return ["error", rng.choice([errno.EIO, errno.ENOSPC, errno.EROFS]), at]
    return {"well": None, "full": ["full", rng.choice([0, 0, 512, 4096])], "short": ["short", at % 12 + 1]}[kind]


def _chunk(rng: Random, **values: Any) -> Values:
    return {"tenant": rng.randrange(2), "text": rng.randrange(TEXTS), **values}


def _damage(rng: Random) -> Values:
    how = rng.choice(["flip", "flip", "cut", "other", "crafted"])
    return {"which": rng.randrange(99), "how": how, "at": rng.random()}


KINDS: dict[str, tuple[int, Callable[[Random], Values]]] = {
    "begin": (10, _begin),
    "turn": (16, _turn),
    "steps": (16, _steps),
    "reading": (7, lambda rng: _life(rng, trip=_trip(rng), **_text(rng, rng.choice([1, 2, 6])))),
    "outside": (4, lambda rng: _life(rng, **_text(rng, rng.choice([1, 4])))),
    "wrong": (6, _wrong),
    "rows": (6, _rows),
    "crop": (5, lambda rng: _life(rng, n=rng.choice([0, 1, 3, 20]))),
    "save": (5, lambda rng: _life(rng, fault=_fault(rng))),
    "fork": (4, lambda rng: _life(rng, to=rng.randrange(LIVES), deep=rng.random() < 0.5)),
    "keep": (5, _keep),
    "splice": (6, lambda rng: _life(rng, chunks=[[rng.randrange(2), rng.randrange(TEXTS)]] * rng.choice([1, 1, 2]))),
    "put": (12, lambda rng: _chunk(rng, fault=_fault(rng))),
    "get": (6, lambda rng: {"which": rng.randrange(99), "fault": _fault(rng)}),
    "damage": (8, _damage),
    "reopen": (4, lambda rng: {"fault": _fault(rng)}),
    "verify": (5, lambda rng: {"fault": _fault(rng)}),
    "forget": (4, lambda rng: {"tenant": rng.randrange(2), "fault": _fault(rng)}),
    "gc": (2, lambda rng: {"fault": _fault(rng)}),
}
"""Weight and arguments by kind."""
OF_CACHES = {"begin", "turn", "steps", "reading", "outside", "wrong", "rows", "crop", "save", "fork", "keep"}
