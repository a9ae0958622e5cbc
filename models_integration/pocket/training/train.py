"""Training of the pocket model, from scratch: `python -m models_integration.pocket.training.train --checkpoint FOLDER`.

Started again with the same folder it goes on where it stopped, with the same rows: every step draws its rows
from a generator seeded by the step's number.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models_integration.pocket.shipped import ASSETS
from models_integration.pocket.training.batches import (
    ANSWER_DIGIT,
    ANSWER_WORD,
    FILLER_POOL,
    TEXT,
    Batch,
    RowMaker,
    RowPlan,
)
from models_integration.pocket.training.curriculum import SPAN, TOTAL_STEPS, draw_plan, rate_at, stage_at
from models_integration.pocket.training.initialisation import prepare
from models_integration.pocket.training.tokenizer import MAXIMUM_LENGTH, build_tokenizer, save_tokenizer

__all__ = [
    "SEED", "Progress", "Resumable", "Trainer", "digit_accuracy", "main", "new_model", "pocket_config", "probe",
    "scored_logits", "weighted_loss",
]

SEED = 20260101
KIND_WEIGHTS = (0.0, 0.03, 0.1, 1.0)
"""Weight in the loss of an unscored token, running text, an answer's words and a value's digits."""

TEXT_SHARE = 0.15
"""Share of running-text tokens that is scored at all: they teach little and cost a row of the output layer."""

PROBE_PLAN = RowPlan(1024, (1, 8), 4, span=SPAN, gap_share=0.0, filled=(0.9, 1.0), topic_share=0.3)
PROBE_ROWS = 32


@dataclass
class Progress:
    """What a run has cost and reached so far; written beside the weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_probe: float = 0.0
    probes: list[tuple[int, float]] = field(default_factory=list)


def pocket_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The architecture: 3 layers, 128 wide, 4 query heads on 2 key-value heads, a slow rotary base."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAXIMUM_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The model with its structured initial weights."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(pocket_config(tokenizer))
    prepare(model, SEED)
    return model


def scored_logits(
    model: LlamaForCausalLM, batch: Batch, text_share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits (m, vocabulary), targets (m,) and kinds (m,) of a batch's scored tokens."""
    ids, kinds = torch.from_numpy(batch.ids), torch.from_numpy(batch.kinds)[:, 1:].long()
    positions = torch.from_numpy(batch.positions)
    # Without a mask, transformers takes a jump in the positions for the start of another sequence.
    hidden = model.model(ids, torch.ones_like(ids), position_ids=positions, use_cache=False)[0]
    drawn = torch.rand(kinds.shape, generator=generator) < text_share
    scored = (kinds >= ANSWER_WORD) | ((kinds == TEXT) & drawn)
    return model.lm_head(hidden[:, :-1][scored]), ids[:, 1:][scored], kinds[scored]


def weighted_loss(logits: Tensor, targets: Tensor, kinds: Tensor) -> Tensor:
    """Mean cross-entropy of the scored tokens, weighted by their kinds."""
    weights = torch.tensor(KIND_WEIGHTS)[kinds]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def digit_accuracy(logits: Tensor, targets: Tensor, kinds: Tensor) -> float:
    """Share of the answers' digits that the model ranks first."""
    digits = kinds == ANSWER_DIGIT
    return float((logits[digits].argmax(-1) == targets[digits]).float().mean())


@torch.no_grad()
def probe(model: LlamaForCausalLM, maker: RowMaker) -> float:
    """Digit accuracy on held-out filler and values at 1024 tokens, the same rows at every call."""
    generator = torch.Generator().manual_seed(0)
    batch = maker.batch(np.random.default_rng(0), PROBE_PLAN, PROBE_ROWS)
    return digit_accuracy(*scored_logits(model, batch, 0.0, generator))


class Resumable:
    """A run that goes on where it was stopped: the model, the optimiser, the progress and the file that holds them."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self.model, self.tokenizer, self.progress = model, tokenizer, Progress()
        self.optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
        self._file = folder / "state.pt"
        if self._file.exists():
            state = torch.load(self._file, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Write the state so that an interruption at any moment leaves a whole file."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(),
            "progress": asdict(self.progress),
        }
        partial = self._file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._file)

    def learn(self, loss: Tensor, rate: float, tokens: int) -> None:
        """One step of the optimiser, on a batch of so many tokens."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.progress.step += 1
        self.progress.tokens += tokens

    def export(self, folder: Path, model: LlamaForCausalLM) -> None:
        """Write the shipped files (weights, configuration, tokenizer, cost) into a folder."""
        model.save_pretrained(folder)
        save_tokenizer(self.tokenizer, folder)
        (folder / "training.json").write_text(json.dumps(asdict(self.progress)) + "\n")
        (folder / "model.safetensors").chmod(0o644)  # it is written for its owner alone, and a package ships it


class Trainer(Resumable):
    """The run of the pocket model."""

    def __init__(self, folder: Path, export_folder: Path | None, pool: int = FILLER_POOL) -> None:
        tokenizer = build_tokenizer()
        super().__init__(new_model(tokenizer), tokenizer, folder)
        self.export_folder = export_folder
        self.maker = RowMaker(tokenizer, SEED, pool=pool)
        self.held_out = RowMaker(tokenizer, SEED + 1, held_out=True, pool=pool)

    def step(self) -> tuple[str, int, float, float]:
        """Train on one batch; return the stage, the row length, the loss and the digit accuracy."""
        number = self.progress.step
        began = time.monotonic()
        stage, _ = stage_at(number)
        rng = np.random.default_rng([SEED, number])
        plan, rows = draw_plan(rng, stage)
        batch = self.maker.batch(rng, plan, rows)
        scored = scored_logits(self.model, batch, TEXT_SHARE, torch.Generator().manual_seed(number))
        loss = weighted_loss(*scored)
        self.learn(loss, rate_at(number), batch.ids.size)
        self.progress.seconds += time.monotonic() - began
        return stage.name, plan.length, float(loss.detach()), digit_accuracy(*scored)

    def checkpoint(self) -> None:
        """Probe on held-out rows, save, and export the model if it is the best so far."""
        score = probe(self.model, self.held_out)
        self.progress.probes.append((self.progress.step, round(score, 4)))
        best = score >= self.progress.best_probe
        self.progress.best_probe = max(score, self.progress.best_probe)
        self.save()
        if best and self.export_folder is not None:
            self.export(self.export_folder, self.model)
        print(f"step {self.progress.step} held-out digits {score:.4f}{' exported' if best else ''}", flush=True)

    def run(self, until: int, log_every: int, checkpoint_every: int) -> None:
        """Train up to step `until`; prints the digit accuracy by row length."""
        recent: dict[int, list[float]] = {}
        while self.progress.step < until:
            name, length, loss, accuracy = self.step()
            recent.setdefault(length, []).append(accuracy)
            if self.progress.step % log_every == 0:
                means = " ".join(f"{size}:{np.mean(shares):.3f}" for size, shares in sorted(recent.items()))
                done = self.progress
                print(f"{name} {done.step} {done.seconds:.0f}s {done.tokens} loss {loss:.3f} {means}", flush=True)
                recent.clear()
            if self.progress.step % checkpoint_every == 0 or self.progress.step == until:
                self.checkpoint()


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument("--export", type=Path, default=ASSETS, help="folder of the shipped files")
    parser.add_argument("--until", type=int, default=TOTAL_STEPS, help="last step")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    Trainer(options.checkpoint, options.export).run(options.until, log_every=25, checkpoint_every=100)


if __name__ == "__main__":
    main()
