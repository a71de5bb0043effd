"""Train the pocket model on one GPU: ``python -m kvcap.pocket.train --out DIR``.

``--smoke`` trains a tiny model on the CPU in about two minutes and shows that the loss falls.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import (
    AttentionInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from . import vocabulary
from .evaluate import recall
from .rows import Batches, Stage, assistant_id, digit_table, weights

M = 1_000_000


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run: shape of the model, curriculum and learning rate."""

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


FULL = Plan(
    hidden=384,
    layers=6,
    heads=6,
    inner=704,
    positions=8192,
    stages=(
        Stage(160 * M, (256,), (1,)),
        Stage(160 * M, (512, 256), (0.8, 0.2)),
        Stage(200 * M, (1024, 256), (0.8, 0.2)),
        Stage(200 * M, (2048, 512), (0.8, 0.2)),
        Stage(200 * M, (4096, 1024, 256), (0.75, 0.15, 0.1)),
        Stage(280 * M, (8192, 2048, 512), (0.75, 0.15, 0.1)),
    ),
    batch=65_536,
    rate=1.5e-3,
    warmup=150,
    checks=(256, 1024, 4096, 8192),
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
    """Plain causal attention: rows are full, so no mask is ever built. Shapes (B, H, T, D)."""
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
        rope_theta=500_000.0,
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
    theta = model.config.rope_parameters["rope_theta"]
    _amend(out / "config.json", rope_theta=theta)
    _amend(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


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


def _loss(hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor
          ) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted mean loss, and the plain mean over the assistant's tokens."""
    logits = F.linear(hidden[:, :-1], head).flatten(0, 1).float()
    each = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    weight, said = weight.flatten(), (weight > 1).flatten()
    total = (each * weight).sum() / weight.sum()
    return total, (each.detach() * said).sum() / said.sum().clamp(min=1)


def train(
    plan: Plan,
    out: Path,
    seed: int = 0,
    device: str = "cuda",
    workers: int = 14,
    start: Path | None = None,
    scale: float = 1.0,
    log_every: int = 200,
) -> list[float]:
    """Train by ``plan``, print a log, save to ``out``; return the logged losses of answers."""
    tokenizer = vocabulary.build()
    tokenizer.save_pretrained(out)
    model = create(plan, tokenizer, seed)
    if start:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(start).state_dict())
    model.to(device)
    raw, cuda = tokenizer.backend_tokenizer, device == "cuda"
    digits, assistant = digit_table(raw).to(device), assistant_id(raw)
    stages = [replace(stage, tokens=int(stage.tokens * scale)) for stage in plan.stages]
    batches = Batches(str(out / "tokenizer.json"), stages, plan.batch, seed)
    loader = DataLoader(
        batches, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None
    )
    steps = len(batches)
    optimizer = _optimizer(model, plan)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _pace(plan, steps))
    loss_of: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _loss
    if cuda:  # one graph per layer and row length compiles far faster than one of all layers
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        loss_of = torch.compile(_loss, dynamic=False)
    amp = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
    print(f"{model.num_parameters():,} parameters, {steps:,} steps of {plan.batch:,} tokens")
    began = clock = time.perf_counter()
    losses: list[float] = []
    recent: list[torch.Tensor] = []
    for i, batch in enumerate(loader):
        ids = batch.to(device, torch.long, non_blocking=True)
        weight = weights(ids, len(vocabulary.SPECIAL), assistant, digits)
        with amp:
            hidden = model.model(ids, use_cache=False).last_hidden_state
            loss, answers = loss_of(hidden, model.lm_head.weight, ids, weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(answers)
        if (i + 1) % log_every == 0 or i + 1 == steps:
            losses.append(torch.stack(recent).mean().item())
            now = time.perf_counter()
            pace = len(recent) * plan.batch / (now - clock)
            print(f"step {i + 1:6,} {now - began:6.0f} s  rows of {ids.shape[1]:5}  loss "
                  f"{loss.item():.4f}  answers {losses[-1]:.4f}  {pace / M:.2f} M tokens/s",
                  flush=True)
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


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("pocket-out"))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, two minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--start", type=Path, help="go on from this model instead of at random")
    parser.add_argument("--scale", type=float, default=1.0, help="train on this share of the tokens")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.smoke:
        train(SMOKE, args.out, args.seed, "cpu", 1, scale=args.scale, log_every=40)
    else:
        train(FULL, args.out, args.seed, "cuda", args.workers, args.start, args.scale)


if __name__ == "__main__":
    main()
