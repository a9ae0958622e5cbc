"""An archive as one model and one tenant use it: a chunk goes in, comes out, and goes into a session."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from models_integration.archive.codec import decode, encode
from models_integration.archive.errors import NoSuchChunk
from models_integration.archive.manifest import ALL, Manifest, ids_digest, kept_digest
from models_integration.archive.names import check_tenant
from models_integration.archive.splice import Chunk, compacted, computed, splice, upper_half
from models_integration.archive.store import Archive
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.identity import ModelIdentity, identify
from models_integration.model.rotation import frequencies_at, recognise
from models_integration.policies.methods import CustomPolicy, RetentionPolicy, prefill
from reference.injection.wrappers import FORMS, Marker, Vocabulary, marker_id, wrap
from reference.policies.protections import protecting
from spec.errors import SpecError
from spec.records import CrystalRetention
from spec.retention import Retention

__all__ = ["Injected", "Library", "recommended_form", "retained", "vocabulary_of"]

IDS, KEPT = "token_ids", "kept"
_E_WRAPPERS = ("markers", "markers_phi3", "markers_deepseek")


class Injected(NamedTuple):
    """A session that goes on behind the chunks."""

    cache: RetainedCache
    markers: Tensor
    """Absolute positions of the chunks' markers, (markers,), for `reference.policies.protections.protecting`."""


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """A transformers tokenizer without its habits."""
    return Vocabulary(
        lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)),
    )


def recommended_form(vocabulary: Vocabulary) -> str:
    """The E-wrapper of Appendix A whose markers are tokens of the model; "raw" for a model without such markers."""
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
    """What a policy keeps of a chunk that it reads alone, beside the markers: no query is known yet.

    Raises:
        SpecError: for a model or ids that the policy does not serve.
    """
    own = method.on(model)
    protected = CustomPolicy(protecting(own.policy, markers), own.budget, own.backend)
    found = prefill(model, protected, torch.tensor([list(ids)], device=model.device)).run.retention
    assert isinstance(found, CrystalRetention | Retention)
    return found.retention if isinstance(found, CrystalRetention) else found


class Library:
    """Chunks of one tenant for one model.

    Making it identifies the model, which reads all parameters, and runs two tiny prefills.

    Args:
        archive: where the objects are.
        model: a causal language model.
        vocabulary: of its tokenizer, for the markers of wrappers; see `vocabulary_of`.
        tenant: whose chunks these are.
        identity: of the model, where it is known already.

    Raises:
        SpecError: for what is no tenant's name.
        UnknownModel: when the model's rotation is not recognised.
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
        """Compute a chunk in its wrapper, and store it; its key. A chunk that is stored already is not written again.

        Args:
            ids: of the chunk, without special tokens.
            form: a name of `FORMS`.
            codec: a name of `ARMS`.
            upper: only the upper half of the layers.
            method: of which tokens are stored, out of the wrapped chunk; markers that are spliced always are, also
                beyond its budget. None stores all of them.

        Raises:
            SpecError: for an unknown name, an empty chunk, a marker that is not one token id, or a budget that does not
                hold the markers in every head.
            ArchiveError: as `Archive.put`.
        """
        if form not in FORMS:
            raise SpecError("form", form, f"must be one of {', '.join(FORMS)}")
        wrapped = wrap(FORMS[form], ids, self._vocabulary)
        chunk = computed(self._model, wrapped.ids, self.rotary, wrapped.hidden, wrapped.markers)
        if method is not None:
            markers = [marker for marker in wrapped.markers if marker >= wrapped.hidden]
            chunk = compacted(chunk, retained(self._model, method, wrapped.ids, markers))
        depth = len(self.rotary.layers)
        layers = upper_half(chunk.layers, depth) if upper else chunk.layers
        if not layers:
            raise SpecError("upper", upper, "the upper half of this model has no full-attention layer")
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
        """A chunk as it was computed, up to its codec; None where there is none, or where its bytes are damaged.

        Raises:
            ArchiveError: as `Archive.get`; named when another model made the chunk.
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
        """Splice stored chunks behind what a session has read, in this order; between two turns.

        The session's own first tokens stay its attention sinks. Nothing has changed if anything is refused.

        Args:
            cache: of the session; None starts a new one.
            keys: of chunks.
            room: tokens that the session will still read and write; some rotations depend on its full length.

        Raises:
            NoSuchChunk: for a key without a chunk, or whose object was damaged.
            ArchiveError, SpecError: as `get` and `splice`.
        """
        chunks = []
        for key in keys:
            chunk = self.get(key)
            if chunk is None:
                raise NoSuchChunk(f"no chunk {key} of tenant {self._tenant!r} is here whole")
            chunks.append(chunk)
        if cache is None:
            cache = RetainedCache(self._model.config.get_text_config(decoder=True))
        length = cache.get_seq_length() + sum(len(chunk.visible) for chunk in chunks) + room
        return Injected(cache, splice(cache, chunks, frequencies_at(self._model, self.rotary, length)))
