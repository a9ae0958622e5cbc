"""The pocket model's tokenizer, from its word lists: whole words where they are known, bytes everywhere else.

The vocabulary is the 256 bytes, the words of the training text and three special tokens. Digits and
punctuation are always tokens of their own (a value is four tokens, the first with the space before it), and
text cut at a space is tokenized piece by piece exactly as it is as a whole.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from models_integration.pocket.training import words
from models_integration.tasks import sentences

__all__ = ["BOS", "MAXIMUM_LENGTH", "build_tokenizer", "save_tokenizer"]

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
MAXIMUM_LENGTH = 8192

_PIECE = Regex(r"’s|'s| ?[0-9]| ?\p{L}+| ?[^\s\p{L}0-9]|\s")
_WORD_SCORE, _BYTE_SCORE = -1.0, -100.0


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(_PIECE, "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentences() -> Iterable[str]:
    """Every fixed sentence of the tasks, and the start of every kind of filler sentence."""
    facts = sentences.NEEDLE_TEMPLATES + tuple(topic.fact for topic in sentences.TOPIC_TEMPLATES)
    for fact in facts:
        for key in (fact.key, *fact.other_keys):
            yield fact.state("", key)
            yield fact.ask(key)
    for topic in sentences.TOPIC_TEMPLATES:
        yield from topic.high_density + topic.low_density
    yield from (sentences.FRAMING_SENTENCE, *sentences.DEFAULT_FILLER)
    yield from (text[0].upper() + text[1:] for text in words.FILLER_SUBJECTS + words.FILLER_CLAUSES)


def _phrases() -> Iterable[str]:
    """What only ever stands inside a sentence."""
    yield sentences.QUESTION_FRAME.format(question="").strip()
    yield from words.NAMES + words.LETTERS + words.ADJECTIVES + words.THINGS + words.QUANTITIES + words.ROLES
    yield from words.FILLER_SUBJECTS + words.FILLER_VERBS + words.FILLER_OBJECTS + words.FILLER_ENDINGS
    yield "the of and in degrees ’s 's 0 1 2 3 4 5 6 7 8 9"


def _word_pieces() -> list[str]:
    """Every known word in byte-level letters: after a space, and as the first word of a text where it can be."""
    splitter = _pre_tokenizer()
    texts = [form for text in _sentences() for form in (text, " " + text)]
    texts += [" " + text for text in _phrases()]
    return sorted({piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)})


def build_tokenizer(more: Sequence[str] = (), markers: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """The tokenizer of the word lists; the same lists always give the same ids.

    Args:
        more: phrases whose words get ids behind those of the word lists, where they have none.
        markers: special tokens behind all others.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [piece for piece in _word_pieces() if piece not in set(alphabet)]
    later = {piece for text in more for piece, _ in _pre_tokenizer().pre_tokenize_str(text)}
    pieces += sorted(later - set(pieces) - set(alphabet))
    vocabulary = [(token, 0.0) for token in (PAD, BOS, EOS)]
    vocabulary += [(letter, _BYTE_SCORE) for letter in alphabet] + [(piece, _WORD_SCORE) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, BOS, EOS, *markers])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 1)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAXIMUM_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write its files; the vocabulary in one line, which is a third of the bytes."""
    tokenizer.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
