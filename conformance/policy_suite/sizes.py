"""Fixed inputs with which a method is compared, and a description of their sizes for a certificate."""

from collections.abc import Iterable, Sequence

from conformance.engine.methods import DECODED
from conformance.methods.method import Method, method_of
from conformance.plugin import EXAMPLES
from conformance.strategies.model_shapes import FAR, LONG, MANY_LAYERS, SHAPES, Shape
from conformance.strategies.policy_inputs import drawn


def compared_shapes(method: Method, examples: int, shapes: Sequence[Shape] = SHAPES) -> list[Shape]:
    """Return the shapes that the brute force evaluates in seconds, in a run with so many random examples.

    A quick run has no input with the tokens of LONG or the layers of MANY_LAYERS. A shape with more decode steps than
    usual is for methods that evict while decoding.
    """
    if examples <= EXAMPLES["few"]:
        shapes = [one for one in shapes if one.tokens < LONG.tokens and one.layers < MANY_LAYERS.layers]
    usual = Shape._field_defaults["steps"]
    return [one for one in shapes if one.tokens <= method.longest and (method.decodes or one.steps <= usual)]


def extent(methods: Iterable[str], engine: bool, examples: int) -> str:
    """Return the longest prompt, the largest number of layers, and whether decoding is compared, by method.

    An engine receives decoded tokens for the methods in DECODED.
    """
    phrases = []
    for method in map(method_of, methods):
        shapes = compared_shapes(method, examples)
        tokens, layers = (max(getattr(shape, name) for shape in shapes) for name in ("tokens", "layers"))
        words = f"{method.name}: prompts of up to {tokens:,} tokens"
        if method.longest < FAR.tokens:
            words += f" (its equation is too slow for {FAR.tokens:,})"
        phrases.append(f"{words}, up to {layers} layers, decoding {_decoding(method, shapes, engine)}")
    return "; ".join(phrases)


def _decoding(method: Method, shapes: Sequence[Shape], engine: bool) -> str:
    """Return how many decode steps are compared, or why none is."""
    if method.reference(drawn(0)).cadence.every is None or method.given.get("decode") == "never":
        return "does not evict"
    if engine and method.name not in DECODED:
        return "not compared (the protocol sends no decoded tokens)"
    if not method.decodes:
        return "not compared (no oracle computes the steps of these parts)"
    return f"compared for up to {max(shape.steps for shape in shapes)} steps"
