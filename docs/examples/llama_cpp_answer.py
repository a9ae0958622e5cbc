"""Answer a question with llama.cpp after eviction of the tokens that `kvspec keep` does not keep.

    kvspec keep prompt.txt --model smollm2 --budget 0.3 --format json > kept.json
    python llama_cpp_answer.py MODEL.gguf prompt.txt kept.json " And so?"
"""

import json
import sys
from itertools import islice, pairwise, takewhile
from pathlib import Path

import llama_cpp as cpp

NEW = 32

file, prompt, kept, question = sys.argv[1:]
decided = json.loads(Path(kept).read_text(encoding="utf-8"))
llama = cpp.Llama(file, n_ctx=decided["seen"] + 512, verbose=False)


def tokenize(text: str) -> list[int]:
    """Return the token ids that the tokenizer of transformers also gives."""
    return llama.tokenize(text.encode(), add_bos=False, special=True)


prompt_ids = tokenize(Path(prompt).read_text(encoding="utf-8"))
if decided["ranges"][-1][1] != len(prompt_ids):
    sys.exit("llama.cpp continues only after the last stored token: choose a policy that keeps the last token")
llama.eval(prompt_ids)
memory, freed = cpp.llama_get_memory(llama.ctx), 0
for (_, end), (first, _) in pairwise([[0, 0], *decided["ranges"]]):
    if first > end:
        if not cpp.llama_memory_seq_rm(memory, 0, end, first):
            sys.exit(f"llama.cpp cannot free the cells of the tokens {end} to {first}")
        freed += first - end
print(f"{freed} of {decided['seen']} cells freed", file=sys.stderr)
tokens = llama.generate([*prompt_ids, *tokenize(question)], temp=0.0)
answer = list(islice(takewhile(lambda token: token != llama.token_eos(), tokens), NEW))
print(llama.detokenize(answer).decode(errors="replace"))
