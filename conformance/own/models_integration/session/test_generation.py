"""Greedy, sampled and beam generation go on from a compacted cache as from a masked one."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.own.models_integration.session.families import METHODS, Masked, build, prompt, relative

pytestmark = pytest.mark.law("eviction-equals-masking")

N, NEW = 64, 6

families = pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])


def generated(model: PreTrainedModel, **options: object) -> tuple[object, list[int]]:
    with METHODS["crystalcache"]()(model) as run:
        output = model.generate(  # type: ignore[operator]
            input_ids=prompt(N), attention_mask=torch.ones(1, N, dtype=torch.int64), max_new_tokens=NEW,
            return_dict_in_generate=True, output_logits=True, output_scores=True, **options,
        )
    assert run.kept is not None
    return output, run.kept.tolist()


def forced(model: PreTrainedModel, kept: list[int], chosen: Tensor) -> Tensor:
    """The oracle's logits of each of the chosen tokens (NEW,), given those before it, (NEW, vocabulary)."""
    oracle = Masked(model, prompt(N), kept)
    after = oracle.read(chosen[None, :-1])[0]
    return torch.cat([oracle.prompt_logits[0, -1:], after])


@families
def test_sampled_sequences_come_from_the_masked_distribution(family: str) -> None:
    model = build(family)
    torch.manual_seed(5)
    output, kept = generated(model, do_sample=True, num_return_sequences=3)
    sequences = output.sequences[:, N:]  # type: ignore[attr-defined]
    logits = torch.stack(output.logits, dim=1)  # type: ignore[attr-defined]
    assert len({tuple(row.tolist()) for row in sequences}) > 1
    for row, chosen in enumerate(sequences):
        assert relative(logits[row], forced(model, kept, chosen)) < 1e-5


@families
@pytest.mark.parametrize("returned", [1, 3])
def test_beams_are_scored_as_on_the_masked_cache(family: str, returned: int) -> None:
    model = build(family)
    output, kept = generated(
        model, do_sample=False, num_beams=4, num_return_sequences=returned, length_penalty=0.0
    )
    assert len(output.sequences) == returned  # type: ignore[attr-defined]
    for chosen, score in zip(output.sequences[:, N:], output.sequences_scores, strict=True):  # type: ignore[attr-defined]
        logs = forced(model, kept, chosen).log_softmax(-1)
        expected = logs.gather(1, chosen[:, None]).sum()
        assert abs(float(score - expected)) < 1e-4


@pytest.mark.law("the-model-stays-as-it-was")
def test_sampling_at_a_full_budget_is_sampling() -> None:
    model = build("llama")
    torch.manual_seed(7)
    plain = model.generate(  # type: ignore[operator]
        input_ids=prompt(N), max_new_tokens=NEW, do_sample=True, num_return_sequences=2
    )
    torch.manual_seed(7)
    with METHODS["fullcache"]()(model):
        ours = model.generate(  # type: ignore[operator]
            input_ids=prompt(N), max_new_tokens=NEW, do_sample=True, num_return_sequences=2
        )
    assert torch.equal(plain, ours)


@pytest.mark.law("the-model-stays-as-it-was")
def test_the_guarded_generate_keeps_its_name_and_result() -> None:
    model = build("llama")
    with METHODS["fullcache"]()(model):
        assert vars(model)["generate"].__name__ == "generate"
        assert model.generate(prompt(N), max_new_tokens=2).shape == (1, N + 2)  # type: ignore[operator]
