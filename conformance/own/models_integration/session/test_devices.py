"""Weights that accelerate keeps elsewhere, or that are nowhere; quantised projections; another default device."""

from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from conformance.own.models_integration.session.families import _GQA, METHODS, at_once, build, prompt
from conformance.own.models_integration.session.ragged_checks import method
from models_integration import RetentionPolicy, load_cache, observe, save_cache
from models_integration.model.rotation import recognise
from spec.errors import SpecError

pytestmark = pytest.mark.law("as-it-is-described")

N = 40
CPU = torch.device("cpu")


def tokens(n: int, seed: int = 3) -> Tensor:
    """Ids on the CPU, whatever the default device is."""
    with CPU:
        return prompt(n, seed)


def policy(name: str) -> RetentionPolicy:
    return METHODS[name]() if name in METHODS else method(name)


def life(model: PreTrainedModel, name: str) -> Tensor:
    """Logits of a prompt, of steps, and of a text that is only read."""
    with policy(name)(model) as run, torch.no_grad():
        logits = [model(input_ids=tokens(N)).logits]
        for token in torch.split(tokens(2, seed=9), 1, dim=1):
            logits.append(model(input_ids=token, past_key_values=run.cache).logits)
        with run.reading():
            logits.append(model(input_ids=tokens(3, seed=8), past_key_values=run.cache).logits)
    return torch.cat(logits, dim=1)


def rows(model: PreTrainedModel, path: Path) -> Tensor:
    """Logits behind a padded batch whose cache was cropped, chosen from, and saved."""
    ids, mask = torch.cat([tokens(N), tokens(N, seed=4)]), torch.ones(2, N, dtype=torch.int64, device="cpu")
    mask[0, :5] = 0
    with policy("crystalcache")(model) as run, torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
        assert run.cache is not None
        model(input_ids=ids[:, :1], past_key_values=run.cache)
    cache = run.cache
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3], device="cpu"))
    save_cache(cache, model, path)
    return at_once(model, tokens(4), load_cache(path, model))


@pytest.mark.parametrize("name", ["crystalcache", "adakv", "kvzip", "h2o"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_an_offloaded_model_is_the_model(where: str, name: str, tmp_path: Path) -> None:
    """Its parameters are on the device meta between forwards; its hooks know where it computes."""
    model, expected = build("llama"), life(build("llama"), name)
    if where == "memory":
        cpu_offload(model, execution_device=CPU)
    else:
        disk_offload(model, str(tmp_path), execution_device=CPU)
    assert next(model.parameters()).is_meta
    assert torch.equal(life(model, name), expected)
    recognise(model)


@pytest.mark.law("refused-before-anything-changes")
def test_a_model_without_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**_GQA))
    words = r"model = 'LlamaModel': its weights have no values \(device meta\): load them first"
    for name in ("crystalcache", "adakv"):
        with pytest.raises(SpecError, match=words):
            policy(name)(model)
    with pytest.raises(SpecError, match=words):
        observe(model, tokens(N))


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("how", ["offloaded", "integers", "another class of tensor"])
def test_a_projection_that_cannot_be_read_is_refused(how: str) -> None:
    class Packed(Tensor):
        """As torchao's: it can be multiplied, and nothing else."""

        def to(self, *_: object, **__: object) -> Tensor:
            raise NotImplementedError

    model = build("llama")
    if how == "offloaded":
        cpu_offload(model, execution_device=CPU)
    else:
        linear = model.get_submodule("model.layers.1.self_attn.o_proj")
        weight = torch.ones(48, 48).as_subclass(Packed) if how != "integers" else torch.ones(48, 48, dtype=torch.int8)
        linear.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(SpecError, match=r"'LlamaAttention': its output projection is quantised or offloaded"):
        method("criticalkv")(model)


@pytest.mark.parametrize("name", ["crystalcache", "adakv", "kvzip", "h2o", "chunkkv", "nestedkv"])
def test_the_default_device_is_not_used(name: str, tmp_path: Path) -> None:
    """`torch.set_default_device("cuda")` is for the caller's own tensors; meta holds none at all."""
    model = build("llama")
    expected = life(model, name)
    with torch.device("meta"):
        assert torch.equal(life(model, name), expected)


def test_nor_for_rows_and_saved_caches(tmp_path: Path) -> None:
    model = build("llama")
    expected = rows(model, tmp_path / "one")
    with torch.device("meta"):
        assert torch.equal(rows(model, tmp_path / "other"), expected)
