"""One fact, or several that are told apart by their key, in running text; one of them is asked for."""

from models_integration.tasks.assembly import Anchor, joiner
from models_integration.tasks.context import STRATA, Ground, check_unprotected
from models_integration.tasks.prose import weave
from models_integration.tasks.samples import Sample, distractor_anchors, draw_value
from models_integration.tasks.sentences import ALL_VALUES, NEEDLE_TEMPLATES
from spec.errors import SpecError
from spec.parameters import PAPER

__all__ = ["keys_in_prose_samples"]


def keys_in_prose_samples(
    ground: Ground, length: int, index: int, seed: int, *, keys: int = 1, depth: float | None = None,
) -> tuple[Sample, ...]:
    """Sample number `index`: with one key a needle, with more of them the other facts are in its way.

    The answer's opening is given, up to the value. The fact that is asked for never lies in the sinks or in the recent
    window, which every policy keeps; the others stand anywhere.

    Args:
        ground: tokenizer, running text and frame.
        length: context tokens, the frame's opening included and the question excluded.
        index: which sample; depths and windows of the text take turns over it.
        seed: of all samples.
        keys: facts of one form, at least 1.
        depth: of the fact that is asked for, as a share of what precedes the recent window; None: STRATA take turns.

    Raises:
        SpecError: for a depth outside [0, 1], fewer than one key or more than the form has, and a length that holds no
            such context.
    """
    if depth is not None and not 0 <= depth <= 1:
        raise SpecError("depth", depth, "must lie in [0, 1]")
    if keys < 1:
        raise SpecError("keys", keys, "must be at least 1")
    window = ground.prose.window(length, index, seed)
    rng = ground.rng(length, index, seed, keys)
    template = NEEDLE_TEMPLATES[int(rng.integers(len(NEEDLE_TEMPLATES)))]
    value = draw_value(rng, ALL_VALUES)
    depth = STRATA[index % len(STRATA)] if depth is None else float(depth)
    anchors = [Anchor(template.state(value), depth * max(0.0, 1 - PAPER.W_recent / length))]
    anchors += distractor_anchors(rng, template, keys - 1, value, ALL_VALUES)
    text = weave(ground.tokenizer, ground.prose, window, ground.frame.opening, anchors, length)
    return (check_unprotected(ground.sample(
        text.ids, f"{joiner(ground.tokenizer)}Question: {template.ask()}", template.state("").removesuffix(" ."),
        str(value), text.spans[:1], gap=" Answer: ", task="needle_in_prose" if keys == 1 else f"keys_in_prose_{keys}",
        distractors=text.spans[1:],
        metadata={"template": template.name, "depth": depth, "value": value, "keys": keys, "window": window},
    )),)
