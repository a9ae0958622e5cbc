"""The operations of injection on the reference."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from conformance.vectors.codec import floats, integers, named
from conformance.vectors.files import Json
from reference import statistics
from reference.injection import diagnostics, fusion, quantisers, splicing, wrappers
from reference.statistics import Interval

__all__ = ["INJECTION_ITEMS", "cosines", "vocabulary"]


def vocabulary(words: Mapping[str, Sequence[int]]) -> wrappers.Vocabulary:
    """A tokenizer that knows whole texts; id 0 is its unknown token."""
    texts = {tuple(ids): text for text, ids in words.items() if 0 not in ids}
    return wrappers.Vocabulary(lambda text: words[text], lambda ids: texts.get(tuple(ids), "<unk>"))


def words(i: Json) -> wrappers.Vocabulary:
    return vocabulary(dict(zip(i["texts"], i["ids"], strict=True)))


def wrapped(i: Json) -> Mapping[str, object]:
    found = wrappers.wrap(wrappers.FORMS[i["form"]], i["chunk"], words(i))
    return {**vars(found), "ids": list(found.ids), "markers": list(found.markers)}


def region(i: Json) -> Mapping[str, object]:
    found = quantisers.quantised_region(quantisers.ARMS[i["arm"]], i["layers"], i["tokens"])
    return {name: [run.start, run.stop] for name, run in zip(("layers", "tokens"), found, strict=True)}


def fused(i: Json) -> Mapping[str, object]:
    order = fusion.fused([[str(name) for name in ranking] for ranking in i["rankings"]], i["k"])
    return {"order": [int(name) for name, _ in order], "scores": [score for _, score in order]}


def cosines(i: Json) -> tuple[Any, Any]:
    at = (integers(i["positions"][0]), integers(i["positions"][1]))
    theta = floats(i["inverse_frequencies"])
    return diagnostics.key_cosine(floats(i["archived"]), floats(i["fresh"]), at, theta, i["style"])


def resampled(found: Interval) -> Mapping[str, object]:
    return {"interval": [found.low, found.high], "positive": found.positive}


INJECTION_ITEMS: dict[str, Callable[[Json], Mapping[str, object]]] = {
    "IN-SCALE": lambda i: {"step": quantisers.scale(floats(i["x"]), quantisers.SCHEMES[i["scheme"]], i["bits"])},
    "IN-ARMS": region,
    "IN-MARKER": lambda i: {"id": wrappers.marker_id(wrappers.Marker(i["marker"]), words(i))},
    "IN-WRAP": wrapped,
    "IN-SLICES": lambda i: {
        "chunks": [list(chunk) for chunk in wrappers.slices(i["ids"], frozenset(i["ends"]), i["size"])]
    },
    "IN-FUSE": fused,
    "IN-WILSON": lambda i: {"interval": list(statistics.wilson(i["correct"], i["n"], i["confidence"]))},
    "IN-BOOTSTRAP": lambda i: resampled(
        statistics.bootstrap(floats(i["differences"]), integers(i["drawn"]), i["confidence"])
    ),
    "IN-CLUSTER-BOOTSTRAP": lambda i: resampled(statistics.cluster_bootstrap(
        floats(i["differences"]), integers(i["clusters"]), integers(i["drawn"]), i["confidence"]
    )),
    "IN-BASELINES": lambda i: {
        name: list(value) if isinstance(value, tuple) else value for name, value in vars(splicing.held(**i)).items()
    },
    "IN-KEY-COSINE": lambda i: named(["raw", "unrotated"], cosines(i)),
    "IN-BANDS": lambda i: {name: list(band) for name, band in diagnostics.bands(i["depth"]).items()},
}
