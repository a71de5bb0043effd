"""Train a built-in model on one GPU: ``python -m kvcap.lab.pocket.train --out DIR``.

``--plain`` trains ``pocket-plain``, and ``--text FOLDER`` trains ``pocket-text`` on the files of a
folder. ``--smoke`` trains a tiny model on the CPU in about two minutes and shows that the loss
falls.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.utils.data import DataLoader
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvcap.lab.pocket import running_text, vocabulary
from kvcap.lab.pocket.evaluate import recall
from kvcap.lab.pocket.rows import Batches, Stage, assistant_id, digit_table, weights
from kvcap.lab.pocket.survival import BLOCK, hidden_states, survival_loss

M = 1_000_000
ROPE_THETA = 500_000.0


@dataclass(frozen=True)
class Plan:
    """A plan of everything that decides a run: the model's shape, curriculum and learning rate."""

    hidden: int
    layers: int
    heads: int
    inner: int
    positions: int
    stages: tuple[Stage, ...]
    batch: int  # tokens a step
    rate: float
    warmup: int  # steps
    checks: tuple[int, ...]  # lengths at which recall is measured
    survival: float = 0.0  # weight of the survival loss, in stages of marked rows
    entries: int = vocabulary.SIZE  # of the tokenizer


FULL = Plan(
    hidden=384,
    layers=6,
    heads=6,
    inner=704,
    positions=16_384,
    stages=(
        Stage(80 * M, (256,), (1,)),
        Stage(60 * M, (512, 256), (0.8, 0.2)),
        Stage(140 * M, (1024, 256), (0.8, 0.2)),
        Stage(240 * M, (2048, 512), (0.8, 0.2)),
        Stage(300 * M, (4096, 1024, 256), (0.75, 0.15, 0.1)),
        Stage(560 * M, (8192, 2048, 512), (0.75, 0.15, 0.1)),
        Stage(300 * M, (16_384, 4096, 512), (0.75, 0.15, 0.1)),
    ),
    batch=65_536,
    rate=1.5e-3,
    warmup=150,
    checks=(1024, 4096, 8192, 16_384),
)
PLAIN = replace(
    FULL,
    hidden=256,
    layers=8,
    heads=4,
    inner=512,
    stages=(
        Stage(30 * M, (256,), (1,)),
        Stage(20 * M, (512, 256), (0.8, 0.2)),
        Stage(60 * M, (1024, 256), (0.8, 0.2)),
        Stage(80 * M, (2048, 512), (0.8, 0.2)),
        Stage(90 * M, (4096, 1024, 256), (0.75, 0.15, 0.1)),
        Stage(80 * M, (8192, 2048, 512), (0.75, 0.15, 0.1)),
        Stage(70 * M, (16_384, 4096, 512), (0.75, 0.15, 0.1)),
    ),
)
TEXT = replace(
    PLAIN,
    layers=6,
    positions=4096,
    stages=(
        Stage(120 * M, (512,), (1,)),
        Stage(80 * M, (1024,), (1,)),
        Stage(120 * M, (4096, 1024), (0.75, 0.25)),
    ),
    rate=2e-3,
    checks=(),
    entries=3072,
)
SETTLE = replace(  # goes on from a model of the full plan
    FULL,
    stages=(Stage(240 * M, (4096, 16_384, 1024), (0.7, 0.15, 0.15), marked=True),),
    rate=5e-4,
    warmup=50,
    survival=1.0,
)
SMOKE = Plan(
    hidden=128,
    layers=2,
    heads=4,
    inner=256,
    positions=512,
    stages=(Stage(600_000, (128,), (1,)), Stage(200_000, (256,), (1,))),
    batch=2048,
    rate=3e-3,
    warmup=20,
    checks=(128,),
)


def _causal(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally without a mask: rows are full, so none is ever built. Shapes (B, H, T, D)."""
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("pocket_causal", _causal)


def create(plan: Plan, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return a freshly initialised model in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden,
        intermediate_size=plan.inner,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=2,
        head_dim=plan.hidden // plan.heads,
        max_position_embeddings=plan.positions,
        rope_theta=ROPE_THETA,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="pocket_causal",
    )
    return LlamaForCausalLM(config)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights in bfloat16, config, generation config and tokenizer to ``out``."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    copy.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 4 looks for these two under other names than transformers 5 writes them
    _amend(out / "config.json", rope_theta=ROPE_THETA)
    _amend(
        out / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_input_names=["input_ids", "attention_mask"],
    )


def _amend(file: Path, **entries: object) -> None:
    content = json.loads(file.read_text("utf-8")) | entries
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _pace(plan: Plan, steps: int) -> Callable[[int], float]:
    """Return the learning-rate factor by step: linear warm-up, then linear decay over 60 %."""
    return lambda i: min(1.0, (i + 1) / plan.warmup, max(0.01, (steps - i) / (0.6 * steps)))


def _optimizer(model: LlamaForCausalLM, plan: Plan) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)


def weighted_loss(
    hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted mean loss, and the plain mean over the assistant's tokens."""
    logits = F.linear(hidden[:, :-1], head).flatten(0, 1).float()
    each = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    weight, from_assistant = weight.flatten(), (weight > 1).flatten()
    total = (each * weight).sum() / weight.sum()
    return total, (each.detach() * from_assistant).sum() / from_assistant.sum().clamp(min=1)


def begin(
    plan: Plan, tokenizer: PreTrainedTokenizerFast, seed: int, start: Path | None
) -> LlamaForCausalLM:
    """Return a fresh model, or one with the weights of the directory ``start``."""
    model = create(plan, tokenizer, seed)
    if start:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(start).state_dict())
    return model


class Trainer:
    """A trainer that holds the state of one run: model, optimizer, and what the log reports."""

    def __init__(
        self, model: LlamaForCausalLM, plan: Plan, tokenizer: Tokenizer, steps: int, device: str
    ) -> None:
        self.model, self.plan = model.to(device), plan
        self.device, cuda = device, device == "cuda"
        self.digits, self.assistant = digit_table(tokenizer).to(device), assistant_id(tokenizer)
        self.optimizer = _optimizer(model, plan)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _pace(plan, steps))
        self.starts = Random(0)  # draws where the survival loss begins
        self.loss: Callable[..., tuple[torch.Tensor, torch.Tensor]] = weighted_loss
        if cuda:  # one graph per layer and row length compiles far faster than one of all layers
            torch._dynamo.config.recompile_limit = 64
            for layer in model.model.layers:
                layer.compile(dynamic=False)
            self.loss = torch.compile(weighted_loss, dynamic=False)
        self.amp = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    def step(self, batch: torch.Tensor, marks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Learn from one batch; return the total, the answers' and the survival loss."""
        ids = batch.to(self.device, torch.long, non_blocking=True)
        weight = weights(ids, len(vocabulary.SPECIAL), self.assistant, self.digits)
        survival = torch.zeros((), device=self.device)
        with self.amp:
            hidden, inputs = hidden_states(self.model, ids)
            loss, answers = self.loss(hidden, self.model.lm_head.weight, ids, weight)
            if marks.any():
                facts = marks.to(self.device, torch.bool, non_blocking=True)
                start = self.starts.randint(ids.shape[1] // 2, ids.shape[1] - BLOCK)
                survival = survival_loss(self.model, inputs, facts, start)
        torch.autograd.backward(loss + self.plan.survival * survival)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), answers, survival.detach()


def train(
    plan: Plan,
    out: Path,
    seed: int = 0,
    device: str = "cuda",
    workers: int = 14,
    start: Path | None = None,
    text: Path | None = None,
    log_every: int = 200,
) -> list[float]:
    """Train by ``plan``, print a log, save to ``out``; return the logged losses.

    They are of the assistant's tokens; with ``text``, a folder of files that is read instead of the
    corpus, of all tokens.
    """
    texts = running_text.read(text) if text else None
    tokenizer = vocabulary.build(texts, plan.entries)
    if texts:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(out)
    model = begin(plan, tokenizer, seed, start)
    batches: Batches | running_text.Windows
    if texts:
        ids = running_text.encode(tokenizer.backend_tokenizer, texts)
        print(f"{len(texts):,} texts of {len(ids):,} tokens")
        batches, workers = running_text.Windows(ids, list(plan.stages), plan.batch, seed), 0
    else:
        batches = Batches(str(out / "tokenizer.json"), list(plan.stages), plan.batch, seed)
    prefetch = 8 if workers else None
    loader = DataLoader(batches, batch_size=None, num_workers=workers, prefetch_factor=prefetch)
    steps = len(batches)
    trainer = Trainer(model, plan, tokenizer.backend_tokenizer, steps, device)
    print(f"{model.num_parameters():,} parameters, {steps:,} steps of {plan.batch:,} tokens")
    began = clock = time.perf_counter()
    losses: list[float] = []
    recent: list[torch.Tensor] = []
    for i, (batch, marks) in enumerate(loader):
        recent.append(torch.stack(trainer.step(batch, marks)))
        if (i + 1) % log_every == 0 or i + 1 == steps:
            total, answers, survival = torch.stack(recent).mean(0).tolist()
            losses.append(total if texts else answers)
            now = time.perf_counter()
            print(
                f"step {i + 1:6,} {now - began:6.0f} s  rows of {batch.shape[1]:5}"
                f"  loss {total:.4f}  answers {answers:.4f}  survival {survival:.4f}"
                f"  {len(recent) * plan.batch / (now - clock) / M:.2f} M tokens/s",
                flush=True,
            )
            recent, clock = [], now
    save(model, tokenizer, out)
    report(model, tokenizer, plan)
    return losses


def report(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan) -> None:
    """Print recall of facts told and pasted at the lengths of the plan."""
    model.eval().to(torch.bfloat16)
    for probe in ("told", "pasted"):
        for length in plan.checks:
            share, count = recall(model, tokenizer, probe, length, 128)
            print(f"recall, {probe}, {length:,} tokens: {share:.3f} of {count}", flush=True)


def scaled(plan: Plan, scale: float) -> Plan:
    """Return ``plan`` with ``scale`` times the tokens in each stage."""
    stages = (replace(stage, tokens=int(stage.tokens * scale)) for stage in plan.stages)
    return replace(plan, stages=tuple(stages))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("pocket-out"))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, two minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    plans = parser.add_mutually_exclusive_group()
    plans.add_argument(
        "--settle", type=Path, metavar="DIR", help="go on from this model with the survival loss"
    )
    plans.add_argument("--plain", action="store_true", help="the plan of pocket-plain")
    plans.add_argument(
        "--text", type=Path, metavar="FOLDER", help="the plan of pocket-text, on these files"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="times the tokens of the plan")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.smoke:
        train(scaled(SMOKE, args.scale), args.out, args.seed, "cpu", 1, log_every=40)
    else:
        plan = SETTLE if args.settle else TEXT if args.text else PLAIN if args.plain else FULL
        plan = scaled(plan, args.scale)
        train(plan, args.out, args.seed, "cuda", args.workers, args.settle, args.text)


if __name__ == "__main__":
    main()
