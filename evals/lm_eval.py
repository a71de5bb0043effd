"""Runs kvcap's models in lm-evaluation-harness: `kvcap lm-eval --model kvcap --model_args ...`.

Log-likelihoods and answers are those of a model under its cap: a context is read in blocks and
evicted down to the budget, and its continuation is read after the kept tokens. Requests of a batch
have equal lengths, as kvcap pads nothing. Needs the extra `lm-eval`.

lm-eval has no entry point for models of other packages, but if kvcap is imported first, the name is
in lm-eval's registry once lm-eval fills it. `kvcap lm-eval` runs lm-eval's own command line in such
a process.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcap import __version__
from kvcap.policies import PINS, load_policy
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.backends.pytorch.runtime import Runtime
from kvcap.runtime.cache.cache import BudgetCache
from kvcap.runtime.cache.settings import CacheSettings
from kvcap.runtime.errors import ChatTemplateMissing, ExtraMissing, how_to_install
from kvcap.runtime.session import settings
from kvcap.runtime.session.decoding import TextStream
from kvcap.runtime.session.messages import render
from kvcap.runtime.types import DEFAULT_POLICY, POCKET, Message

NAME = "kvcap"
OF_CACHE = {f.name for f in fields(CacheSettings)} - {"policy", "sink_tokens"}
MAX_GEN_TOKS = 256  # lm-eval's own default
LEAST = 128  # the cache of a policy that never evicts has a multiple of so many slots

Pair = tuple[Any, list[int], list[int]]  # a request's name, its context and its continuation

if TYPE_CHECKING:
    TemplateLM = Any
else:
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError:  # `require` raises the error that names it
        TemplateLM = object


def require() -> None:
    """Check for lm-eval.

    Raises:
        ExtraMissing: lm-eval is not installed.
    """
    if TemplateLM is object:
        raise ExtraMissing(
            f"this needs lm-eval, which is not installed; {how_to_install('lm-eval')}"
        )


class KvcapLM(TemplateLM):  # type: ignore[misc]
    """A model under a cap that lm-eval can ask.

    Args:
        pretrained: 'pocket', a local directory, or a repository of the hub.
        policy: a name (see `kvcap policies`). One that never evicts, such as 'full', runs uncapped.
        dtype: 'float32', 'bfloat16' or 'float16'; 'auto' and None mean the checkpoint's.
        device: 'cpu', 'cuda' or 'mps'; the best there is by default.
        batch_size: requests of equal lengths that are read at once.
        max_length: most tokens of a request; the first ones of its context are cut off. By default
            the model's trained length, as in lm-eval's own models.
        max_gen_toks: most tokens of an answer, if a task does not set it.
        add_bos_token: whether texts begin with the opening token; the tokenizer decides by default.
        prefix_token_id: the token before a text without a context; by default the opening token, or
            else the one that ends a text.
        options: settings of a sequence's cache by the names of `CacheSettings`, but for sinks; and
            options of the policy, such as `sink_tokens=4` (0 by default).

    Raises:
        ExtraMissing: lm-eval is not installed.
        ModelNotFound, ModelFilesBroken, UnsupportedModel, PlanInfeasible, PolicyError: the model or
            the policy cannot be used so; weights are not read. An unknown argument counts as an
            option of the policy.
        ValueError: naming a value that cannot be used.
    """

    backend = "causal"

    def __init__(
        self,
        pretrained: str = POCKET,
        policy: str = DEFAULT_POLICY,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        require()
        super().__init__()
        if options.pop("trust_remote_code", False):
            raise ValueError("trust_remote_code: code that comes with a model is not run")
        self.batch_size = _count("batch_size", batch_size)
        named = {name: options.pop(name) for name in OF_CACHE if name in options}
        if named.get("positions") is True:  # lm-eval parses positions=true so
            named["positions"] = "true"
        eviction = load_policy(policy, **options).plain()
        self.capped = eviction.policy.evicts
        if not self.capped and named.keys() & {"budget_tokens", "kv_budget"}:
            raise ValueError(f"policy={policy!r} never evicts; leave its budget out, or choose one")
        self.runtime = Runtime.from_pretrained(
            pretrained,
            CacheSettings(policy=eviction, **named),
            dtype=None if dtype == "auto" else dtype,
            device=device,
        )
        self.tokenizer = self.runtime.tokenizer
        self.max_length = _count("max_length", max_length or self.runtime.trained_length)
        self.max_gen_toks = _count("max_gen_toks", max_gen_toks)
        self.add_bos_token = add_bos_token
        self._prefix = prefix_token_id
        self._name = str(pretrained)
        self._device = self.runtime.model.device
        self._loop: BlockLoop | None = None  # that of the last batch
        self._rng = self.runtime.rng(torch.initial_seed() % 2**63)  # lm-eval's --seed
        self._cut = False  # whether the warning on cut contexts was given

    def get_model_info(self) -> dict[str, Any]:
        """Return the cap, which lm-eval writes to its results."""
        plan, eviction = self.runtime.plan, self.runtime.settings.eviction
        options = {name: getattr(eviction, name) for name in PINS}
        for part in eviction.components:
            options |= part.options()
        return {
            "model_num_parameters": self.runtime.model.num_parameters(),
            "model_dtype": plan.dtype,
            "kvcap": {
                "version": __version__,
                "policy": eviction.name,
                "options": options,
                "budget_tokens": plan.budget_tokens if self.capped else None,
                "kv_bytes": plan.cache_bytes if self.capped else None,  # bytes of one sequence
                "block_size": plan.block_size,
                "positions": plan.positions if self.capped else "true",
                "kv_dtype": plan.kv_dtype,
                "evict_every": self.runtime.settings.evict_every,
                "max_length": self.max_length,
            },
        }

    # Text and tokens

    @property
    def eot_token_id(self) -> int | None:
        """Return the token that ends a text."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text without a context.

        Raises:
            ValueError: the tokenizer has no such token, and none was set.
        """
        candidates = (self._prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        token = next((token for token in candidates if token is not None), None)
        if token is None:
            raise ValueError("this tokenizer opens and ends no text; give prefix_token_id=NUMBER")
        return token

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer's name, by which lm-eval caches prompts."""
        return self._name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return a text's token ids, with the opening token once if the tokenizer adds it."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        opening = self.tokenizer.bos_token
        if add_special_tokens is None and opening and string.startswith(opening):
            special = False
        given = {} if special is None else {"add_special_tokens": special}
        ids: list[int] = self.tokenizer(string, **given)["input_ids"]
        return ids

    def apply_chat_template(
        self, chat_history: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation as the model's template writes it.

        Args:
            chat_history: the messages.
            add_generation_prompt: whether to end with the opening of an answer; else the last
                message, of the assistant, is left open to be continued.

        Raises:
            ChatTemplateMissing: there is no template, or it fails on these messages.
        """
        try:
            return _rendered(self.tokenizer, chat_history, add_generation_prompt)
        except ChatTemplateMissing:
            messages = [message for message in chat_history if message["role"] != "system"]
            if len(messages) == len(chat_history):
                raise
            text = _rendered(self.tokenizer, messages, add_generation_prompt)
        warnings.warn(
            "this model's chat template takes no system prompt; it is left out", stacklevel=2
        )
        return text

    # Log-likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability, and whether greedy decoding would write it.

        Requests that differ only in the last token, such as letters of choices, are read once.
        """
        pairs = [self._fitting(context, after) for _, context, after in requests]
        alike: dict[tuple[Any, Any], list[int]] = {}  # requests by the tokens that are read
        for index, (context, after) in enumerate(pairs):
            alike.setdefault((tuple(context), tuple(after[:-1])), []).append(index)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        groups = _groups(alike, lambda key: (len(key[0]), len(key[1])))
        with _progress(len(requests), "loglikelihood", disable_tqdm) as bar:
            for batch in _batches(groups, self.batch_size):
                rows = [[pairs[index] for index in alike[key]] for key in batch]
                for key, answers in zip(batch, self._score(rows), strict=True):
                    for index, answer in zip(alike[key], answers, strict=True):
                        results[index] = answer
                        if (request := requests[index][0]) is not None:
                            self.cache_hook.add_partial("loglikelihood", request, answer)
                    bar.update(len(answers))
        return results

    def _fitting(self, context: list[int], after: list[int]) -> tuple[list[int], list[int]]:
        """Return a pair that fits `max_length`, by cutting the first tokens of its context."""
        most = self.max_length + 1 - len(after)  # the last token is not read
        if most < 1:
            raise ValueError(
                f"a continuation of {len(after):,} tokens does not fit max_length="
                f"{self.max_length:,}; raise it"
            )
        if not context or not after:
            raise ValueError("there is no token to read, or none to score")
        return self._last(context, most), after

    def _last(self, context: list[int], most: int) -> list[int]:
        """Return the last `most` tokens of a context; warn the first time that it is cut."""
        if len(context) > most and not self._cut:
            self._cut = True
            warnings.warn(
                f"a context of {len(context):,} tokens is cut to its last {most:,}, and so may be "
                f"others: max_length is {self.max_length:,}; raise it to read them whole",
                stacklevel=2,
            )
        return context[-most:]

    @torch.inference_mode()
    def _score(
        self, rows: Sequence[Sequence[tuple[list[int], list[int]]]]
    ) -> list[list[tuple[float, bool]]]:
        """Read a batch, and score it; the pairs of a row differ only in the last token."""
        contexts = self._ids([row[0][0] for row in rows])
        afters = self._ids([row[0][1] for row in rows])
        loop = self._empty_loop(len(rows), contexts.shape[1] + afters.shape[1])
        logits = loop.prefill(contexts)[:, None]  # [B, 1, V] of the next token
        sums = torch.zeros(len(rows), dtype=torch.float64)
        greedy = torch.ones(len(rows), dtype=torch.bool)
        done, last = 0, afters.shape[1] - 1
        while True:
            tokens = afters[:, done : min(done + logits.shape[1], last)]
            for row, wanted in enumerate(tokens):
                scores = logits[row, : len(wanted)].float().log_softmax(-1)
                sums[row] += scores.gather(1, wanted[:, None]).double().sum().cpu()
                greedy[row] &= bool((scores.argmax(-1) == wanted).all())
            done += logits.shape[1]
            if done > last:
                break
            logits = loop.read_every(afters[:, done - 1 : min(done - 1 + loop.cache.room, last)])
        results = []
        for row, pairs in enumerate(rows):
            scores = logits[row, -1].float().log_softmax(-1)
            best = int(scores.argmax())
            results.append(
                [
                    (float(sums[row] + scores[after[-1]]), bool(greedy[row]) and best == after[-1])
                    for _, after in pairs
                ]
            )
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return whole texts' log-probabilities, in windows of `max_length` as lm-eval cuts."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[Pair] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, cut):
                windows.append((None, *window))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for index, (score, _) in zip(owners, scores, strict=True):
            totals[index] += score
        for request, score in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
        return totals

    # Answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer each prompt, up to the first of the texts that end it.

        Raises:
            ValueError, UnsupportedModel: naming a setting of generation that cannot be used.
        """
        prompts, groups = [], dict[tuple[int, str], list[int]]()
        for index, request in enumerate(requests):
            context, given = request.args
            key = json.dumps(given, sort_keys=True, default=str)
            most = self._settings(given)[2]
            prompts.append(self._last(self.tok_encode(context), self.max_length - most))
            groups.setdefault((-len(prompts[-1]), key), []).append(index)
        answers = [""] * len(requests)
        ordered = [groups[key] for key in sorted(groups)]  # the longest prompts first
        with _progress(len(requests), "generate_until", disable_tqdm) as bar:
            for batch in _batches(ordered, self.batch_size):
                given = requests[batch[0]].args[1]
                texts = self._write([prompts[index] for index in batch], *self._settings(given))
                for index, text in zip(batch, texts, strict=True):
                    answers[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                bar.update(len(batch))
        return answers

    def _settings(self, given: Mapping[str, Any]) -> tuple[Any, list[str], int]:
        """Return settings of generation, texts that end an answer, and its most tokens."""
        from lm_eval.models.utils import normalize_gen_kwargs

        wanted = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        until = [text for text in wanted.pop("until") if text]
        most = wanted.pop("max_gen_toks")
        if not 1 <= most < self.max_length:
            raise ValueError(
                f"max_gen_toks={most} will not work; give 1 or more, below max_length="
                f"{self.max_length}"
            )
        known = {name: value for name, value in wanted.items() if name in settings.NAMES}
        settings.check(known)
        config = copy.deepcopy(self.runtime.generation)
        if unknown := config.update(**wanted):
            raise ValueError(f"no setting of generation {', '.join(map(repr, unknown))}")
        return config, until, most

    @torch.inference_mode()
    def _write(
        self, prompts: Sequence[list[int]], config: Any, until: list[str], most: int
    ) -> list[str]:
        """Return answers to prompts of equal lengths."""
        history = self._ids(prompts)
        sampler = self.runtime.sampler(config, self._rng)
        loop = self._empty_loop(len(prompts), history.shape[1] + most)
        ends = settings.end_tokens(config) | {self.eot_token_id}
        streams = [TextStream(self.tokenizer, until, prompt) for prompt in prompts]
        texts, going = [""] * len(prompts), set(range(len(prompts)))
        logits = loop.prefill(history)
        for step in range(1, most + 1):
            tokens = sampler.next(logits, history)  # [B]
            for row, token in enumerate(tokens.tolist()):
                if row not in going:
                    continue
                texts[row] += "" if token in ends else streams[row].put(token)
                if token in ends or streams[row].stopped:
                    going.discard(row)
            if not going or step == most:
                break
            if sampler.recipe is None:
                history = torch.cat((history, tokens[:, None]), dim=1)
            logits = loop.read(tokens[:, None])
        return [text + stream.end() for text, stream in zip(texts, streams, strict=True)]

    # Reading

    def _ids(self, rows: Sequence[list[int]]) -> Tensor:
        return torch.tensor(rows, device=self.runtime.model.device)

    def _empty_loop(self, batch: int, tokens: int) -> BlockLoop:
        """Return a loop over an empty cache, with room for `tokens` if the policy never evicts."""
        loop = self._loop
        if (
            loop is not None
            and loop.cache.allocation.batch == batch
            and (self.capped or loop.cache.layout.budget_tokens >= tokens)
        ):
            loop.cache.reset()
            return loop
        self._loop = loop = None  # free its memory before the next one is allocated
        runtime = self.runtime
        cache = runtime.new_cache(batch) if self.capped else self._whole_cache(batch, tokens)
        self._loop = BlockLoop(runtime.model, cache)
        return self._loop

    def _whole_cache(self, batch: int, tokens: int) -> BudgetCache:
        """Return a cache that holds all tokens of a request."""
        model, slots = self.runtime.model, -(-tokens // LEAST) * LEAST
        cache = BudgetCache(
            model.config, self.runtime.settings, budget_tokens=slots, positions="true"
        )
        return cache.allocate(batch, model.dtype, model.device)


def _count(name: str, value: Any) -> int:
    """Return a setting as a whole number of at least 1; it may be a text.

    Raises:
        ValueError: the value is no such number.
    """
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or str(count) != str(value):
        raise ValueError(f"{name}={value!r} will not work; give a whole number from 1")
    return count


def _rendered(tokenizer: Any, messages: Sequence[Message], prompt: bool) -> str:
    """Return messages as the template writes them, up to the last message without a `prompt`."""
    text = render(tokenizer, messages, prompt=prompt)
    if prompt:
        return text
    last = str(messages[-1]["content"]).strip()
    head, separator, _ = text.rpartition(last)
    if not separator:
        raise ChatTemplateMissing("this chat template changes the last message, which is to go on")
    return head + last


def _groups(keys: Iterable[Any], shape: Any) -> list[list[Any]]:
    """Group keys by shape, and sort the groups by length, the longest first."""
    groups: dict[Any, list[Any]] = {}
    for key in keys:
        groups.setdefault(shape(key), []).append(key)
    return [groups[size] for size in sorted(groups, reverse=True)]


def _batches(groups: Iterable[list[Any]], size: int) -> Iterator[list[Any]]:
    for group in groups:
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _progress(total: int, name: str, off: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=off, desc=f"Running {name} requests")


def main(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with the model `kvcap`, which is also the default.

    Raises:
        ExtraMissing: lm-eval is not installed.
    """
    require()
    from lm_eval.__main__ import cli_evaluate

    given = list(arguments)
    names = {argument.split("=")[0] for argument in given}
    runs = bool(given) and given[0] not in ("ls", "validate", "-h", "--help")
    if runs and not names & {"--model", "-M", "--config", "-C", "-h", "--help"}:
        given += ["--model", NAME]
    sys.argv = ["lm_eval", *given]
    cli_evaluate()
