"""Training of the sibling, from the pocket model: `python -m models_integration.pocket.training.chat_train`.

One layer more than the pocket model, behind its first, which looks one to four tokens back: the new one starts by
looking five to eight tokens back, and by adding nothing, so that the sibling starts as the pocket model. Weights are
stored as float16.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models_integration.pocket.shipped import CHAT_ASSETS, load_pocket
from models_integration.pocket.training.chat import ChatPlan, ChatRows, chat_tokenizer
from models_integration.pocket.training.initialisation import look_back
from models_integration.pocket.training.train import Resumable, digit_accuracy, scored_logits, weighted_loss

__all__ = ["RATES", "STAGES", "STEPS", "ChatTrainer", "Stage", "main", "new_sibling", "rate_at", "stage_at"]

SEED = 20261121
NEW_LAYER, LOOKED_BACK, PEAK = 1, 4, 12.0
TOKENS = 4096
WARMUP = 50
RATES = (
    (0, 2e-3), (350, 2e-3 - 1.98e-3 * 350 / 650), (500, 2e-5), (520, 1.5e-3), (1300, 2e-5), (1320, 1e-3), (1650, 1e-5),
)
"""Learning rates at some steps, linear in between: three rounds."""

SHORT, MIDDLE = ChatPlan(384, 1, (0, 1), 4), ChatPlan(512, 1, (1, 3), 4)
LONG, LONGEST = ChatPlan(1024, 2, (1, 3), 6), ChatPlan(1536, 3, (1, 3), 8)


class Stage(NamedTuple):
    """Steps, the plans that they draw from, and what the rows are: see `ChatRows.batch`."""

    steps: int
    plans: tuple[ChatPlan, ...]
    choice: bool
    shared: bool


STAGES = (
    Stage(250, (SHORT,), choice=False, shared=True),
    Stage(150, (SHORT, MIDDLE, LONG), choice=False, shared=True),
    Stage(100, (MIDDLE, LONG, LONGEST), choice=False, shared=True),
    Stage(500, (SHORT, MIDDLE, LONG), choice=True, shared=True),
    Stage(300, (SHORT, MIDDLE, LONG, LONGEST), choice=True, shared=True),
    Stage(350, (SHORT, MIDDLE, LONG, LONGEST), choice=True, shared=False),
)
STEPS = sum(stage.steps for stage in STAGES)


def new_sibling() -> LlamaForCausalLM:
    """The pocket model with one layer and some tokens more; on known tokens it says what the pocket model says."""
    torch.manual_seed(SEED)
    pocket, _ = load_pocket()
    tokenizer = chat_tokenizer()
    config = LlamaConfig(**{**pocket.config.to_dict(), "num_hidden_layers": 4, "vocab_size": len(tokenizer)})
    config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = LlamaForCausalLM(config)
    model.load_state_dict(_renumbered(pocket.state_dict()), strict=False)
    with torch.no_grad():
        known = pocket.model.embed_tokens.weight
        spread = torch.randn(len(tokenizer) - len(known), known.shape[1]) * known.std(0)
        model.model.embed_tokens.weight.copy_(torch.cat([known, known.mean(0) + spread]))
        fresh = model.model.layers[NEW_LAYER]
        fresh.self_attn.o_proj.weight.zero_()
        fresh.mlp.down_proj.weight.zero_()
        fresh.self_attn.v_proj.weight.normal_(std=known.shape[1] ** -0.5)
        shared = _shared_direction(model, ChatRows(tokenizer))
        look_back(model, shared / shared.norm(), PEAK, NEW_LAYER, LOOKED_BACK + 1, float(shared.norm()))
    return model


def _shared_direction(model: LlamaForCausalLM, rows: ChatRows) -> torch.Tensor:
    """What the normed inputs of the new layer have in common, (width,)."""
    ids = torch.from_numpy(rows.batch(np.random.default_rng(SEED), SHORT, 4, shared=True).ids)
    states = model.model(ids, output_hidden_states=True).hidden_states[NEW_LAYER]
    normed: torch.Tensor = model.model.layers[NEW_LAYER].input_layernorm(states)
    return normed.mean((0, 1))


def _renumbered(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layers from the new one on move up by one; embeddings are copied apart."""
    moved = {}
    for name, value in weights.items():
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) >= NEW_LAYER:
            parts[2] = str(int(parts[2]) + 1)
        if "embed_tokens" not in parts and "lm_head" not in parts:
            moved[".".join(parts)] = value
    return moved


def stage_at(step: int) -> Stage:
    """The stage of a step, from 0."""
    for stage in STAGES:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise ValueError(f"step lies {step} past the end")


def rate_at(step: int) -> float:
    """Warm-up, then a fall."""
    steps, rates = zip(*RATES, strict=True)
    return float(np.interp(step, steps, rates)) * min(1.0, (step + 1) / WARMUP)


class ChatTrainer(Resumable):
    """The sibling's run: every step draws its rows from a generator seeded by its number."""

    def __init__(self, folder: Path) -> None:
        super().__init__(new_sibling(), chat_tokenizer(), folder)
        self.rows, self.held_out = ChatRows(self.tokenizer), ChatRows(self.tokenizer, held_out=True)

    def step(self) -> float:
        """Train on one batch; the share of right digits."""
        number, began = self.progress.step, time.thread_time()
        rng = np.random.default_rng([SEED, number])
        stage = stage_at(number)
        plan = stage.plans[int(rng.integers(len(stage.plans)))]
        batch = self.rows.batch(rng, plan, TOKENS // plan.length, stage.choice, stage.shared)
        scored = scored_logits(self.model, batch, 0.0, torch.Generator().manual_seed(number))
        self.learn(weighted_loss(*scored), rate_at(number), batch.ids.size)
        self.progress.seconds += time.thread_time() - began
        return digit_accuracy(*scored)

    @torch.no_grad()
    def probe(self) -> float:
        """Share of right choices on held-out values and filler in conversations of 12 turns; the same at every call."""
        batch = self.held_out.batch(np.random.default_rng(0), LONG, 16, choice=True)
        return digit_accuracy(*scored_logits(self.model, batch, 0.0, torch.Generator().manual_seed(0)))

    def half(self) -> LlamaForCausalLM:
        """A copy of the model as it is shipped, in float16."""
        half = LlamaForCausalLM(self.model.config)
        half.load_state_dict(self.model.state_dict())
        half.half()  # type: ignore[no-untyped-call]
        return half


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument("--export", type=Path, default=CHAT_ASSETS, help="folder of the shipped files")
    parser.add_argument("--until", type=int, default=STEPS, help="last step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer, recent = ChatTrainer(options.checkpoint), []
    while trainer.progress.step < options.until:
        recent.append(trainer.step())
        if trainer.progress.step % 50 == 0 or trainer.progress.step == options.until:
            trainer.progress.probes.append((trainer.progress.step, round(trainer.probe(), 4)))
            trainer.save()
            step, held_out = trainer.progress.probes[-1]
            seconds = trainer.progress.seconds
            print(f"{step} {seconds:.0f}s digits {np.mean(recent):.3f}, held out {held_out:.3f}", flush=True)
            recent.clear()
    trainer.export(options.export, trainer.half())


if __name__ == "__main__":
    main()
