"""One fact in one of three kinds of text: old prose, records full of names and numbers, and Python source."""

import sysconfig
import tomllib
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from models_integration.tasks.assembly import Anchor, FactTemplate, TaskTokenizer, decode, encode, joiner
from models_integration.tasks.context import Ground, unprotected
from models_integration.tasks.metrics import CONTAINS
from models_integration.tasks.prose import Prose, weave
from models_integration.tasks.samples import DEV, Sample, generator, part_of
from spec.errors import SpecError
from spec.parameters import PAPER
from spec.validate import check_choices

__all__ = ["DEV_SHARE", "TEXTS", "fact_samples", "most_contexts"]

TEXTS = ("prose", "records", "code", "records", "code")
"""The kind of text of a context, by its index."""
DEV_SHARE = 5
"""The first of so many equal stretches of every text is for dev samples, the rest for confirming ones."""
_ASSETS = tomllib.loads((Path(__file__).parent / "assets" / "facts.toml").read_text(encoding="utf-8"))
FACTS = tuple(
    FactTemplate(about, f"The {about} is {{value}}.", f"What is the {about}?", "", tuple(keys))
    for about, keys in ((fact["fact"], fact["keys"]) for fact in _ASSETS["facts"])
)
WORDS: tuple[str, ...] = tuple(_ASSETS["words"].split())
_RECORDS = _ASSETS["records"]
_NOT_SOURCE = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
_ATTEMPTS = 500
_LETTERS_OF_A_TOKEN = 8
"""A source file is long enough for a window if it has so many letters for each token."""


def fact_samples(
    ground: Ground, length: int, index: int, seed: int, *, value: str = "number",
) -> tuple[Sample, ...]:
    """One sample: a fact at a random depth of a window that no other sample of this task reads.

    The start of the answer is given, up to the value. The fact is never in the sinks or the recent window, and its
    value is nowhere else. Dev and confirming samples read different stretches of each text.

    Args:
        ground: tokenizer, running text and frame.
        length: context tokens, the frame's opening included and the question excluded.
        index: of the sample. It decides the kind of text; see TEXTS.
        seed: of all samples.
        value: what the fact states: "number", four digits, or "word".

    Raises:
        SpecError: for an unknown value, a negative index or seed, and a length that is too short.
    """
    check_choices("value", (value,), ("number", "word"))
    kind, turn = TEXTS[index % len(TEXTS)], index // len(TEXTS) * TEXTS.count(TEXTS[index % len(TEXTS)])
    turn += TEXTS[: index % len(TEXTS)].count(kind)
    text, window, dev = _window(ground, kind, length, turn, seed)
    for attempt in range(_ATTEMPTS):  # the digest of a context decides its part, which the stretch of the text does too
        sample = _sample(ground, text, window, length, ground.rng(length, index, seed, attempt), kind, value)
        free = all(unprotected(span, length) for span in sample.evidence)
        alone = decode(ground.tokenizer, sample.context_ids).count(sample.expected) == 1
        if free and alone and (part_of(sample.context_digest) == DEV) is dev:
            return (sample,)
    raise SpecError("length", length, "is too short for a fact outside sinks and recent window")



def most_contexts(prose: Prose, length: int) -> int:
    """How many contexts of so many tokens have no window in common."""
    return len(TEXTS) * min(
        windows // TEXTS.count(kind) for kind, windows in
        (("prose", prose.windows(length)), ("code", len(_sources(length))))
    )


def _sample(
    ground: Ground, text: Prose, window: int, length: int, rng: np.random.Generator, kind: str, values: str,
) -> Sample:
    template = FACTS[int(rng.integers(len(FACTS)))]
    key = template.other_keys[int(rng.integers(len(template.other_keys)))]
    value = str(rng.integers(1000, 10000)) if values == "number" else str(rng.choice(WORDS))
    depth = float(rng.random())
    anchor = Anchor(template.state(value, key), depth * max(0.0, 1 - PAPER.W_recent / length))
    woven = weave(ground.tokenizer, text, window, ground.frame.opening, [anchor], length)
    begun = template.state(value, key).partition(f" {value}")[0]
    question = f"{joiner(ground.tokenizer)}Question: {template.ask(key)}"
    return ground.sample(
        woven.ids, question, begun, value, woven.spans, gap=" Answer: ", task="fact", metric=CONTAINS, metadata={
            "template": template.name, "depth": depth, "value": value, "text": kind,
        },
    )


def _window(ground: Ground, kind: str, length: int, turn: int, seed: int) -> tuple[Prose, int, bool]:
    """The text of window number `turn` of a kind, the place of the window in it, and whether it is for dev samples."""
    if kind == "records":
        return _records(ground.tokenizer, length, (seed, length, turn)), 0, turn % DEV_SHARE == 0
    places = range(ground.prose.windows(length)) if kind == "prose" else range(len(_sources(length)))
    place = int(generator((seed, length)).permutation(len(places))[turn % len(places)])
    dev = place * DEV_SHARE < len(places)
    if kind == "prose":
        return ground.prose, place, dev
    return _code(ground.tokenizer, _sources(length)[place]), 0, dev


def _records(tokenizer: TaskTokenizer, length: int, seed: tuple[int, ...]) -> Prose:
    """Sentences of the grammar of records, for one window."""
    rng, lines, left = generator(seed), list[tuple[int, ...]](), length
    while left > 0:
        lines.append(encode(tokenizer, joiner(tokenizer) + _record(rng)))
        left -= len(lines[-1])
    return _text("records", lines)


def _record(rng: np.random.Generator) -> str:
    """One sentence: a form whose slots are drawn one by one."""
    numbers = {"day": (1, 29), "year": (1750, 1900), "count": (100, 10000), "few": (2, 100)}
    pieces = str(rng.choice(_RECORDS["forms"])).split("{")
    found = pieces[0]
    for piece in pieces[1:]:
        slot, rest = piece.split("}")
        drawn = rng.integers(*numbers[slot]) if slot in numbers else rng.choice(_RECORDS["slots"][slot])
        found += f"{drawn}{rest}"
    return found


@lru_cache
def _sources(length: int) -> list[Path]:
    """Files of Python's standard library, by name, that are long enough for a window."""
    home = Path(sysconfig.get_path("stdlib"))
    files = (path for path in sorted(home.rglob("*.py")) if not _NOT_SOURCE & set(path.relative_to(home).parts))
    return [path for path in files if path.stat().st_size >= _LETTERS_OF_A_TOKEN * length]


def _code(tokenizer: TaskTokenizer, path: Path) -> Prose:
    """The beginning of a source file, comments and documentation included."""
    return _text("code", [encode(tokenizer, f"{line}\n") for line in path.read_text("utf-8").splitlines()])


def _text(name: str, lines: list[tuple[int, ...]]) -> Prose:
    return Prose(name, tuple(chain.from_iterable(lines)), tuple(accumulate(map(len, lines))))
