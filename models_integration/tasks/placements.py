"""Where the question stands relative to the compaction, as data; `kvspec compare` carries it out.

Every placement reads the same tokens: the prompt without its dropped slots, followed by the fed tokens, is
always the context followed by the question.
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
        protected: tokens at the end of the prompt that belong to the recent window whatever its size.
        dropped_slots: slots removed from the end of the compacted cache before anything is fed.
        fed_ids: tokens then read through the compacted cache; the answer starts after the last of them.
        first_token_from_prefill: the first answer token is read from the prompt's own forward, before
            compaction, instead of from the fed tokens.
        statement: what a result in this placement must say.
    """

    name: str
    prompt_ids: tuple[int, ...]
    protected: int
    dropped_slots: int
    fed_ids: tuple[int, ...]
    first_token_from_prefill: bool
    statement: str


def _after(sample: Sample) -> Placement:
    return Placement(
        name="after",
        prompt_ids=sample.context_ids,
        protected=0,
        dropped_slots=0,
        fed_ids=sample.question_ids,
        first_token_from_prefill=False,
        statement="the context was compacted, then the question was read uncompressed beside the budget",
    )


def _in_prompt(sample: Sample) -> Placement:
    return Placement(
        name="in_prompt",
        prompt_ids=sample.context_ids + sample.question_ids,
        protected=len(sample.question_ids),
        dropped_slots=1,
        fed_ids=sample.question_ids[-1:],
        first_token_from_prefill=False,
        statement="the question stood in the protected window and its earlier tokens have read evicted keys; "
        "only the last one was read again through the compacted cache",
    )


def _paper(sample: Sample) -> Placement:
    return Placement(
        name="paper",
        prompt_ids=sample.context_ids + sample.question_ids,
        protected=len(sample.question_ids),
        dropped_slots=0,
        fed_ids=(),
        first_token_from_prefill=True,
        statement="the first answer token came from the uncompacted prefill",
    )


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
