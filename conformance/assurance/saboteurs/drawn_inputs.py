"""Random inputs of items that no prefill, no step and no policy calls, written as the vectors are."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from reference.injection.quantisers import ARMS, SCHEMES
from reference.injection.splicing import ARMS as BASELINE_ARMS
from reference.injection.wrappers import FORMS, Marker

__all__ = ["DRAWN", "drawn_inputs"]

Inputs: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[[np.random.Generator], Inputs]

THETA = [1.0, 0.5, 0.25, 0.125, 0.1, 0.01]
WORDS = sorted({
    part.text if isinstance(part, Marker) else part for form in FORMS.values() for part in (*form.prefix, *form.suffix)
})


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer of [low, high]."""
    return int(rng.integers(low, high + 1))


def memory(rng: np.random.Generator) -> Inputs:
    return {
        "L": between(rng, 1, 80), "H_kv": between(rng, 1, 8), "d": 64 * between(rng, 1, 2), "n": between(rng, 1, 16383),
        "batch": int(rng.choice([1, 1, 2, 4])), "b": int(rng.choice([1, 2, 4])),
    }


def full_layers(rng: np.random.Generator) -> Inputs:
    """Every layer has full attention in half of the models."""
    every = int(rng.choice([1, 2]))
    L = between(rng, 1, 40)
    return {"full_layers": list(range(every - 1, every * L, every)), "i": between(rng, -L, L - 1)}


def renewal(rng: np.random.Generator) -> Inputs:
    return {
        "D": rng.random(5).tolist(), "active": (rng.random(5) < 0.8).tolist(),
        "renewal": float(rng.choice([0.3, 0.5, 0.0])),
    }


def pyramid(rng: np.random.Generator) -> Inputs:
    """A quarter of the prompts are shorter than twice the capacity."""
    return {
        "capacity": between(rng, 9, 299), "W": 8, "L": between(rng, 2, 80), "n": between(rng, 1, 1199), "beta": 20,
    }


def wins(rng: np.random.Generator) -> Inputs:
    return {
        "wins": rng.integers(0, 40, between(rng, 1, 8)).tolist(), "base": between(rng, 1, 39),
        "safeguard": f"{between(rng, 0, 10)}/10",
    }


def cadences(rng: np.random.Generator) -> Inputs:
    """One step: how often, how many above the budget, tokens seen, live tokens, budget."""
    B, seen = between(rng, 1, 20), between(rng, 1, 60)
    return {"steps": [[int(rng.choice([1, 2, 5])), between(rng, 1, 4), seen, B + between(rng, 0, 6), B]]}


def targets(rng: np.random.Generator) -> Inputs:
    """Thirds, quarters or halves whose sum is whole."""
    parts = rng.integers(0, 30, between(rng, 1, 6)).tolist()
    q = between(rng, 1, 4)
    return {"targets": [f"{part}/{q}" for part in [*parts, -sum(parts) % q]]}


def kept_share(rng: np.random.Generator) -> Inputs:
    return {"r": f"{between(rng, 0, 99) / 100}", "N": between(rng, 1, 300)}


def toward_mean(rng: np.random.Generator) -> Inputs:
    n = between(rng, 2, 16)
    V = rng.standard_normal((n, 3))
    V /= np.sqrt((V * V).sum(axis=1, keepdims=True))
    return {"s": rng.random(n).tolist(), "V": V.tolist(), "B": between(rng, 1, n), "lam": 0.5}


def schedule(rng: np.random.Generator) -> Inputs:
    B = between(rng, 2, 64)
    return {"B": B, "rounds": between(rng, 2, 9), "tilt": between(rng, 1 - B, B - 1)}


def identities(rng: np.random.Generator) -> Inputs:
    """Half of the calibrations are of the model at hand; the others differ in one or two ways."""
    found: Inputs = {"model": "a", "inv_freq": [1.0, 0.1], "factor": 1.25}
    other = {"served_model": "b", "served_inv_freq": [1.0, 0.2], "served_factor": 1.0}
    differs = rng.random() < 0.5
    for name, value in other.items():
        own = found[name.removeprefix("served_")]
        found[name] = value if differs and rng.random() < 0.5 else own
    return found


def shift(rng: np.random.Generator) -> Inputs:
    return {
        "n": between(rng, 1, 4), "start": int(rng.choice([0, between(rng, 1, 50), between(rng, 1, 10**6)])),
        "inverse_frequencies": THETA[: between(rng, 0, len(THETA))],
    }


def rebase(rng: np.random.Generator) -> Inputs:
    pairs = between(rng, 1, len(THETA))
    live = THETA[:pairs] if rng.random() < 0.5 else [theta / 4 for theta in THETA[:pairs]]
    return {"n": between(rng, 1, 4), "start": between(rng, 0, 50), "archived": THETA[:pairs], "live": live}


def turn(rng: np.random.Generator) -> Inputs:
    """A third of the heads are rotated in part, a third of one pair; a quarter does not move at all."""
    n, pairs = between(rng, 1, 4), between(rng, 1, 3)
    d = 2 * pairs + int(rng.choice([0, 0, 2]))
    angles = rng.standard_normal((n, pairs)) * (rng.random() < 0.75)
    return {"x": np.round(rng.standard_normal((2, n, d)), 1).tolist(), "angles": angles.tolist()}


def steps(rng: np.random.Generator) -> Inputs:
    """Some with a head of zeros."""
    x = rng.standard_normal((2, between(rng, 1, 4), 3))
    x[0] *= rng.random() < 0.75
    return {"x": x.tolist(), "scheme": str(rng.choice(list(SCHEMES))), "bits": int(rng.choice([4, 8]))}


def coded(rng: np.random.Generator) -> Inputs:
    """Half of the values are halves of a step; a few lie outside the range."""
    x = rng.integers(-20, 21, (1, 3, 2)) / 2 if rng.random() < 0.5 else rng.normal(0, 3, (1, 3, 2))
    return {"x": x.tolist(), "step": [[[1.0]]], "bits": 4}


def region(rng: np.random.Generator) -> Inputs:
    return {"arm": str(rng.choice(list(ARMS))), "layers": between(rng, 1, 40), "tokens": between(rng, 1, 30)}


def vocabulary(rng: np.random.Generator) -> Inputs:
    """Words of one or two ids; now and then one that the tokenizer does not know."""
    return {
        "texts": WORDS,
        "ids": [
            [0] if rng.random() < 0.05 else [10 + 2 * at, 11 + 2 * at][: 1 + (rng.random() < 0.2)]
            for at in range(len(WORDS))
        ],
    }


def marker(rng: np.random.Generator) -> Inputs:
    return {**vocabulary(rng), "marker": str(rng.choice(WORDS))}


def wrapped(rng: np.random.Generator) -> Inputs:
    return {
        **vocabulary(rng), "form": str(rng.choice(list(FORMS))),
        "chunk": rng.integers(100, 200, between(rng, 1, 4)).tolist(),
    }


def cut(rng: np.random.Generator) -> Inputs:
    ids = rng.integers(0, 9, between(rng, 0, 24)).tolist()
    return {"ids": ids, "ends": [0] if rng.random() < 0.75 else [], "size": between(rng, 1, 12)}


def rankings(rng: np.random.Generator) -> Inputs:
    lists = [rng.permutation(between(rng, 1, 6)).tolist() for _ in range(between(rng, 1, 3))]
    return {"rankings": lists, "k": int(rng.choice([60, 1]))}


def discordant(rng: np.random.Generator) -> Inputs:
    return {"b": between(rng, 0, 30), "c": between(rng, 0, 30)}


def share(rng: np.random.Generator) -> Inputs:
    n = between(rng, 1, 60)
    return {"correct": between(rng, 0, n), "n": n, "confidence": float(rng.choice([0.95, 0.9]))}


def resamples(rng: np.random.Generator) -> Inputs:
    n = between(rng, 1, 12)
    return {
        "differences": rng.integers(-1, 2, n).astype(np.float64).tolist(), "confidence": 0.95,
        "drawn": rng.integers(0, n, (40, n)).tolist(),
    }


def clusters(rng: np.random.Generator) -> Inputs:
    """Some of clusters of equal size."""
    m = between(rng, 1, 4)
    sizes = np.full(m, between(rng, 1, 3)) if rng.random() < 0.5 else rng.integers(1, 4, m)
    return {
        "differences": rng.integers(-1, 2, int(sizes.sum())).astype(np.float64).tolist(), "confidence": 0.95,
        "clusters": np.repeat(np.arange(m), sizes).tolist(), "drawn": rng.integers(0, m, (40, m)).tolist(),
    }


def power(rng: np.random.Generator) -> Inputs:
    discordance = between(rng, 1, 4) / 4
    return {
        "n": between(rng, 1, 20), "discordance": discordance, "difference": discordance * between(rng, 0, 2) / 2,
        "alpha": float(rng.choice([0.05, 0.25, 0.125])),
    }


def places(rng: np.random.Generator) -> Inputs:
    """Some archived with gaps, some behind a hidden preamble."""
    n = between(rng, 1, 9)
    kept = range(n) if rng.random() < 0.5 else sorted(rng.permutation(n)[: between(rng, 1, n)].tolist())
    hidden = between(rng, 0, n - 1) if rng.random() < 0.5 else 0
    return {"n": n, "hidden": hidden, "start": between(rng, 0, 50), "kept": list(kept)}


def baselines(rng: np.random.Generator) -> Inputs:
    raw = [rng.integers(50, 99, between(rng, 1, 4)).tolist() for _ in range(between(rng, 1, 3))]
    prefix = rng.integers(7, 10, between(rng, 0, 2)).tolist()
    return {
        "arm": str(rng.choice(list(BASELINE_ARMS))), "session": rng.integers(0, 9, between(rng, 1, 8)).tolist(),
        "prefix": prefix, "raw": raw, "wrapped": [[*prefix, *chunk, 8] for chunk in raw],
    }


def first_of_chunks(rng: np.random.Generator) -> Inputs:
    lengths = rng.integers(1, 7, between(rng, 1, 3)).tolist()
    return {"start": between(rng, 0, 50), "lengths": lengths, "k": between(rng, 0, 6)}


def deviating(rng: np.random.Generator) -> Inputs:
    """Small whole numbers, so that tokens deviate alike."""
    heads, n = between(rng, 1, 2), between(rng, 1, 20)
    spliced, fresh = (rng.integers(-2, 3, (heads, n, 2)).astype(np.float64).tolist() for _ in range(2))
    return {"spliced": spliced, "fresh": fresh, "start": between(rng, 0, 50), "r": between(rng, 0, 100) / 100}


def attention_rows(rng: np.random.Generator) -> Inputs:
    """Rows of eighths, many of them certain of one key."""
    weights = rng.multinomial(8 if rng.random() < 0.5 else 1, [0.25] * 4, (1, 3)).astype(np.float64)
    return {"weights": (weights / weights.sum(axis=2, keepdims=True)).tolist()}


def sinks(rng: np.random.Generator) -> Inputs:
    """Half of the caches begin at position 0 without a gap."""
    n = between(rng, 1, 9)
    gaps = rng.integers(1, 4, n) if rng.random() < 0.5 else np.ones(n, dtype=np.int64)
    weights = rng.random((1, 2, n))
    return {"weights": weights.tolist(), "positions": (np.cumsum(gaps) - 1).tolist(), "sinks": between(rng, 1, 4)}


def keys_twice(rng: np.random.Generator) -> Inputs:
    """Half were computed where they are archived."""
    n, start = between(rng, 1, 4), between(rng, 1, 50) * (rng.random() < 0.5)
    archived, fresh = (rng.standard_normal((1, n, 5)).tolist() for _ in range(2))
    return {
        "archived": archived, "fresh": fresh, "positions": [list(range(n)), [int(start) + at for at in range(n)]],
        "inverse_frequencies": THETA[:2], "style": str(rng.choice(["half_split", "interleaved"])),
    }


def depths(rng: np.random.Generator) -> Inputs:
    return {"depth": between(rng, 1, 60)}


DRAWN: Mapping[str, Draw] = {
    "CC-MEMORY": memory, "CC-OBSERVED-LAYER": full_layers, "CC-RENEWAL": renewal, "PO-PYRAMID-OFFICIAL": pyramid,
    "PO-ADAKV-OFFICIAL": wins, "PO-WHOLE-SHARES": targets, "PO-STEP": cadences, "NK-TOKENS": kept_share,
    "DV-VARIANT-B": toward_mean, "DV-SCHEDULE": schedule, "TA-CALIBRATION": identities, "IN-SHIFT-ANGLES": shift,
    "IN-REBASE-ANGLES": rebase,
    "IN-HALF-SPLIT": turn, "IN-INTERLEAVED": turn, "IN-SCALE": steps, "IN-CODES": coded, "IN-ARMS": region,
    "IN-MARKER": marker, "IN-WRAP": wrapped, "IN-SLICES": cut, "IN-FUSE": rankings, "IN-MCNEMAR": discordant,
    "IN-WILSON": share, "IN-BOOTSTRAP": resamples, "IN-CLUSTER-BOOTSTRAP": clusters, "IN-POWER": power,
    "IN-PLACES": places, "IN-BASELINES": baselines, "IN-LEGOLINK": first_of_chunks, "IN-CACHEBLEND": deviating,
    "IN-ENTROPY": attention_rows, "IN-SINK-MASS": sinks, "IN-KEY-COSINE": keys_twice, "IN-BANDS": depths,
}


def drawn_inputs(item: str, number: int) -> list[Inputs]:
    """The item's inputs, the same on every run."""
    rng = np.random.default_rng(2024)
    return [DRAWN[item](rng) for _ in range(number)]
