"""A fact early in running text that keeps mentioning its topic: delayed association for any tokenizer."""

from models_integration.tasks.assembly import Anchor, joiner
from models_integration.tasks.context import Ground, check_unprotected
from models_integration.tasks.prose import weave
from models_integration.tasks.samples import DENSITIES, Sample, draw_value, mentions_of, spaced
from models_integration.tasks.sentences import ALL_VALUES, FRAMING_SENTENCE, TOPIC_TEMPLATES

__all__ = ["delayed_in_prose_samples"]


def delayed_in_prose_samples(
    ground: Ground, length: int, index: int, seed: int, *, density: str = "",
) -> tuple[Sample, ...]:
    """One sample: the fact behind the text's first line and the framing sentence, mentions in equal distances.

    Topics, mentions and densities are Appendix B.1's; without one given, densities take turns over the index. The
    answer's opening is given, up to the value.

    Raises:
        SpecError: for an unknown density, a negative index or seed, and a length that holds no such context.
    """
    rng, window = ground.rng(length, index, seed), ground.prose.window(length, index, seed)
    topic = TOPIC_TEMPLATES[int(rng.integers(len(TOPIC_TEMPLATES)))]
    density = density or DENSITIES[index % len(DENSITIES)]
    value = str(draw_value(rng, ALL_VALUES))
    fact = topic.fact.state(value)
    anchors = [Anchor(FRAMING_SENTENCE, 0.0), Anchor(fact, 0.0), *spaced(mentions_of(topic, density))]
    text = weave(ground.tokenizer, ground.prose, window, ground.frame.opening, anchors, length)
    return (check_unprotected(ground.sample(
        text.ids, f"{joiner(ground.tokenizer)}Question: {topic.fact.ask()}", fact.partition(f" {value}")[0], value,
        text.spans[1:2], gap=" Answer: ", task="delayed_association_in_prose",
        metadata={"template": topic.fact.name, "density": density, "value": int(value), "window": window},
    )),)
