"""An answer of llama.cpp behind what `kvspec keep` keeps of a prompt.

    kvspec keep prompt.txt --model smollm2 --budget 0.3 --format json > kept.json
    python llama_cpp_answer.py MODEL.gguf prompt.txt kept.json " And so?"
"""

import json
import sys
from pathlib import Path

from llama_cpp import Llama

from models_integration.engines.llama_cpp import LlamaSequence, retention_of

NEW = 32

file, prompt, kept, question = sys.argv[1:]
decided = json.loads(Path(kept).read_text(encoding="utf-8"))
llama = Llama(file, n_ctx=decided["seen"] + 512, verbose=False)


def ids(text: str) -> list[int]:
    """Return the token ids, which equal those of the tokenizer of transformers."""
    return llama.tokenize(text.encode(), add_bos=False, special=True)


sequence = LlamaSequence(llama.ctx)
sequence.read(ids(Path(prompt).read_text(encoding="utf-8")))
freed = sequence.evict(retention_of(decided["ranges"], decided["seen"]))
print(f"{freed} of {decided['seen']} cells freed", file=sys.stderr)
logits, answer = sequence.read(ids(question)), []
while (token := int(logits.argmax())) != llama.token_eos() and len(answer) < NEW:
    answer.append(token)
    logits = sequence.read([token])
print(llama.detokenize(answer).decode(errors="replace"))
