"""Which queries of the pocket model read a needle: `python -m conformance.measure.benchmarks.needle_readers`.

Prints two tables: the attention on the needle's tokens of the question's queries and of the answer's, and how often
policies answer when the answer's opening, whose last query reads the value, stands in the prompt.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from models_integration.studies.evidence.controls import FULL
from models_integration.studies.evidence.kept import read_prompt
from models_integration.studies.evidence.measure import measure
from models_integration.studies.subject import Loading, Subject
from models_integration.tasks import Placement, Sample, draw_sample, place
from models_integration.tasks.assembly import encode

__all__ = ["answers_of", "main", "masses", "opened"]

LENGTH, SEED, SAMPLES, B = 1024, 42, 20, 308
POLICIES = ("snapkv", "adakv", "pyramidkv", "chunkkv", "rkv", "caote", "tova", "h2o")


def opened(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Placement:
    """Context, question and the answer's opening, "The special magic number is": what comes next is the value."""
    start, stop = sample.needle
    words = [str(tokenizer.decode([token])).strip() for token in sample.context_ids[start:stop]]
    (first,) = tokenizer.encode(" The", add_special_tokens=False)
    opening = (first, *sample.context_ids[start + 1 : start + words.index("is") + 1])
    ids = (*sample.context_ids, *sample.question_ids, *opening)
    return Placement("paper", ids, 0, ())


@torch.no_grad()
def masses(subject: Subject, sample: Sample) -> tuple[list[float], list[float]]:
    """Per layer the largest attention that a head's query gives to the needle: of the question's, of the answer's."""
    model, placement = subject.model, place(sample, "in_prompt")
    (cell,) = measure(subject, sample, read_prompt(subject, {}, (), placement), [(FULL, "1.0")], 1)["cells"]
    answer = encode(subject.tokenizer, cell["answer"])
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*placement.prompt_ids, *answer]])
    layers = model(input_ids=ids, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    n, asked = len(placement.prompt_ids), len(sample.question_ids)
    on_needle = [A[0, :, :, slice(*sample.needle)].sum(dim=-1) for A in layers]
    question = [float(A[:, n - asked : n].max()) for A in on_needle]
    return question, [float(A[:, n : n + len(answer) - 1].max()) for A in on_needle]


def answers_of(subject: Subject, samples: int) -> Counter[str]:
    """Samples that each policy answers with the opening in its prompt, at B tokens."""
    right, methods = Counter[str](), {name: subject.policy(name, B).on(subject.model) for name in POLICIES}
    for index in range(samples):
        sample = draw_sample("needle", subject.tokenizer, LENGTH, index, SEED)
        prompt = read_prompt(subject, methods, [str(B)], opened(sample, subject.tokenizer))
        for cell in measure(subject, sample, prompt, [(name, str(B)) for name in POLICIES], len(POLICIES))["cells"]:
            right[cell["policy"]] += cell["right"] == 1
    return right


def lines() -> Iterator[str]:
    subject = Loading().subject()
    found = [masses(subject, draw_sample("needle", subject.tokenizer, LENGTH, at, SEED)) for at in range(SAMPLES)]
    yield "| layer | question's queries | answer's queries |"
    yield "| --- | --- | --- |"
    for layer in range(len(found[0][0])):
        question, written = (sorted(one[part][layer] for one in found) for part in (0, 1))
        yield f"| {layer} | {_range(question)} | {_range(written)} |"
    yield ""
    yield f"| policy | right of {SAMPLES}, the answer's opening in the prompt, B = {B} |"
    yield "| --- | --- |"
    right = answers_of(subject, SAMPLES)
    for name in POLICIES:
        yield f"| {name} | {right[name]} |"


def _range(values: list[float]) -> str:
    return f"{values[len(values) // 2]:.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def main() -> None:
    """Print the tables; some minutes."""
    for line in lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
