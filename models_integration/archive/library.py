"""An archive for one model and one tenant: store chunks, load chunks, and insert chunks into a session."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models_integration.archive.errors import NoSuchChunk
from models_integration.archive.keyring import check_tenant
from models_integration.archive.manifest import ALL, Manifest, ids_digest, kept_digest
from models_integration.archive.splice import Chunk, compacted, computed, splice, upper_half
from models_integration.archive.store import Archive
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.identity import ModelIdentity, identify
from models_integration.model.rotation import frequencies_at, recognise
from models_integration.policies.methods import CustomPolicy, RetentionPolicy
from models_integration.policies.prefill import prefill
from reference.injection.quantisers import ARMS, SCHEMES, SMALLEST_SCALE, quantised_region
from reference.injection.wrappers import FORMS, Marker, Vocabulary, marker_id, wrap
from reference.policies.protections import protecting
from spec.errors import SpecError
from spec.retention import Retention
from spec.validate import check_choices

__all__ = ["Injected", "Library", "decode", "encode", "recommended_form", "retained", "vocabulary_of"]

BITS = 8
HIGHEST = 2 ** (BITS - 1) - 1


def encode(layers: Mapping[int, tuple[Tensor, Tensor]], arm: str, depth: int) -> dict[str, Tensor]:
    """Encode keys and values (heads, n, d) by layer as tensors of an object. The model has `depth` layers.

    This function gives the same numbers as reference/injection/quantisers.py, for torch tensors.

    Raises:
        SpecError: if the arm is unknown.
    """
    check_choices("codec", (arm,), ARMS)
    coded_tensors: dict[str, Tensor] = {}
    for layer, pair in layers.items():
        chosen, tokens = quantised_region(ARMS[arm], depth, pair[0].shape[1])
        for name, x, scheme in zip("kv", pair, (ARMS[arm].keys, ARMS[arm].values), strict=True):
            coded = scheme is not None and layer in chosen and len(tokens) > 0
            part = f"{layer}.{name}"
            coded_tensors |= _coded(part, x, SCHEMES[str(scheme)], tokens) if coded else {part: x}
    return coded_tensors


def decode(tensors: Mapping[str, Tensor], layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and values (heads, n, d) of one layer, in the dtype of the original keys and values."""
    keys, values = (_decoded(tensors, f"{layer}.{name}", dtype) for name in "kv")
    return keys, values


def _coded(name: str, x: Tensor, axes: tuple[int, ...], tokens: range) -> dict[str, Tensor]:
    """Return the codes and the scales, and the unquantised tokens before and after the quantised region."""
    part = x[:, tokens.start : tokens.stop].double()
    step = (part.abs().amax(axes, keepdim=True) / HIGHEST).clamp_min(SMALLEST_SCALE).float()
    codes = (part / step.double()).round().clamp(-HIGHEST, HIGHEST).to(torch.int8)
    return {
        f"{name}.q": codes, f"{name}.s": step, f"{name}.first": x[:, : tokens.start].contiguous(),
        f"{name}.last": x[:, tokens.stop :].contiguous(),
    }


def _decoded(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    if name in tensors:
        return tensors[name].to(dtype)
    part = (tensors[f"{name}.q"].float() * tensors[f"{name}.s"]).to(dtype)
    return torch.cat([tensors[f"{name}.first"].to(dtype), part, tensors[f"{name}.last"].to(dtype)], dim=1)


IDS, KEPT = "token_ids", "kept"
_E_WRAPPERS = ("markers", "markers_phi3", "markers_deepseek")


class Injected(NamedTuple):
    """Session cache after the insertion of chunks."""

    cache: RetainedCache
    markers: Tensor
    """Absolute positions (markers,) of the inserted markers, for `reference.policies.protections.protecting`."""


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """Return a transformers tokenizer as a `Vocabulary`, which adds no special tokens and removes none."""
    return Vocabulary(
        lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)),
    )


def recommended_form(vocabulary: Vocabulary) -> str:
    """Return the shortest wrapper of Appendix A whose markers are tokens of the model, or "raw" if there is none."""
    def has_markers(name: str) -> bool:
        try:
            for part in (*FORMS[name].prefix, *FORMS[name].suffix):
                if isinstance(part, Marker):
                    marker_id(part, vocabulary)
        except SpecError:
            return False
        return True

    return next(filter(has_markers, _E_WRAPPERS), "raw")


def retained(
    model: PreTrainedModel, method: RetentionPolicy, ids: Sequence[int], markers: Sequence[int],
) -> Retention:
    """Return the kept tokens of a chunk that the model processes alone. The policy also keeps the markers.

    Raises:
        SpecError: if the policy does not support the model or the ids.
    """
    prepared = method.on(model)
    protected = CustomPolicy(protecting(prepared.policy, markers), prepared.budget)
    return prefill(model, protected, torch.tensor([list(ids)], device=model.device)).run.retentions[0]


class Library:
    """Chunks of one tenant for one model.

    The constructor reads all parameters to identify the model, and runs two tiny prefills.

    Args:
        archive: the archive with the objects.
        model: a causal language model.
        vocabulary: vocabulary of the tokenizer, for the markers of wrappers. See `vocabulary_of`.
        tenant: name of the tenant that owns the chunks.
        identity: identity of the model, if known. Default: the identity is computed from all parameters.

    Raises:
        SpecError: if the name of the tenant is invalid.
        UnknownModel: if kvspec does not recognise the rotary embedding of the model.
    """

    def __init__(
        self, archive: Archive, model: PreTrainedModel, vocabulary: Vocabulary, tenant: str,
        identity: ModelIdentity | None = None,
    ) -> None:
        check_tenant(tenant)
        self.rotary = recognise(model)
        self.identity = identify(model) if identity is None else identity
        self._archive, self._model, self._vocabulary, self._tenant = archive, model, vocabulary, tenant

    def put(
        self, ids: Sequence[int], form: str = "raw", codec: str = "none", upper: bool = False,
        method: RetentionPolicy | None = None,
    ) -> str:
        """Compute the keys and values of a wrapped chunk, store the chunk, and return its key.

        A chunk that is already stored is not written again.

        Args:
            ids: token ids of the chunk, without special tokens.
            form: name of the wrapper, from `FORMS`.
            codec: name of the codec, from `ARMS`.
            upper: if True, store only the upper half of the layers.
            method: policy that selects the tokens to store, or None to store all tokens. Markers are always stored,
                even beyond the budget.

        Raises:
            SpecError: if a name is unknown, or if the chunk is empty. Also if a marker is not one token id, or if the
                budget is below the number of markers in a head.
            ArchiveError: as in `Archive.put`.
        """
        check_choices("form", (form,), FORMS)
        wrapped = wrap(FORMS[form], ids, self._vocabulary)
        chunk = computed(self._model, wrapped.ids, self.rotary, wrapped.hidden, wrapped.markers)
        if method is not None:
            markers = [marker for marker in wrapped.markers if marker >= wrapped.hidden]
            chunk = compacted(chunk, retained(self._model, method, wrapped.ids, markers))
        depth = len(self.rotary.layers)
        layers = upper_half(chunk.layers, depth) if upper else chunk.layers
        if not layers:
            raise SpecError("upper", upper, "must be False: the upper half of the model has no full-attention layer")
        stored = tuple(sorted(layers))
        manifest = Manifest(
            self._tenant, ids_digest(wrapped.ids), len(wrapped.ids), form, wrapped.hidden, wrapped.markers,
            wrapped.start, wrapped.stop, codec, stored, kept_digest(chunk.kept, stored), self.identity, time.time(),
        )
        tensors = {IDS: torch.tensor(wrapped.ids, dtype=torch.int64, device="cpu"), **encode(layers, codec, depth)}
        if chunk.kept is not None:
            tensors |= {f"{index}.{KEPT}": chunk.kept[index] for index in stored}
        return self._archive.put(manifest, tensors)

    def get(self, key: str) -> Chunk | None:
        """Return a stored chunk, decoded by its codec, or None if the chunk is missing or damaged.

        Raises:
            ArchiveError: as in `Archive.get`. WrongModel if a different model computed the chunk.
        """
        stored = self._archive.get(key, self._tenant, self.identity)
        if stored is None:
            return None
        manifest, tensors = stored
        device, dtype = self._model.device, getattr(torch, manifest.model.dtype)
        layers = {
            index: (keys.to(device), values.to(device))
            for index in manifest.layers for keys, values in [decode(tensors, index, dtype)]
        }
        rotary = frequencies_at(self._model, self.rotary, manifest.tokens)
        kept = None if manifest.kept == ALL else {index: tensors[f"{index}.{KEPT}"] for index in manifest.layers}
        return Chunk(tuple(tensors[IDS].tolist()), layers, manifest.hidden, manifest.markers, rotary, kept)

    def inject(self, cache: RetainedCache | None, keys: Sequence[str], room: int = 0) -> Injected:
        """Insert stored chunks, in this order, after the tokens that a session has read.

        Call `inject` between two turns.

        The first tokens of the session are still its attention sinks. If an error is raised, nothing has changed.

        Args:
            cache: cache of the session. None: start a new session.
            keys: keys of the chunks.
            room: number of tokens that the session will still read and generate. Some rotary embeddings depend on the
                full length of the session.

        Raises:
            NoSuchChunk: if a chunk is missing or damaged.
            ArchiveError, SpecError: as in `get` and `splice`.
        """
        chunks = []
        for key in keys:
            chunk = self.get(key)
            if chunk is None:
                raise NoSuchChunk(f"the archive has no undamaged chunk {key} of tenant {self._tenant!r}")
            chunks.append(chunk)
        if cache is None:
            cache = RetainedCache(self._model.config.get_text_config(decoder=True))
        length = cache.get_seq_length() + sum(len(chunk.visible) for chunk in chunks) + room
        return Injected(cache, splice(cache, chunks, frequencies_at(self._model, self.rotary, length)))
