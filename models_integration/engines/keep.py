"""Select the tokens that a policy keeps of a prompt, without a forward pass of the whole model.

kvspec builds the model without weights, and runs the decoder up to the attention of the first layer. Each module up to
the first attention loads only its own weights from the file. kvspec never loads the value projection and the later
layers.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models_integration.attention.capture import AttentionInputs
from models_integration.attention.flash import flash_attention
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import check_positions, describe
from models_integration.model.layer_kinds import FULL, layer_types
from models_integration.model.seams import attention_of, replace_attention
from models_integration.policies.methods import NamedPolicy, RetentionPolicy
from models_integration.policies.sizes import UNKNOWN, SizedPolicy, bytes_without_weights
from models_integration.session.method import Method, decide
from models_integration.session.observed import ObservedSegment
from reference.crystalcache.observed_layer import observed_layer
from reference.policies.describe import list_policies
from reference.policies.kept import KeptTokens, count_kept
from reference.policies.names import constants_of_model
from spec.errors import SpecError
from spec.files import check_regular
from spec.retention import Granularity, Retention

__all__ = ["keep", "keep_and_count"]

_NAME = "kvspec_first_layer"


class _Asked(Exception):
    """Exception that stops the forward pass before the first layer's attention."""


def keep(folder: Path, policy: RetentionPolicy, token_ids: Sequence[int], dtype: str | None = None) -> Retention:
    """Return the set of kept tokens that a session with the whole model would return, bit for bit.

    Args:
        folder: folder with model.safetensors, or with the index of several safetensors files.
        policy: policy with one set of kept tokens, which uses at most the queries and keys of the first layer.
        token_ids: token ids of the prompt.
        dtype: dtype of the weights, as for `from_pretrained`. None: the dtype of the file.

    Raises:
        SpecError: if the policy reads more than the first layer, or keeps more than a memory stores. Also if the folder
            has no such files, or if an id is outside the vocabulary.
    """
    return keep_and_count(folder, policy, token_ids, dtype)[0]


def keep_and_count(
    folder: Path, policy: RetentionPolicy, token_ids: Sequence[int], dtype: str | None = None,
) -> tuple[Retention, KeptTokens]:
    """Return the result of `keep`, and the numbers of kept tokens beside the budget.

    Raises:
        SpecError: as in `keep`.
    """
    files, config = _files(folder), AutoConfig.from_pretrained(folder)
    check_positions(config, "token_ids", len(token_ids))
    full = [index for index, kind in enumerate(layer_types(config)) if kind == FULL]
    config.num_hidden_layers, automatic = 1, cast(Any, AutoModelForCausalLM)
    if getattr(config, "layer_types", None) is not None:
        # The first layer can have a sliding window. Then no policy reads a tensor of this layer (`_checked`).
        config.layer_types = [config.layer_types[full[0] if full else 0]]
    with torch.device("meta"):
        stored = dtype or config.dtype or _read(files, next(iter(files))).dtype
        model = automatic.from_config(config, dtype=stored).train(False)
    method, ids = _checked(policy, model, full), torch.tensor([list(token_ids)], device="cpu")
    architecture = describe(model)
    if architecture.latent:
        raise SpecError("folder", folder, "has a model with latents (MLA) instead of keys; use `with policy(model)`")
    if isinstance(policy, SizedPolicy):
        method = policy.budgeted(method, lambda: bytes_without_weights(AutoConfig.from_pretrained(folder), stored))
    if ids.shape[1] < 2 or not 0 <= int(ids.min()) <= int(ids.max()) < architecture.vocabulary:
        raise SpecError("token_ids", tuple(ids.shape), f"must be at least two ids in [0, {architecture.vocabulary})")
    observed = ObservedSegment(method.policy.scorer.needs, architecture, RetainedCache(config), lse=True)
    observed.read(ids, torch.ones_like(ids, dtype=torch.bool))
    if observed.layers:
        _prepare(model, files)
        observed.attended(*_asked(architecture.decoder, config, ids))
    (retention,) = decide(method, observed).retentions
    return retention, count_kept(method.policy, method.budget, retention)


def _checked(policy: RetentionPolicy, model: PreTrainedModel, full: Sequence[int]) -> Method:
    """Return the policy bound to the model, after a check that the first layer suffices.

    Raises:
        SpecError: if the policy needs more than the first layer. The message contains the additional need.
    """
    if isinstance(policy, SizedPolicy):
        policy = policy.make(UNKNOWN)
    if isinstance(policy, NamedPolicy) and (wanted := constants_of_model(policy.name)):
        raise SpecError(
            "policy", policy.name, f"needs {', '.join(sorted(wanted))} from the whole model; use `with policy(model)`"
        )
    method = policy.on(model)
    needs, granularity, name = method.policy.scorer.needs, method.policy.granularity, method.policy.name
    if granularity is not Granularity.MODEL or needs.layers == "all" or needs.values or needs.hidden:
        rows = "all" if needs.query_rows is None else f"the last {needs.query_rows}"
        read = ["keys", *["values"] * needs.values, *["hidden states"] * needs.hidden]
        shown = f"{' and '.join(read)} of {needs.layers} layers, {rows} query rows"
        raise SpecError(
            "policy", name,
            f"needs a forward pass ({shown}, separate tokens for each {granularity.value}): use `with policy(model)`,"
            f" or choose {', '.join(_first_layer_policies())}",
        )
    if needs.layers == "observed" and (at := observed_layer(full, needs.observed)) != 0:
        raise SpecError(
            "policy", name,
            f"needs layer {at}, but only the first layer is loaded; use `with policy(model)`",
        )
    return method


def _first_layer_policies() -> list[str]:
    """Return the names of the policies that need at most the first layer."""
    return [one.name for one in list_policies() if one.granularity == "model" and one.layers != "all"]


def _prepare(model: PreTrainedModel, files: dict[str, Path]) -> None:
    """Make each module load its parameters when the module is called.

    Rotary frequencies are computed from the config.
    """
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        # transformers 5.24 does not save rotary frequencies (`persistent=False`), so the files do not contain them.
        if any(buffer.endswith("inv_freq") for buffer in module._buffers):
            setattr(model.get_submodule(parent), child, type(module)(model.config))
        elif any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            raise SpecError(
                "model", name, "has buffers that the files of the model do not contain; use `with policy(model)`"
            )
        elif child == "v_proj":
            # `forward` of the instance is called instead of the class's (torch 2.13), and no value weight is read.
            vars(module)["forward"] = partial(_no_values, module)
        elif module._parameters:
            module.register_forward_pre_hook(partial(_fill, files, name))


def _fill(files: dict[str, Path], name: str, module: nn.Module, args: object) -> None:
    for parameter_name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            values = _read(files, f"{name}.{parameter_name}").to(parameter.dtype)
            module._parameters[parameter_name] = nn.Parameter(values, requires_grad=False)


def _no_values(module: Any, hidden: Tensor) -> Tensor:
    return hidden.new_zeros(*hidden.shape[:-1], module.out_features)


def _ask(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, **options: Any) -> NoReturn:
    """Stop the forward pass. This is the attention function with the name _NAME, which all threads share."""
    raise _Asked(module, q, k, v, options)


def _no_mask(**_: Any) -> None:
    """Make no mask, because no attention is computed."""


def _asked(decoder: nn.Module, config: Any, ids: Tensor) -> tuple[nn.Module, AttentionInputs]:
    """Return the first layer's attention module and its attention inputs."""
    sdpa = attention_of(config) == "sdpa"
    # transformers 5.24 has no hook between RoPE and attention. An attention function receives rotated queries and keys.
    AttentionInterface.register(_NAME, _ask)
    AttentionMaskInterface.register(_NAME, _no_mask)
    replace_attention(config, _NAME)
    with torch.no_grad():
        try:
            decoder(input_ids=ids, use_cache=False)
        except _Asked as asked:
            module, q, k, v, options = asked.args
        else:
            raise AssertionError("a layer that attends asks")
        # If a session uses the kernel's log-sum-exp, it is used here too, so that the bits are equal.
        both = flash_attention(module, q, k, v, options) if sdpa else None
    return module, AttentionInputs(0, q, k, v, None if both is None else both[1], None, options)


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return _indexed(index)
    if not single.is_file():
        raise SpecError(
            "model", str(folder), "must be a folder with model.safetensors, or with an index of several files"
        )
    try:
        check_regular(single)
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (OSError, SafetensorError) as error:
        raise SpecError("model", str(single), f"must be a safetensors file: {error}") from error


def _indexed(index: Path) -> dict[str, Path]:
    """Return the file of each tensor in an index.

    Raises:
        SpecError: if the index is malformed, or names a file outside of the folder of the index.
    """
    try:
        parts: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        paths = {name: PurePath(part) for name, part in parts.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError("model", str(index), "must be the index of safetensors files") from error
    # Links inside of the folder are allowed, because the cache of the hub consists of links.
    if outside := [part for part in paths.values() if part.is_absolute() or ".." in part.parts]:
        raise SpecError("model", str(outside[0]), f"must be a file in the folder of {index}")
    return {name: index.parent / part for name, part in paths.items()}


def _read(files: dict[str, Path], name: str) -> Tensor:
    if name not in files:
        raise SpecError("model", name, "is a tensor that the files of the model do not contain")
    try:
        check_regular(files[name])
        with safe_open(files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise SpecError("model", str(files[name]), f"must be a safetensors file with {name}: {error}") from error
    return tensor
