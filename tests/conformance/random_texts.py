"""Random texts of policies that are accepted, with constants that suit short inputs."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random

from conformance.methods import brutes
from conformance.strategies.policy_inputs import Inputs, drawn, model_constants
from reference.policies.names import POLICIES, check_name, make_policy
from spec.errors import SpecError

HOSTS = tuple(brute.name for brute in brutes() if brute.parts is not None)
"""Policies whose scorer the oracle of compositions combines with different parts."""
SMALL: Mapping[str, Sequence[str]] = {
    "W": ("2", "3", "5"), "kernel": ("1", "3"), "c": ("3", "4"), "lag": ("4",), "window": ("4",), "N_future": ("5",),
    "N_sink": ("1", "2"), "N_recent": ("1", "3"), "chunk": ("5", "9"), "overlap": ("2",), "pin_prompt": ("1",),
    "every": ("3", "5"), "safeguard": ("0.5", "1of3"), "beta": ("3", "4"), "share": ("0.5",), "block": ("3",),
    "anchor": ("mean", "alternating"), "lam": ("0.3",),
}
"""Constants of scorers, for inputs of about 24 tokens."""
TABLE = "table"
"""Rule of budgets that needs as many layers as the text has weights: 3."""
_NUMBERS, _SHARES = ("0", "1", "2", "4", "7"), ("0", "0.2", "1of3", "0.5", "1")
PARTS: Mapping[str, Sequence[str]] = {
    "sink": _NUMBERS, "recent": _NUMBERS, "select": ("top", "half"),
    "layers": (
        "even", "full", "global", "preference", "pyramid", "pyramid:beta=1", "pyramid:beta=4", f"{TABLE}:shares=3_0_1",
    ),
    "heads": ("even", *(f"{rule}:safeguard={share}" for rule in ("adaptive", "quota") for share in _SHARES)),
    "threshold": ("0.01", "0.2", "-1.0"), "every": ("none", "1", "2", "3", "1:excess=3"),
    "steps": ("h2o", "tova", "keydiff", "knorm", "rkv:W=2:kernel=1", "snapkv:W=3:kernel=3", "morphkv:W=2"),
    "sets": ("model", "layer", "head"), "floor": ("none", "0", "9", "14"), "values": ("0", "2", "4"),
    "critical": _SHARES,
    "crush": ("0.5:block=3", "0.25:block=4:anchor=mean", "1:block=2:anchor=zeros"),
    "diverse": tuple(f"{lam}:signature={mode}:rule={rule}" for lam in ("0", "0.3", "2.0")
                     for mode in ("flat", "layer", "head") for rule in ("alpha", "variant_b")),
    "block": ("1", "3", "4"), "chunks": ("3", "4:gate=1", "5:gate=2"), "pieces": ("6", "7", "12", "24"),
}
"""Values of each part."""
ODD = ("x", "-1", "0", "1e9", "nan", "-inf", "1of0", "none", "1_2", "99999999", "99999999999999999999", "snapkv")
"""Values that most parts refuse."""
REPLACED = {
    "every": ("every",), "beta": ("layers", "threshold"), "safeguard": ("heads", "threshold"), "share": ("crush",),
    "block": ("crush",), "anchor": ("crush",),
}
"""Parts that replace a constant of the named policy. A text with both is refused."""
MOST_PARTS = 4


def policy_texts(seed: int, inputs: Inputs | None = None) -> Iterator[str]:
    """Yield random texts that are accepted. Each host is drawn about as often as each other host."""
    rng, known = Random(seed), drawn(4, 24, 2, (2, 2)) if inputs is None else inputs
    while True:
        order = list(HOSTS)
        rng.shuffle(order)
        for host in order:
            while not accepted(text := _text(rng, host), known):
                pass
            yield text


def _text(rng: Random, host: str) -> str:
    """Return a random text, accepted or not."""
    options = {key: rng.choice(SMALL[key]) for key in sorted(SMALL.keys() & POLICIES[host].constants)}
    names = sorted(rng.sample(list(PARTS), rng.randint(1, MOST_PARTS)), key=list(PARTS).index)
    if "steps" in names and "every" not in names:
        names.append("every")
    start, parts = rng.choice(("", "score=")), [f"{name}={rng.choice(PARTS[name])}" for name in names]
    stay = {key: value for key, value in options.items()
            if (_scored(host, key) if start else not {*REPLACED.get(key, ())} & {*names})}
    return "/".join([start + host + "".join(f":{key}={value}" for key, value in stay.items()), *parts])


@cache
def _scored(host: str, constant: str) -> bool:
    """Return True if the scorer of a policy uses a constant. If not, a text with `score=` and the constant is refused.
    """
    texts = [f"score={host}:{constant}={value}" for value in SMALL[constant]]
    return any(accepted(text, drawn(4, 24, 2, (2, 2))) for text in texts)


def any_text(rng: Random) -> str:
    """Return the text of any policy with up to four parts. A third of the values is odd, so most texts are refused."""
    host = rng.choice(sorted(POLICIES))
    options = [f":{key}={rng.choice(ODD)}" for key in sorted(POLICIES[host].constants) if rng.random() < 0.1]
    parts = [f"{name}={rng.choice(ODD if rng.random() < 0.3 else PARTS[name])}"
             for name in rng.sample(list(PARTS), rng.randint(0, MOST_PARTS))]
    return "/".join([rng.choice(("", "score=")) + host + "".join(options), *parts])


def accepted(text: str, inputs: Inputs) -> bool:
    """Return True if kvspec makes a policy from the text."""
    try:
        make_policy(check_name(text), model_constants(text, inputs))
    except SpecError:
        return False
    return True
