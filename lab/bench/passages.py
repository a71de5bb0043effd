"""Compares ways to rank a text's passages by a question: by words, and by vectors of the model.

`words` is the index that recall uses. The other ways compare vectors of the question, which is read
on its own, with vectors of the passages, from when the model read the text: hidden states behind
`layer` layers (0: the embedding table), or a layer's keys before rotation. Vectors are taken
relative to their mean over the text, and compared by their angle:

- `mean`: mean hidden states; `last`: that of the question's last token, with the passage's mean.
- `tokens`: for each token of the question the nearest of the passage; rare tokens weigh more.
- `bits`: as `tokens`, with the signs of `BITS` random projections, so many bits per token.
- `keys`: mean keys; `queries`: the question's mean query, with the passage's mean key.

A text of `lengths` (the first) tokens hides ten facts of `paraphrases.txt`, which questions ask for
in their `own` words and in `other` words; or it is one of the tasks `needle` (`niah_single_2`) and
`facts` (`multi_turn_facts`). These columns are the share of questions whose passage comes first;
with `_two`, first or second; with `_fused`, first by the ranks of words and of the way together;
with `_else`, first by words, or by the way if recall finds nothing by words. `bytes` is the size of
a passage's vectors in 16 bits; `ms` is the time for a question, reading it included. In the JSON
line `recalled` is the share of messages for which recall finds a passage, among them statements
that no text has. Reads `lengths`, `repeats` (rounds of all pairs, and of `DRAWN` texts per task),
`model`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import nlargest
from itertools import chain
from math import log
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvcap.evals.bench import BenchmarkOptions, Result
from kvcap.evals.measure import percentiles, seconds
from kvcap.evals.quality.text import scatter
from kvcap.lab.quality.tasks import make_samples
from kvcap.pocket.prose import filler
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.recall.recall import Passage, Recall
from kvcap.runtime.recall.store import Match, PassageStore
from kvcap.runtime.types import Span

DEFAULTS = {"lengths": (2048,), "repeats": 1, "model": "pocket"}
PAIRS = Path(__file__).parent / "paraphrases.txt"  # facts with questions in own and other words
KINDS = ("own", "other")
TASKS = {"needle": "niah_single_2", "facts": "multi_turn_facts"}
COLUMNS = (
    "way", "layer", "bytes", "ms", "own", "own_else", "other", "other_two", "other_fused",
    "other_else", "needle", "needle_fused", "facts", "facts_fused",
)  # fmt: skip
FACTS, DRAWN = 10, 6  # facts in a text; texts of a task
BITS = 256
FUSE = 10  # added to ranks before 1 / rank, so that the first few ranks are nearly equal
Text = tuple[str, list[tuple[str, str, str]]]  # a text, and messages: kind, question, fact or ""
Way = tuple[str, int | str]  # a way's name, and its layer


def run(options: BenchmarkOptions) -> Result:
    """Return a row per way and layer."""
    runtime = Runtime.from_pretrained(options.model, "streaming_llm", budget_tokens=512)
    runtime.model.set_attn_implementation("sdpa")  # so that nothing is evicted
    figures = defaultdict[Way, Any](lambda: defaultdict[str, list[float]](list))
    recalled = defaultdict[str, list[bool]](list)
    with torch.inference_mode():
        for text, messages in texts(runtime.tokenizer, options.lengths[0], options.repeats):
            passages = Passages(runtime, text)
            for kind, message, fact in messages:
                recalled[kind].append(bool(passages.recall.find(message, passages.ids)))
                if fact:
                    passages.count(kind, message, fact, figures)
    rows = []
    for (way, layer), values in figures.items():
        ms = percentiles(values.pop("ms"))
        means = {name: sum(x) / len(x) for name, x in values.items()}
        rows.append({"way": way, "layer": layer, **means, "ms": ms})
    counts = {kind: len(values[kind]) for kind in (*KINDS, *TASKS)}
    shares = {kind: sum(hits) / len(hits) for kind, hits in recalled.items()}
    derived = {"model": options.model, "tokens": options.lengths[0], "questions": counts}
    return Result("passages", COLUMNS, rows, {**derived, "recalled": shares})


def texts(tokenizer: Any, length: int, repeats: int) -> Iterator[Text]:
    """Yield texts of about `length` tokens, each with messages to ask."""
    lines = PAIRS.read_text(encoding="utf-8").splitlines()
    pairs = [[part.strip() for part in line.split("|")] for line in lines]
    for index in range(repeats):
        rng = Random(f"passages/{index}")
        rng.shuffle(pairs)
        for at in range(0, len(pairs), FACTS):
            some, others = pairs[at : at + FACTS], [*pairs, *pairs][at + FACTS : at + 2 * FACTS]
            facts, sentences, source = [fact for fact, _, _ in some], list[str](), filler(rng)
            while len(tokenizer(" ".join([*facts, *sentences]))["input_ids"]) < length:
                sentences += [next(source) for _ in range(8)]
            text = " ".join(scatter(facts, [rng.random() for _ in facts], sentences))
            messages = [(kind, q, x) for x, *qs in some for kind, q in zip(KINDS, qs, strict=True)]
            yield text, [*messages, *(("statement", fact, "") for fact, _, _ in others)]
    for kind, task in TASKS.items():
        for sample in make_samples(task, tokenizer, length, DRAWN * repeats, 0):
            text = sample.plain[: sample.plain.rfind(sample.question)]
            yield text, [(kind, sample.question, sample.answers[0])]


class Passages(PassageStore):
    """A store of a text's passages, as recall cuts and indexes them, with a model's vectors."""

    def __init__(self, runtime: Runtime, text: str) -> None:
        super().__init__()
        self.tokenizer, self.base = runtime.tokenizer, runtime.model.base_model
        self.spans, self.texts = list[Span](), list[str]()
        self.ids = self.tokenizer(text)["input_ids"]
        self.recall = Recall(self.tokenizer, self.encode, 512)
        self.recall.store = self
        self.recall.index(self.ids)
        # The token that begins a text is left out, as its vectors are unlike all others.
        self.begin = self.ids[: self.ids[0] == self.tokenizer.bos_token_id]
        self.read = hidden_states(self.base, self.ids, len(self.begin))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def add(self, span: Span, text: str) -> None:
        """Index a passage."""
        super().add(span, text)
        self.spans.append(span)
        self.texts.append(" ".join(text.split()))

    def indices(self, passages: Iterable[Match | Passage]) -> list[int]:
        """Return the indices of these passages."""
        return [self.spans.index(one.span) for one in passages]

    def rank(self, question: str) -> Iterator[tuple[Way, list[int], float, float]]:
        """Yield each way, all passages in its order, the seconds it took, and bytes per passage."""
        words, count = self.indices(self.search(question, len(self.spans))), len(self.spans)
        yield ("words", ""), words, seconds(lambda: self.search(question)), self.nbytes / count
        question_ids, skipped = self.encode(question), len(self.begin)
        having = [sum(token in self.ids[a:b] for a, b in self.spans) for token in question_ids]
        rare = torch.tensor([log(1 + (count - n + 0.5) / (n + 0.5)) for n in having])
        began = time.perf_counter()
        own = hidden_states(self.base, self.begin + question_ids, skipped)
        reading = time.perf_counter() - began
        inside = [(max(0, a - skipped), b - skipped) for a, b in self.spans]
        for way, score, size in ways(self.base, self.read, own, inside, rare):
            order = score().argsort(descending=True, stable=True).tolist()
            yield way, order, reading + seconds(score), size

    def count(self, kind: str, question: str, fact: str, figures: dict[Way, Any]) -> None:
        """Add to `figures` how well each way finds the fact that a question asks for."""
        right = [fact in text for text in self.texts]
        if not any(right):
            return  # the fact is at the end of the text, which is not indexed yet
        recalled = self.indices(self.recall.find(question, self.ids))
        words = self.indices(self.search(question, len(self.spans)))
        for way, order, took, size in self.rank(question):
            into, fused = figures[way], defaultdict[int, float](float)
            for rank, one in chain(enumerate(words), enumerate(order)):
                fused[one] += 1 / (FUSE + rank)
            both = nlargest(len(fused), fused, key=fused.__getitem__)
            into["ms"].append(1000 * took)
            into["bytes"].append(size)
            for name, some in (("", order), ("_fused", both), ("_else", recalled or order)):
                first = [right[one] for one in some[:2]]
                into[kind + name].append(any(first[:1]))
                into[f"{kind}{name}_two"].append(any(first))


def ways(
    base: Any, text: list[Tensor], question: list[Tensor], spans: Sequence[Span], rare: Tensor
) -> Iterator[tuple[Way, Callable[[], Tensor], float]]:
    """Yield each way, a function that scores all passages by it, and the bytes of a passage.

    Args:
        base: the model, without its head.
        text: hidden states of the text's tokens, [T, d] behind every layer.
        question: hidden states of the question's tokens, [T, d] behind every layer.
        spans: first token and end of each passage.
        rare: weight of each token of the question.
    """
    length, count, depth = len(text[0]), len(spans), len(base.layers)

    def means(x: Tensor) -> Tensor:
        return torch.stack([x[a:b].mean(0) for a, b in spans])

    def angles(x: Tensor, y: Tensor) -> Tensor:
        return (normalize(x, dim=-1) * normalize(y, dim=-1)).flatten(1).sum(-1)

    def nearest(x: Tensor, y: Tensor) -> Tensor:
        like = normalize(x, dim=-1) @ normalize(y, dim=-1).T  # [text tokens, question tokens]
        return torch.stack([like[a:b].amax(0) @ rare for a, b in spans])

    for layer in sorted({round(depth * part / 4) for part in range(5)}):
        x, q = text[layer] - text[layer].mean(0), question[layer] - text[layer].mean(0)
        size = x.shape[1]
        y = means(x)
        yield ("mean", layer), partial(angles, y, q.mean(0)), 2 * size
        yield ("last", layer), partial(angles, y, q[-1]), 2 * size
        yield ("tokens", layer), partial(nearest, x, q), 2 * size * length / count
        project = torch.randn(size, BITS, generator=torch.Generator().manual_seed(layer))
        bits, qbits = (x @ project).sign(), (q @ project).sign()
        yield ("bits", layer), partial(nearest, bits, qbits), BITS / 8 * length / count
    kinds = getattr(base.config, "layer_types", None) or ["full_attention"] * depth
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    for layer in sorted({full[0], full[len(full) // 2], full[-1]}):
        keys = heads(base.layers[layer], "k", text[layer])  # [T, K, D]
        middle, size = keys.mean(0), 2 * keys[0].numel()
        y, k = means(keys) - middle, heads(base.layers[layer], "k", question[layer]) - middle
        q = heads(base.layers[layer], "q", question[layer]).unflatten(1, (len(middle), -1)).mean(2)
        yield ("keys", layer), partial(angles, y, k.mean(0)), size
        yield ("queries", layer), partial(angles, y, q.mean(0)), size


def hidden_states(base: Any, ids: Sequence[int], skipped: int) -> list[Tensor]:
    """Return hidden states of all tokens but the first `skipped`, [T, d] behind every layer."""
    given = torch.tensor([ids], device=base.device)
    made = base(given, use_cache=False, output_hidden_states=True).hidden_states
    return [x[0, skipped:].float() for x in made]


def heads(layer: Any, name: str, hidden: Tensor) -> Tensor:
    """Return a layer's unrotated keys ('k') or queries ('q') of hidden states, [T, heads, D].

    Raises:
        ValueError: the layer does not compute them by one projection of its input.
    """
    attention = layer.self_attn
    if not (hasattr(attention, f"{name}_proj") and hasattr(layer, "input_layernorm")):
        raise ValueError(
            f"{type(layer).__name__} does not project keys as Llama, Qwen 3 and Gemma 3 do; give "
            "`bench passages` a model of such a family"
        )
    projection = getattr(attention, f"{name}_proj")
    x = projection(layer.input_layernorm(hidden.to(projection.weight.dtype)))
    norm = getattr(attention, f"{name}_norm", torch.nn.Identity())
    return cast(Tensor, norm(x.unflatten(-1, (-1, attention.head_dim))).float())
