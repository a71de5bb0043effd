"""GGUF files: read as transformers reads them, planned as what they become, damaged ones named."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvcap import BudgetCache, Runtime, pocket
from kvcap.cli import run
from kvcap.export.decoder import spec
from kvcap.export.gguf import FileBlocks
from kvcap.export.weights import unpack
from kvcap.runtime.backends.onnxruntime.runtime import OrtRuntime
from kvcap.runtime.backends.pytorch.loop import BlockLoop
from kvcap.runtime.cli import kept_exports
from kvcap.runtime.errors import ExtraMissing, ModelFilesBroken, UnsupportedModel
from kvcap.runtime.models import files, kept
from kvcap.runtime.models import gguf as gguf_files
from kvcap.runtime.models.blocks import BLOCKS
from kvcap.runtime.models.files import encode, load_config, load_model, load_packed, load_tokenizer
from kvcap.runtime.models.packed import TILE, BlockMatrix, PackedEmbedding, PackedLinear
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
HEADS, KV_HEADS, LAYERS, HIDDEN, MLP = 4, 2, 2, 64, 96


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
    mlp: int = MLP,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
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
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        hidden_size=hidden,
        num_key_value_heads=KV_HEADS,
        intermediate_size=mlp,
        vocab_size=len(words),
        rms_norm_eps=1e-5,
        attention_bias=biases,
        mlp_bias=biases,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    weights = model.state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // HEADS)
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    if factors:
        writer.add_tensor("rope_freqs.weight", torch.ones(hidden // HEADS // 2).numpy())
    if extra:
        writer.add_tensor(extra, torch.ones(hidden).numpy())
    types = cycle(kinds)
    for name, tensor in weights.items() if tensors else ():
        if without in name:
            continue
        stem, _, end = name.rpartition(".")
        tensor.copy_(0.15 * torch.randn_like(tensor) + ("norm" in name))
        values = tensor.numpy()
        if "q_proj" in stem or "k_proj" in stem:  # llama.cpp has pairs that rotate side by side
            values = values.reshape(-1, 2, hidden // HEADS // 2, *values.shape[1:]).swapaxes(1, 2)
            values = np.ascontiguousarray(values).reshape(tensor.shape)
        if tensor.dim() == 1:
            writer.add_tensor(f"{names.get_name(stem)}.{end}", values)
        else:
            kind = gguf.GGMLQuantizationType[next(types)]
            packed = packed_in(kind.name, values)
            writer.add_tensor(f"{names.get_name(stem)}.{end}", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a test a cache folder of its own, so that the user's stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield cache / "kvcap" / "gguf"


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
        loaded = load_model(str(path), config, torch.float32)
        for model in (loaded, load_packed(str(path), config, torch.float32, "gguf")):
            found = BlockLoop(model.eval(), BudgetCache(model.config, 48, 16)).prefill(ids)
            assert (found - expected).abs().max() < 1e-4 < expected.abs().max()


@needs_gguf
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"biases": True, "without": "o_proj.bias"}, r"blk\.N\.attn_k\.bias, .*attn_v\.bias;"),
        ({"extra": "blk.1.attn_sub_norm.weight"}, r": blk\.N\.attn_sub_norm\.weight;"),
        ({"extra": "output_scale"}, r": output_scale;"),
    ],
)
def test_tensors_that_a_model_does_not_use_are_refused_by_name(tmp_path, capsys, given, named):
    path = tmp_path / "x.gguf"
    write(path, **given)
    with pytest.raises(UnsupportedModel, match=named):
        load_config(str(path))
    assert run(["plan", str(path)]) == 2
    assert "does not use" in capsys.readouterr().err


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
@pytest.mark.parametrize(("name", "said"), [("next", "as 'next'"), ("", "does not say how")])
def test_an_unknown_way_to_split_text_is_refused(tmp_path, capsys, name, said):
    path = tmp_path / "x.gguf"
    write(path, splits=name)
    with pytest.raises(UnsupportedModel, match=f"{said}.*known: llama3, "):
        load_tokenizer(str(path))
    assert run(["chat", str(path)]) == 2
    assert "tokenizer.ggml.pre" in capsys.readouterr().err


@needs_gguf
@pytest.mark.parametrize(("name", "opens"), [("llama-bpe", True), ("smollm", False)])
def test_a_token_opens_a_text_where_it_does_by_default(tmp_path, name, opens):
    path = tmp_path / "opened.gguf"
    write(path, splits=name)
    for _ in range(2):  # converted, then kept
        tokenizer = load_tokenizer(str(path))
        assert encode(tokenizer, "one") == (
            [tokenizer.bos_token_id] * opens,
            tokenizer("one", add_special_tokens=False).input_ids,
        )


@needs_gguf
def test_it_is_parsed_once_while_it_stays_as_it_is(file, tmp_path, monkeypatch):
    import gguf

    parsed = []
    begin = gguf_files.Header.__init__

    def noted(header, path):
        parsed.append(Path(path).name)
        begin(header, path)

    monkeypatch.setattr(gguf_files.Header, "__init__", noted)
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
        found = own.fields[name]
        assert found.contents() == field.contents()
        assert found.types == field.types
        mine, theirs = (
            [parse(x.parts[i], [int(kind) for kind in x.types]) for i in x.data]
            for x in (found, field)
        )
        assert mine == theirs
    for found, tensor in zip(own.tensors.values(), true.tensors, strict=True):
        for name in ("name", "tensor_type", "n_elements", "n_bytes", "data_offset"):
            assert getattr(found, name) == getattr(tensor, name)
        assert list(found.shape) == list(tensor.shape)
        assert found.data.dtype == tensor.data.dtype
        assert (found.data == tensor.data).all()
    assert {x.data_offset % 64 for x in own.tensors.values()} == {0}


@needs_gguf
def test_it_chats_and_says_what_it_becomes(file, tmp_path, capsys):
    assert run(["plan", file, "--budget-tokens", "32", "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "of Q8_0 in the file stay in their bits" in said
    plan = ["plan", file, "--budget-tokens", "32", "--dtype", "float32"]
    assert run(plan) == 0
    said = capsys.readouterr().out
    assert "of Q8_0 in the file become" in said
    assert "of float32 in memory" in said
    assert run([*plan, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["file_type"] == "Q8_0"
    assert planned["file_bytes"] < planned["weights"] / 3
    command = ["generate", file, "one two three", "--max-new-tokens", "4", "--device", "cpu"]
    for options, said in (([], "stay in their bits"), (["--dtype", "float32"], "become")):
        assert run([*command, *options]) == 0
        assert f"of Q8_0 in the file {said}" in capsys.readouterr().err
    runtime = Runtime.from_pretrained(file, budget_tokens=32, block_size=16, device="cpu")
    assert runtime.plan.weights_dtype == "gguf"
    assert runtime.plan.weights == held_weights(runtime.model).nbytes
    own = AutoTokenizer.from_pretrained(pocket.path())
    text = "Please remember: the code for the blue door is 4821."
    bare = {"add_special_tokens": False}
    assert runtime.tokenizer(text, **bare).input_ids == own(text, **bare).input_ids
    # transformers 4.57 takes the token that opens a text for the one that ends it, too.
    assert end_tokens(runtime.generation) - {own.bos_token_id} == {own.eos_token_id}
    session = runtime.session(seed=0)
    session.set_generation(max_new_tokens=4, temperature=0)
    "".join(session.send("one two three four five six seven eight nine ten " * 4))
    assert session.stats.held_tokens <= 32 < session.stats.seen_tokens
    session.save(tmp_path / "session.kvcap")
    again = type(session).load(runtime, tmp_path / "session.kvcap")
    assert "".join(session.send("more")) == "".join(again.send("more"))


def packed_in(kind: str, values: np.ndarray) -> np.ndarray:
    """Pack rows in blocks; those of the K types, which the package does not write, are random."""
    import gguf

    try:
        return gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return random_rows(kind, *values.shape)


def random_rows(kind: str, rows: int, columns: int) -> np.ndarray:
    """Rows of blocks of random bits, whose scales are numbers of a common size."""
    blocks, random = BLOCKS[kind], np.random.default_rng(0)
    raw = random.integers(0, 256, (rows, columns // blocks.numbers * blocks.nbytes), np.uint8)
    each = raw.reshape(-1, blocks.nbytes)
    places = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2))
    for place in places:
        numbers = random.normal(0, 0.01, (len(each), 1)).astype(np.float16)
        each[:, place : place + 2] = numbers.view(np.uint8)
    return raw


@needs_gguf
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_stay_in_their_bits(kind, dtype):
    """Numbers are the file's, but for the rounding of scales to the type of the run."""
    import gguf

    rows = random_rows(kind, TILE + 3, 512)
    true = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType[kind]))
    matrix = BlockMatrix(*true.shape, dtype, kind=kind)
    matrix.fill(lambda start, stop: torch.from_numpy(rows[start:stop]))
    ids = torch.tensor([[TILE + 2, 0], [5, 6]])
    weights = matrix.lookup(torch.arange(len(true)))
    error = 1e-6 if dtype == torch.float32 else 2**-7
    assert (weights.float() - true).abs().max() <= error * true.abs().max()
    assert torch.equal(matrix.lookup(ids), weights[ids])
    for tokens in (1, matrix.few, matrix.few + 1):
        x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
        far = (matrix(x).float() - x.float() @ weights.float().T).abs().max()
        assert far <= error / 2 * (x.float().abs() @ weights.float().abs().T).max()
    bits = 8 * sum(x.nbytes for x in matrix.parameters()) / (2 * TILE * 512)
    assert bits <= (12 if dtype == torch.float32 else 10)


@needs_gguf
@pytest.mark.parametrize("tied", [True, False])
def test_its_weights_are_the_files_however_they_are_held(tmp_path, own_cache, tied):
    path = tmp_path / "x.gguf"
    write(path, without="lm_head" if tied else "none")
    config = load_config(str(path))
    true = load_model(str(path), config, torch.float32).state_dict()
    for _ in range(2):  # packed, then as it was kept
        model = load_packed(str(path), config, torch.bfloat16, "gguf")
        assert weigh(config, torch.bfloat16, packed="gguf") == held_weights(model)._replace(
            source="config"
        )
        assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear | PackedEmbedding):
                held, own = module.matrix, true[f"{name}.weight"]
                assert isinstance(held, BlockMatrix)
                found = held.lookup(torch.arange(held.rows)).float()
                assert (found - own).abs().max() <= 2**-7 * own.abs().max()
            elif "norm" in name:
                assert torch.equal(module.weight, true[f"{name}.weight"].bfloat16())
        assert (model.lm_head.matrix is model.model.embed_tokens.matrix) == tied
        [there] = own_cache.glob("x-weights-*/*.safetensors")
        written = there.stat().st_mtime_ns
    assert there.stat().st_mtime_ns == written
    eight = load_packed(str(path), config, torch.float32, "int8")
    scale = eight.model.layers[1].self_attn.q_proj.matrix
    own = true["model.layers.1.self_attn.q_proj.weight"]
    assert (scale.lookup(torch.arange(scale.rows)) - own).abs().max() <= own.abs().max() / 127
    shutil.rmtree(there.parent)


@needs_gguf
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_graph_has_the_numbers_of_the_file(tmp_path, kind):
    path = tmp_path / "x.gguf"
    write(path, kinds=(kind,), hidden=256, mlp=256)
    config = load_config(str(path))
    model = load_model(str(path), config, torch.float32)
    blocks = FileBlocks.of(str(path), model, "")
    names = {"embed_tokens", "q_proj", "k_proj", "down_proj", "lm_head"}
    assert {name.split(".")[-2] for name in blocks} >= names
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            rounding = blocks.roundings[name]
            meant = unpack(blocks[name], weight.shape[1], rounding)
            far = (meant - weight).abs().max()
            assert far <= 1e-6 * max(weight.abs().max(), meant.abs().max())
            assert rounding.bits == (4 if kind.startswith("Q4") else 8)


@needs_gguf
@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dtype", ["gguf", "int4", "fp32"])
def test_an_export_reads_a_large_file_weight_by_weight(tmp_path, capsys, monkeypatch, dtype):
    """The graph has the weights of one whose model was loaded whole."""
    path = tmp_path / "x.gguf"
    write(path, kinds=("Q8_0", "Q4_K"), hidden=256, mlp=256, layers=4)
    monkeypatch.setattr("kvcap.export.weights.ACCURACY", 1)  # activations are not rounded
    tensors = []
    for least in (spec.LOADED, 0):
        monkeypatch.setattr(spec, "LOADED", least)
        out = tmp_path / f"{dtype}-{least}"
        given = ["--budget-tokens", "12", "--block-size", "4", "--quick", "--dtype", dtype]
        assert run(["export", "decoder", str(path), "-o", str(out), *given]) == 0
        assert ("3 layers" in capsys.readouterr().out) == (least == 0)
        graph = onnx.load(str(out / "decoder.onnx")).graph
        tensors.append({x.name: x.raw_data for x in graph.initializer if len(x.raw_data) > 8})
    assert tensors[0] == tensors[1]


@needs_gguf
def test_its_blocks_run_in_onnx_runtime(tmp_path, own_cache, capsys, monkeypatch):
    """Logits are those of PyTorch over the same blocks, once activations are not rounded."""

    def here(command, **_):
        return SimpleNamespace(returncode=run(command[command.index("kvcap") + 1 :]))

    monkeypatch.setattr(kept_exports, "subprocess", SimpleNamespace(run=here, DEVNULL=None))
    monkeypatch.setattr("kvcap.export.weights.ACCURACY", 1)  # float32
    path = tmp_path / "x.gguf"
    write(path, kinds=("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F32", "Q5_1"), hidden=256, mlp=256)
    command = [
        "generate",
        str(path),
        "one two three",
        "--backend",
        "onnxruntime",
        "--raw",
        "--max-new-tokens",
        "1",
        "--budget-tokens",
        "32",
        "--block-size",
        "16",
    ]
    assert run(command) == 0
    assert "with the file's weights, once" in capsys.readouterr().err
    assert run([*command, "--weights", "gguf"]) == 0
    assert "once" not in capsys.readouterr().err
    [out] = own_cache.with_name("exports").glob("x.gguf-gguf-*")
    graph = OrtRuntime.from_directory(out / "decoder")
    eager = Runtime.from_pretrained(
        path, dtype="float32", device="cpu", weights="gguf", budget_tokens=32, block_size=16
    )
    assert eager.plan.weights_dtype == "gguf"
    ids = torch.randint(3, 2000, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    mine, theirs = graph.loop(), eager.loop()
    for read in (ids[:16], ids[16:31], ids[31:32]):  # all of them are held
        with torch.inference_mode():
            got = torch.as_tensor(mine.read(graph.token_ids(read)))[0]
            wanted = torch.as_tensor(theirs.read(eager.token_ids(read)))[0].float()
        assert (got - wanted).abs().max() < 1e-3 * wanted.abs().max()
        assert got.argmax() == wanted.argmax()


@needs_gguf
def test_blocks_that_no_graph_has_are_refused_by_name(tmp_path, capsys):
    path = tmp_path / "x.gguf"
    write(path, kinds=("Q8_0", "TQ2_0"), hidden=256, mlp=256)
    command = ["export", "decoder", str(path), "--dtype", "gguf", "-o", str(tmp_path / "out")]
    assert run(command) == 2
    assert "weights in TQ2_0" in capsys.readouterr().err
    command[2] = "pocket"
    assert run(command) == 2
    assert "is no GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@needs_gguf
def test_a_cap_counts_weights_that_are_mapped(file, monkeypatch):
    seen, own = [], kept.map_weights
    monkeypatch.setattr(
        files,
        "map_weights",
        lambda *x, resident: seen.append(resident) or own(*x, resident=resident),
    )
    for cap in (None, "8GiB"):
        runtime = Runtime.from_pretrained(
            file, budget_tokens=32, block_size=16, device="cpu", memory_cap=cap
        )
        assert runtime.plan.weights_dtype == "gguf"
    assert seen == [False, True]


@needs_gguf
def test_who_needs_numbers_gets_them(file):
    given = {"budget_tokens": 32, "block_size": 16, "device": "cpu"}
    critical = Runtime.from_pretrained(file, "snapkv+criticalkv", **given)
    assert critical.plan.weights_dtype is None
    assert critical.model.dtype == torch.bfloat16
    unpacked = Runtime.from_pretrained(file, weights="unpacked", **given)
    assert unpacked.plan.weights_dtype is None
    assert unpacked.plan.weights == held_weights(unpacked.model).nbytes
    runtime = Runtime.from_pretrained(file, **given)
    with pytest.raises(UnsupportedModel, match=r"gguf do not have as numbers.*--dtype float32"):
        runtime.with_policy("snapkv+criticalkv")
    with pytest.raises(UnsupportedModel, match="keeps the bits of a GGUF file"):
        Runtime.from_pretrained(weights="gguf", **given)


@needs_gguf
def test_a_kept_tokenizer_is_the_one_that_was_converted(file, own_cache):
    given = {"gguf_file": Path(file).name}
    true = AutoTokenizer.from_pretrained(Path(file).parent, **given)
    load_tokenizer(file)
    assert len(list(own_cache.glob("tiny-tokenizer-*"))) == 1
    again = load_tokenizer(file)
    text = f"Please  remember:\n{true.eos_token}4821 \u6f22{true.bos_token} <|x|>"
    for settings in ({}, {"add_special_tokens": False}):
        assert again(text, **settings).input_ids == true(text, **settings).input_ids
    ids = true(text).input_ids
    for skip in (False, True):
        assert again.decode(ids, skip_special_tokens=skip) == true.decode(
            ids, skip_special_tokens=skip
        )
    for name in (
        "chat_template",
        "special_tokens_map",
        "all_special_ids",
        "model_max_length",
        "padding_side",
        "bos_token_id",
        "vocab_size",
    ):
        assert getattr(again, name) == getattr(true, name)
    assert len(again) == len(true)


@needs_gguf
def test_what_cannot_be_kept_is_made_each_time(file, tmp_path, monkeypatch):
    (tmp_path / "kvcap").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        with pytest.warns(UserWarning, match="nothing is kept in"):
            assert load_tokenizer(file)("one").input_ids


@needs_gguf
def test_what_is_kept_is_listed_and_removed(file, tmp_path, own_cache, capsys):
    path = tmp_path / "other.gguf"
    write(path)
    command = ["generate", str(path), "one two", "--max-new-tokens", "1", "--device", "cpu"]
    assert run(command) == 0
    assert "converting" in capsys.readouterr().err
    assert run(command) == 0
    assert "converting" not in capsys.readouterr().err
    assert run(["cache", "list", "--json"]) == 0
    listed = [x for x in json.loads(capsys.readouterr().out) if x["model"] == str(path)]
    assert len(listed) == 2
    assert all(Path(x["path"]).parent == own_cache and x["nbytes"] > 9_999 for x in listed)
    assert run(["cache", "list"]) == 0
    assert str(path) in capsys.readouterr().out
    load_tokenizer(file)
    assert run(["cache", "clear", str(path)]) == 0
    assert "removed 2 folders" in capsys.readouterr().out
    assert not list(own_cache.glob("other-*"))
    assert list(own_cache.glob("tiny-*"))
    (own_cache / ".kvcap-cut").mkdir()
    assert run(["cache", "clear"]) == 0
    assert not list(own_cache.iterdir())


@needs_gguf
def test_it_is_evaluated_and_says_what_it_becomes(file, tmp_path, capsys):
    command = [
        "eval",
        file,
        "--policies",
        "keydiff",
        "--budgets",
        "32",
        "--block-size",
        "16",
        "--tasks",
        "perplexity,niah_single",
        "--lengths",
        "128",
        "--samples",
        "2",
        "--max-new-tokens",
        "2",
        "--positions",
        "true",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--json",
    ]
    assert run(command) == 0
    told = capsys.readouterr()
    assert "of Q8_0 in the file become" in told.err
    perplexity, recall = json.loads(told.out)
    assert 1 < perplexity["score"] < 1e6
    assert 0 <= recall["score"] <= 1


@needs_gguf
def test_an_answer_ends_at_the_control_token_that_its_template_writes(tmp_path, capsys):
    """Which is none of those that the fields name."""
    path, own = tmp_path / "model.gguf", AutoTokenizer.from_pretrained(pocket.path())
    write(path, eos=own.pad_token_id)
    assert own.pad_token_id != own.eos_token_id
    runtime = Runtime.from_pretrained(path, budget_tokens=32, block_size=16, device="cpu")
    found = end_tokens(runtime.generation) - {own.bos_token_id}
    assert found == {own.pad_token_id, own.eos_token_id}
    assert run(["plan", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["end_tokens"]
    assert {end["text"] for end in said} - {own.bos_token} == {own.pad_token, own.eos_token}


@needs_gguf
def test_what_is_damaged_or_foreign_is_named(file, tmp_path, capsys):
    whole = Path(file).read_bytes()
    path = tmp_path / "x.gguf"
    version, counts = b"GGUF" + struct.pack("<I", 99), b"\xff" * 16
    cut = [whole[: len(whole) // 2], whole[:100], b"GGUF"]
    for data in (*cut, whole[:8] + counts + whole[24:], version + whole[8:]):
        path.write_bytes(data)
        with pytest.raises(ModelFilesBroken, match="damaged GGUF file or was cut short"):
            load_config(str(path))
        assert run(["plan", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    write_fields(path, endian=">")
    with pytest.raises(UnsupportedModel, match="big-endian"):
        load_config(str(path))
    write_fields(path)
    data = path.read_bytes().split(b"general.alignment")
    path.write_bytes(b"general.alignment".join((data[0], data[1][:4] + b"\x30" + data[1][5:])))
    with pytest.raises(ModelFilesBroken, match="aligned to 48"):
        load_config(str(path))
    write(path, architecture="sonnet")
    with pytest.raises(UnsupportedModel, match="'sonnet', which transformers does not read"):
        load_config(str(path))
    write(path, architecture="gpt2")
    with pytest.raises(UnsupportedModel, match=r"'gpt2'.*supported"):
        load_config(str(path))
    write(path, parts=3)
    with pytest.raises(UnsupportedModel, match=r"one of 3 parts.*--merge"):
        load_config(str(path))
    write(path, tensors=False)
    with pytest.raises(UnsupportedModel, match="holds no model"):
        load_config(str(path))
    write(path, factors=True)
    with pytest.raises(UnsupportedModel, match="stretches its rotary embedding"):
        load_config(str(path))
    write(path, without="layers.1.mlp.up_proj")
    with pytest.raises(ModelFilesBroken, match=r"lack model\.layers\.1\.mlp\.up_proj"):
        load_model(str(path), load_config(str(path)), torch.float32)
    write(path, vocabulary=False)
    with pytest.raises(ModelFilesBroken, match="tokenizer"):
        Runtime.from_pretrained(path, budget_tokens=32, device="cpu")


def test_the_missing_package_is_named_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF and more")
    monkeypatch.setattr(gguf_files, "NEEDED", ("gguf_that_is_not_there", "accelerate"))
    with pytest.raises(
        ExtraMissing, match=r"needs gguf_that_is_not_there.* not installed here.*'\.\[gguf\]'"
    ):
        load_config(str(path))
    assert run(["chat", str(path)]) == 1
    assert "'.[gguf]'" in capsys.readouterr().err


@needs_gguf
def test_a_parameter_has_another_name_in_a_file():
    name = "model.layers.1.mlp.up_proj.weight"
    assert gguf_files.name_in_file("llama", 2, name) == "blk.1.ffn_up.weight"
    assert gguf_files.name_in_file("llama", 2, "model.layers.1.other.weight") is None
