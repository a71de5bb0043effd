"""GGUF files: read as transformers reads them, planned as what they become, damaged ones named."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import tiny_config
from make import argv
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tools import goes_on
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from kvcap import BudgetCache, Runtime, pocket
from kvcap.cli import run
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.errors import ExtraMissing, ModelFilesBroken, PlanInfeasible, UnsupportedModel
from kvcap.runtime.models import gguf as gguf_files
from kvcap.runtime.models.files import encode, load_config, load_model, load_packed, load_tokenizer
from kvcap.runtime.models.splits import check_words
from kvcap.runtime.models.weights import held_weights, read_headers, weigh
from kvcap.runtime.session.settings import end_tokens

INSTALLED = all(importlib.util.find_spec(name) for name in gguf_files.NEEDED)
needs_gguf = pytest.mark.skipif(not INSTALLED, reason="needs gguf and accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")  # of what reads them
SIGNS = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2, TEKKEN = (  # as the tokenizer.json of these models has it
    pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(one), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    for one in (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
        + SIGNS,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + SIGNS,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
HEADS, LAYERS, HIDDEN = 4, 2, 64  # as of all small models


def write(
    path: Path,
    *,
    architecture: str = "llama",
    parts: int = 0,
    vocabulary: bool = True,
    tensors: bool = True,
    without: str = "none",
    factors: bool = False,
    eos: int | None = None,
    kinds: tuple[str, ...] = ("Q8_0",),
    biases: bool = False,
    extra: str = "",
    splits: str = "smollm",
) -> LlamaForCausalLM:
    """A random Llama with the built-in model's tokenizer, its matrices in these types in turn.

    Returns it with the numbers that were written before they were rounded.
    """
    import gguf

    tokenizer = AutoTokenizer.from_pretrained(pocket.path())
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    sizes = {"vocab_size": len(words), "attention_bias": biases, "mlp_bias": biases}
    config = tiny_config("llama", rms_norm_eps=1e-5, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    weights = model.state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(words))
    if parts:
        writer.add_uint16("split.count", parts)
    if vocabulary:
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        special = set(tokenizer.all_special_ids)
        writer.add_tokenizer_model("gpt2")
        if splits:
            writer.add_tokenizer_pre(splits)
        writer.add_token_list(words)
        writer.add_token_types([3 if i in special else 1 for i in range(len(words))])
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_eos_token_id(tokenizer.eos_token_id if eos is None else eos)
        writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    if factors:
        writer.add_tensor("rope_freqs.weight", torch.ones(HIDDEN // HEADS // 2).numpy())
    if extra:
        writer.add_tensor(extra, torch.ones(HIDDEN).numpy())
    types = cycle(kinds)
    for name, tensor in weights.items() if tensors else ():
        if without in name:
            continue
        stem, _, end = name.rpartition(".")
        tensor.copy_(0.15 * torch.randn_like(tensor) + ("norm" in name))
        values = tensor.numpy()
        if "q_proj" in stem or "k_proj" in stem:  # llama.cpp has pairs that rotate side by side
            values = values.reshape(-1, 2, HIDDEN // HEADS // 2, *values.shape[1:]).swapaxes(1, 2)
            values = np.ascontiguousarray(values).reshape(tensor.shape)
        if tensor.dim() == 1:
            writer.add_tensor(f"{names.get_name(stem)}.{end}", values)
        else:
            kind = gguf.GGMLQuantizationType[next(types)]
            packed = gguf.quantize(values, kind)
            writer.add_tensor(f"{names.get_name(stem)}.{end}", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path)
    return str(path)


@needs_gguf
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_planned_as_what_it_becomes(file, dtype):
    config = load_config(file)
    assert read_headers(file) is None
    planned = weigh(config, dtype)
    model = load_model(file, config, dtype)
    assert planned.nbytes == held_weights(model).nbytes
    assert {p.dtype for p in model.parameters()} == {dtype}
    stored = gguf_files.read_gguf(file)
    assert (stored.architecture, stored.numbers) == ("llama", "Q8_0")
    assert stored.nbytes == pytest.approx(planned.nbytes / dtype.itemsize * 34 / 32, rel=0.02)


@needs_gguf
def test_its_logits_are_those_of_transformers_own_load(file):
    path = Path(file)
    expected = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        attn_implementation="eager",
        dtype=torch.float32,
        **gguf_files.loading(),
    ).eval()
    model = load_model(file, load_config(file), torch.float32).eval()
    ids = torch.randint(3, 2000, (1, 40))
    loop = BlockLoop(model, BudgetCache(model.config, 48, 16))
    with torch.no_grad():
        last = expected(ids).logits[:, -1]
    assert (loop.prefill(ids) - last).abs().max() < 1e-4
    assert last.abs().max() > 1


@needs_gguf
def test_biases_of_a_file_are_the_models(tmp_path):
    """As Granite code's files have them, whose architecture is 'llama'."""
    path, ids = tmp_path / "biased.gguf", torch.randint(3, 2000, (1, 40))
    with torch.inference_mode():
        expected = write(path, biases=True, kinds=("F32",))(ids).logits[:, -1]
        config = load_config(str(path))
        model = load_model(str(path), config, torch.float32).eval()
        logits = BlockLoop(model, BudgetCache(model.config, 48, 16)).prefill(ids)
    assert (logits - expected).abs().max() < 1e-4 < expected.abs().max()


@needs_gguf
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"biases": True, "without": "o_proj.bias"}, r"blk\.N\.attn_k\.bias, .*attn_v\.bias;"),
        ({"extra": "blk.1.attn_sub_norm.weight"}, r": blk\.N\.attn_sub_norm\.weight;"),
        ({"extra": "output_scale"}, r": output_scale;"),
    ],
)
def test_tensors_that_a_model_does_not_use_are_refused_by_name(tmp_path, kvcap, given, named):
    path = tmp_path / "x.gguf"
    write(path, **given)
    with pytest.raises(UnsupportedModel, match=named):
        load_config(str(path))
    assert "does not use" in kvcap.refused("plan", str(path), "--backend", "torch")


HARD = "\n 5\r\n\n  a  1234567 We'LL don't HELLOworld's x+=\t\t\"//\n\n    caf\u00e9 \u6f22\u304b. "
HARD += "\u0664\u00bd\u2026\u3000!"
DIGITS, BYTES = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)


@needs_gguf
@pytest.mark.parametrize(
    ("name", "true"),
    [
        ("smollm", pre_tokenizers.Sequence([DIGITS, BYTES])),
        ("gpt-2", BYTES),
        *((name, LLAMA3) for name in ("llama-bpe", "dbrx")),
        ("qwen2", QWEN2),
        ("tekken", TEKKEN),
    ],
)
def test_text_is_split_as_a_file_names_it(tmp_path, name, true):
    path = tmp_path / f"{name}.gguf"
    write(path, splits=name)
    backend = load_tokenizer(str(path)).backend_tokenizer
    assert [x for x, _ in backend.pre_tokenizer.pre_tokenize_str(HARD)] == [
        x for x, _ in true.pre_tokenize_str(HARD)
    ]
    assert backend.model.ignore_merges == (name in ("llama-bpe", "tekken"))
    assert backend.decode(backend.encode(HARD).ids) == HARD


@needs_gguf
@pytest.mark.parametrize(("name", "message"), [("next", "as 'next'"), ("", "does not say how")])
def test_an_unknown_way_to_split_text_is_refused(tmp_path, kvcap, name, message):
    path = tmp_path / "x.gguf"
    write(path, splits=name)
    with pytest.raises(UnsupportedModel, match=f"{message}.*known: llama3, "):
        load_tokenizer(str(path))
    assert "tokenizer.ggml.pre" in kvcap.refused("chat", str(path), "--backend", "torch")


@needs_gguf
@pytest.mark.parametrize(("name", "opens"), [("llama-bpe", True), ("smollm", False)])
def test_a_token_opens_a_text_where_it_does_by_default(tmp_path, name, opens):
    path = tmp_path / "opened.gguf"
    write(path, splits=name)
    tokenizer = load_tokenizer(str(path))
    assert encode(tokenizer, "one") == (
        [tokenizer.bos_token_id] * opens,
        tokenizer("one", add_special_tokens=False).input_ids,
    )


@needs_gguf
def test_unpacking_it_shows_no_progress_where_transformers_shows_none(file, capfd):
    logging.disable_progress_bar()
    try:
        load_model(file, load_config(file), torch.float32)
    finally:
        logging.enable_progress_bar()
    assert capfd.readouterr().err == ""


@needs_gguf
def test_it_is_parsed_once_while_it_stays_as_it_is(file, tmp_path, monkeypatch):
    import gguf

    parsed = []
    header_class = gguf_files.header_class()
    begin = header_class.__init__

    def noted(header, path):
        parsed.append(Path(path).name)
        begin(header, path)

    monkeypatch.setattr(header_class, "__init__", noted)
    own = gguf.GGUFReader
    copied = tmp_path / "a.gguf"
    shutil.copyfile(file, copied)
    load_tokenizer(str(copied))
    Runtime.from_pretrained(copied, budget_tokens=32, block_size=16, device="cpu")
    assert parsed == ["a.gguf"]
    assert gguf.GGUFReader is own
    write(copied, eos=7)  # another file of that name
    assert load_config(str(copied)).eos_token_id == 7
    assert parsed == ["a.gguf"] * 2


def write_fields(path: Path, endian: str = "<", version: int = 3) -> None:
    """A file with a field of every type that there is, and tensors of several."""
    import gguf

    order = gguf.GGUFEndian.LITTLE if endian == "<" else gguf.GGUFEndian.BIG
    writer = gguf.GGUFWriter(path, "llama", endianess=order)
    kinds = gguf.GGUFValueType
    values = {
        kinds.UINT8: 200,
        kinds.INT8: -100,
        kinds.UINT16: 60_000,
        kinds.INT16: -30_000,
        kinds.UINT32: 4_000_000_000,
        kinds.INT32: -2_000_000_000,
        kinds.FLOAT32: 0.1,
        kinds.BOOL: True,
        kinds.STRING: "caf\u00e9",
        kinds.UINT64: 1 << 63,
        kinds.INT64: -(1 << 62),
        kinds.FLOAT64: 0.1,
    }
    for kind, value in values.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
        several = [value] * 3 if kind != kinds.STRING else ["", "\u6f22", "z" * 300]
        writer.add_key_value(f"list.{kind.name}", several, kinds.ARRAY, sub_type=kind)
    writer.add_custom_alignment(64)
    numbers = np.arange(3 * 256, dtype=np.float32).reshape(3, 256) / 100
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q5_0):
        writer.add_tensor(kind.name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("half", numbers.astype(np.float16))
    writer.add_tensor("vector", numbers[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + struct.pack(f"{endian}I", version) + whole[8:])


@needs_gguf
@pytest.mark.parametrize("version", [2, 3])
def test_fields_and_tensors_are_those_that_the_package_reads(tmp_path, version):
    import gguf
    from transformers.integrations.ggml import _gguf_parse_value as parse

    path = tmp_path / "x.gguf"
    write_fields(path, version=version)
    own, true = gguf_files.header(path), gguf.GGUFReader(path)
    assert list(own.fields) == list(true.fields)
    for name, field in true.fields.items():
        own_field = own.fields[name]
        assert own_field.contents() == field.contents()
        assert own_field.types == field.types
        mine, theirs = (
            [parse(x.parts[i], [int(kind) for kind in x.types]) for i in x.data]
            for x in (own_field, field)
        )
        assert mine == theirs
    for own_field, tensor in zip(own.tensors, true.tensors, strict=True):
        for name in ("name", "tensor_type", "n_elements", "n_bytes", "data_offset"):
            assert getattr(own_field, name) == getattr(tensor, name)
        assert list(own_field.shape) == list(tensor.shape)
        assert own_field.data.dtype == tensor.data.dtype
        assert (own_field.data == tensor.data).all()
    assert {x.data_offset % 64 for x in own.tensors} == {0}


@needs_gguf
def test_it_chats_and_says_what_it_becomes(file, tmp_path, kvcap):
    plan = ["plan", file, "--backend", "torch", "--budget-tokens", "32", "--dtype", "float32"]
    output = kvcap(*plan)[1]
    assert "of Q8_0 in the file become" in output
    assert "of float32 in memory" in output
    planned = kvcap.document(*plan)
    assert planned["file_type"] == "Q8_0"
    assert planned["file_bytes"] < planned["weights"] / 3
    command = ["generate", file, "one two three", "--max-new-tokens", "4", "--device", "cpu"]
    assert "of Q8_0 in the file become" in kvcap(*command, "--backend", "torch")[2]
    runtime = Runtime.from_pretrained(file, budget_tokens=32, block_size=16, device="cpu")
    assert runtime.plan.weights == held_weights(runtime.model).nbytes
    own = AutoTokenizer.from_pretrained(pocket.path())
    text = "Please remember: the code for the blue door is 4821."
    bare = {"add_special_tokens": False}
    assert runtime.tokenizer(text, **bare).input_ids == own(text, **bare).input_ids
    # transformers 4.57 takes the token that opens a text for the one that ends it, too.
    assert end_tokens(runtime.generation) - {own.bos_token_id} == {own.eos_token_id}
    goes_on(runtime, tmp_path)


@needs_gguf
def test_its_weights_are_rounded_in_pytorch(file):
    true = load_model(file, load_config(file), torch.float32).state_dict()
    given = {"weights": "int8", "dtype": "float32", "budget_tokens": 32, "block_size": 16}
    runtime = Runtime.from_pretrained(file, **given)
    assert runtime.plan.weights == held_weights(runtime.model).nbytes
    held = runtime.model.model.layers[1].self_attn.q_proj.matrix
    own = true["model.layers.1.self_attn.q_proj.weight"]
    assert (held.lookup(torch.arange(held.rows)) - own).abs().max() <= own.abs().max() / 127


@needs_gguf
def test_it_is_unpacked_only_where_a_cap_has_room_for_that(file):
    config = load_config(file)
    room = 2 * weigh(config, torch.float32).nbytes
    for load in (load_model, partial(load_packed, kind="int8")):
        with pytest.raises(PlanInfeasible, match=r"unpacking .* more than the cap leaves"):
            load(file, config, torch.bfloat16, room=room)
        assert load(file, config, torch.bfloat16, room=room + Path(file).stat().st_size)


@needs_gguf
@pytest.mark.slow(ci=0)
def test_an_export_is_that_of_the_unpacked_model(file, tmp_path):
    given = ["--budget-tokens", "12", "--block-size", "4", "--quick", "--dtype", "int4"]
    load_model(file, load_config(file), torch.float32).save_pretrained(tmp_path / "unpacked")
    load_tokenizer(file).save_pretrained(tmp_path / "unpacked")
    tensors = []
    for i, model in enumerate((file, str(tmp_path / "unpacked"))):
        out = tmp_path / str(i)
        assert run(["export", "decoder", model, "-o", str(out), *given]) == 0
        graph = onnx.load(str(out / "decoder.onnx")).graph
        tensors.append({x.name: x.raw_data for x in graph.initializer if len(x.raw_data) > 8})
    assert tensors[0] == tensors[1]


def test_who_asks_onnx_runtime_for_it_is_told_what_runs_it(tmp_path, kvcap):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF and more")
    line = kvcap.refused("plan", str(path), "--backend", "onnxruntime")
    assert "llama.cpp's library runs by default" in line


@needs_gguf
def test_it_is_evaluated_and_says_what_it_becomes(file, tmp_path, kvcap):
    command = argv(
        "eval {} --backend torch --policies keydiff --budgets 32 --block-size "
        "16 --tasks perplexity,niah_single --lengths 128 --samples 2 "
        "--max-new-tokens 2 --positions true --device cpu --out {} --json",
        file,
        tmp_path,
    )
    code, out, err = kvcap(*command)
    assert code == 0
    assert "of Q8_0 in the file become" in err
    perplexity, recall = json.loads(out)
    assert 1 < perplexity["score"] < 1e6
    assert 0 <= recall["score"] <= 1


@needs_gguf
def test_an_answer_ends_at_the_control_token_that_its_template_writes(tmp_path, kvcap):
    """Which is none of those that the fields name."""
    path, own = tmp_path / "model.gguf", AutoTokenizer.from_pretrained(pocket.path())
    write(path, eos=own.pad_token_id)
    assert own.pad_token_id != own.eos_token_id
    runtime = Runtime.from_pretrained(path, budget_tokens=32, block_size=16, device="cpu")
    ends = end_tokens(runtime.generation) - {own.bos_token_id}
    assert ends == {own.pad_token_id, own.eos_token_id}
    printed = kvcap.document("plan", str(path), "--backend", "torch")["end_tokens"]
    assert {end["text"] for end in printed} - {own.bos_token} == {own.pad_token, own.eos_token}


@needs_gguf
def test_what_is_damaged_or_foreign_is_named(file, tmp_path, kvcap):
    whole = Path(file).read_bytes()
    path = tmp_path / "x.gguf"
    version, counts = b"GGUF" + struct.pack("<I", 99), b"\xff" * 16
    cut = [whole[: len(whole) // 2], whole[:100], b"GGUF"]
    for data in (*cut, whole[:8] + counts + whole[24:], version + whole[8:]):
        path.write_bytes(data)
        with pytest.raises(ModelFilesBroken, match="damaged GGUF file or was cut short"):
            load_config(str(path))
        kvcap.refused("plan", str(path), "--backend", "torch")
    write_fields(path, endian=">")
    with pytest.raises(UnsupportedModel, match="big-endian"):
        load_config(str(path))
    write_fields(path)
    data = path.read_bytes().split(b"general.alignment")
    path.write_bytes(b"general.alignment".join((data[0], data[1][:4] + b"\x30" + data[1][5:])))
    with pytest.raises(ModelFilesBroken, match="power of two"):
        load_config(str(path))
    for given, says in (
        ({"architecture": "sonnet"}, "'sonnet', which transformers does not read"),
        ({"architecture": "gpt2"}, r"'gpt2'.*supported"),
        ({"parts": 3}, r"one of 3 parts.*--merge"),
        ({"tensors": False}, "holds no model"),
        ({"factors": True}, "stretches its rotary embedding"),
    ):
        write(path, **given)
        with pytest.raises(UnsupportedModel, match=says):
            load_config(str(path))
    write(path, without="layers.1.mlp.up_proj")
    with pytest.raises(ModelFilesBroken, match=r"lack model\.layers\.1\.mlp\.up_proj"):
        load_model(str(path), load_config(str(path)), torch.float32)
    write(path, vocabulary=False)
    with pytest.raises(ModelFilesBroken, match="tokenizer"):
        Runtime.from_pretrained(path, budget_tokens=32, device="cpu")


@pytest.mark.parametrize("read", [load_config, load_tokenizer, gguf_files.header])
def test_the_missing_package_is_named_before_anything_is_loaded(read, tmp_path, monkeypatch, kvcap):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF and more")
    monkeypatch.setattr(gguf_files, "NEEDED", ("gguf_that_is_not_there", "accelerate"))
    with pytest.raises(
        ExtraMissing, match=r"needs gguf_that_is_not_there.* not installed here.*'\.\[gguf\]'"
    ):
        read(str(path))
    assert "'.[gguf]'" in kvcap.refused("chat", str(path), "--backend", "torch", code=1)


def test_a_tokenizer_that_cuts_up_its_own_words_is_refused():
    """Transformers 5.17 makes such a one of Gemma 3's files."""
    words = ["▁" + a + b + a for a in "abcdefg" for b in "hijklmn"]
    pieces = ["▁", *"abcdefghijklmnI", *words]

    def made(whole: bool) -> PreTrainedTokenizerFast:
        vocabulary = {piece: token for token, piece in enumerate(pieces)}
        backend = Tokenizer(models.BPE(vocabulary, [], ignore_merges=whole))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        return PreTrainedTokenizerFast(tokenizer_object=backend)

    check_words("model.gguf", made(whole=True))
    with pytest.raises(
        UnsupportedModel, match=r"cuts up words .* such as 'aha'.*--backend llamacpp"
    ):
        check_words("model.gguf", made(whole=False))
