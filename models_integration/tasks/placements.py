"""When the question is read, before the compaction or after it, as data; `kvspec compare` carries it out.

Every placement reads the same tokens: the prompt without its dropped slots, followed by the fed tokens, is
always the context followed by the question.

- `after`: the context is compacted, then the question is read uncompressed beside the budget.
- `in_prompt`: the question stands in the prompt, in the protected window, and its earlier tokens have read evicted
  keys; only the last one is read again through the compacted cache.
- `paper`: the question stands in the prompt, and the first answer token comes from the uncompacted prefill.
"""

from dataclasses import dataclass

from models_integration.tasks.samples import Sample
from spec.errors import SpecError

__all__ = ["DEFAULT_PLACEMENT", "PLACEMENTS", "Placement", "place"]


@dataclass(frozen=True)
class Placement:
    """How a sample is presented to a model whose cache is compacted once.

    Attributes:
        name: `after`, `in_prompt` or `paper`.
        prompt_ids: tokens of the forward that is compacted.
        dropped_slots: slots removed from the end of the compacted cache before anything is fed.
        fed_ids: tokens then read through the compacted cache; the answer starts after the last of them. Where there are
            none, its first token is read from the prompt's own forward.
    """

    name: str
    prompt_ids: tuple[int, ...]
    dropped_slots: int
    fed_ids: tuple[int, ...]


def _after(sample: Sample) -> Placement:
    return Placement("after", sample.context_ids, 0, sample.question_ids)


def _in_prompt(sample: Sample) -> Placement:
    return Placement("in_prompt", sample.context_ids + sample.question_ids, 1, sample.question_ids[-1:])


def _paper(sample: Sample) -> Placement:
    return Placement("paper", sample.context_ids + sample.question_ids, 0, ())


_MAKERS = {"after": _after, "in_prompt": _in_prompt, "paper": _paper}
PLACEMENTS = tuple(_MAKERS)
DEFAULT_PLACEMENT = "after"


def place(sample: Sample, name: str = DEFAULT_PLACEMENT) -> Placement:
    """The sample in the placement of that name.

    Raises:
        SpecError: for an unknown name.
    """
    if name not in _MAKERS:
        raise SpecError("placement", name, f"must be one of {', '.join(PLACEMENTS)}")
    return _MAKERS[name](sample)
