"""Eviction in llama.cpp: `LlamaSequence` frees the cells of the evicted tokens. The kept tokens keep their positions.

    sequence = LlamaSequence(llama.ctx)  # llama is a `llama_cpp.Llama`
    sequence.read(prompt_ids)
    sequence.evict(retention_of(ranges, seen))  # ranges as printed by `kvspec keep --format json`
    logits = sequence.read(question_ids)

A cell of llama.cpp stores one token for all layers and heads, so the model must have one set of kept tokens. This
module needs only NumPy and llama-cpp-python. A different process can select the tokens.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp as cpp
import numpy as np

from spec.arrays import IntVector, Vector
from spec.errors import SpecError
from spec.retention import Granularity, Retention

__all__ = ["LlamaSequence", "retention_of"]

_REFUSED = {
    "llama_model_n_swa": "layers with a sliding window, whose cells leave by themselves",
    "llama_model_is_recurrent": "recurrent states, from which no token can be taken",
    "llama_model_is_hybrid": "recurrent states, from which no token can be taken",
    "llama_model_is_diffusion": "no order in which tokens are read",
    "llama_model_has_encoder": "an encoder",
}
"""Properties in llama.cpp of models that do not store each token in one cell for all layers, with explanations."""
_NO_SLOT = 1
"""Result of `llama_decode` if too few cells are free."""


def retention_of(ranges: Sequence[Sequence[int]], seen: int) -> Retention:
    """Return the set of kept tokens that contains the given ranges of positions.

    Args:
        ranges: pairs (first position, last position + 1), ascending.
        seen: number of tokens of the prompt.

    Raises:
        SpecError: if a range is not inside [0, seen], or if ranges overlap or are not ascending.
    """
    for pair in ranges:
        match pair:
            case [int(first), int(end)] if 0 <= first < end <= seen:
                pass
            case _:
                raise SpecError("ranges", pair, f"must be (first position, last position + 1) inside [0, {seen}]")
    kept = np.array([position for first, end in ranges for position in range(first, end)], dtype=np.int64)
    return Retention.shared(kept, seen)


class LlamaSequence:
    """One sequence in a context of llama.cpp.

    Args:
        context: `llama_cpp.Llama(...).ctx`, or the result of `llama_init_from_model`. The caller must keep the context
            alive.
        seq_id: id of the sequence. If the sequence already has tokens, they must begin at position 0 without gaps.

    Attributes:
        seen: number of tokens that the sequence has read. The next token has this position.
        positions: positions of the stored tokens, ascending.

    Raises:
        SpecError: if the context has no such sequence, if the sequence does not begin at position 0, or if the model
            does not store each token in one cell.
    """

    def __init__(self, context: Any, seq_id: int = 0) -> None:
        self._context, self._seq_id, self._model = context, seq_id, cpp.llama_get_model(context)
        self._memory = _memory(context, self._model)
        sequences = cpp.llama_n_seq_max(context)
        if not 0 <= seq_id < sequences:
            raise SpecError("seq_id", seq_id, f"must lie in [0, {sequences})")
        first = cpp.llama_memory_seq_pos_min(self._memory, seq_id)
        if first > 0:
            raise SpecError(
                "seq_id", seq_id, f"begins at position {first}, not at 0: the evicted positions are unknown"
            )
        self.seen = self._last() + 1
        self.positions: IntVector = np.arange(self.seen)

    def read(self, tokens: Sequence[int]) -> Vector:
        """Read tokens after the tokens seen so far, in batches of the size that the context allows.

        Returns:
            Logits after the last token, float32, (vocabulary,).

        Raises:
            SpecError: if there are no tokens, if an id is outside the vocabulary, or if the cells of the context do not
                suffice. The sequence is then unchanged.
            RuntimeError: if llama.cpp fails for a different reason. The sequence is then unchanged.
        """
        self._check_untouched()
        vocabulary = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(self._model))
        if not len(tokens) or not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise SpecError("tokens", len(tokens), f"must be one or more, with ids in [0, {vocabulary})")
        cells = cpp.llama_n_ctx_seq(self._context)
        if len(tokens) > cells - len(self.positions):
            raise SpecError(
                "tokens", len(tokens), f"must fit in the {cells - len(self.positions)} free cells of n_ctx = {cells}"
            )
        size = cpp.llama_n_batch(self._context)
        for start in range(0, len(tokens), size):
            failed = self._decode(tokens[start : start + size], self.seen + start)
            if failed:
                cpp.llama_memory_seq_rm(self._memory, self._seq_id, self.seen, -1)
            if failed == _NO_SLOT:
                raise SpecError("tokens", len(tokens), "do not fit: other sequences use the free cells of the context")
            if failed:
                raise RuntimeError(f"llama_decode returned {failed}")
        self.positions = np.append(self.positions, np.arange(self.seen, self.seen + len(tokens)))
        self.seen += len(tokens)
        logits: Vector = np.ctypeslib.as_array(cpp.llama_get_logits_ith(self._context, -1), (vocabulary,)).copy()
        return logits

    def evict(self, retention: Retention) -> int:
        """Free the cells of all tokens that are not in the set of kept tokens.

        llama.cpp keeps the cells that a second sequence shares.

        Returns:
            Number of evicted tokens.

        Raises:
            SpecError: if layers or heads have separate sets of kept tokens, if the set is for a different number of
                tokens or contains an evicted token, or if the set lacks the last token. llama.cpp can continue only
                after the last stored position. No cell is freed.
        """
        self._check_untouched()
        if retention.granularity is not Granularity.MODEL:
            bound = "must keep the same tokens in all layers and heads: a cell of llama.cpp has all layers and heads"
            raise SpecError("retention", retention.granularity.value, bound)
        if retention.seen != self.seen:
            raise SpecError("retention", retention.seen, f"must be {self.seen}, the number of tokens of the sequence")
        kept = retention.positions
        if len(gone := np.setdiff1d(kept, self.positions)):
            raise SpecError("retention", int(gone[0]), "must not be a position that was evicted earlier")
        if not len(kept) or kept[-1] != self.seen - 1:
            bound = (
                f"must keep position {self.seen - 1}: llama.cpp can continue only after the last stored position"
            )
            raise SpecError("retention", kept[-1:].tolist(), bound)
        before = np.concatenate([[-1], kept[:-1]])
        for first, end in zip((before + 1).tolist(), kept.tolist(), strict=True):
            if first < end and not cpp.llama_memory_seq_rm(self._memory, self._seq_id, first, end):
                raise SpecError("context", (first, end), "are positions that llama.cpp cannot remove")
        evicted = len(self.positions) - len(kept)
        self.positions = kept
        return evicted

    def _last(self) -> int:
        return int(cpp.llama_memory_seq_pos_max(self._memory, self._seq_id))

    def _check_untouched(self) -> None:
        if self._last() != self.seen - 1:
            bound = (
                f"is the last position, but {self.seen - 1} is expected: code outside kvspec has changed the sequence"
            )
            raise SpecError("context", self._last(), bound)

    def _decode(self, tokens: Sequence[int], first: int) -> int:
        """Decode one batch from position `first` on, and return llama.cpp's result. Only the last token has logits."""
        batch = cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            batch.token[at], batch.pos[at], batch.logits[at] = token, first + at, at == len(tokens) - 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, self._seq_id
        returned = int(cpp.llama_decode(self._context, batch))
        cpp.llama_batch_free(batch)
        return returned


def _memory(context: Any, model: Any) -> Any:
    """Return the memory object that manages the cells of a context.

    Raises:
        SpecError: if the model does not store each token in one cell.
    """
    said = ctypes.create_string_buffer(128)
    cpp.llama_model_desc(model, said, len(said))
    for asked, what in _REFUSED.items():
        if getattr(cpp, asked)(model) > 0:
            raise SpecError("context", said.value.decode(), f"has {what}")
    memory = cpp.llama_get_memory(context)
    if memory is None:
        raise SpecError("context", said.value.decode(), "has no cells")
    return memory
