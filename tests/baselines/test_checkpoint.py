"""A checkpoint becomes a system's weights and comes out again as one: for ten families, and for
plain transformers in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from baselines.checkpoint import CheckpointWeights, export, starting_weights
from baselines.checkpoint_folder import INDEX, WEIGHTS, config_in, spec_of, stored_in
from baselines.model import build_skeleton, materialise
from baselines.model_check import require_runnable
from baselines.registry import build
from baselines.system import ModelSpec, Shape, SystemSpec
from engine import EngineConfig, MegaTrain, Recipe, store
from tests.models import make_batch, train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 12, "num_experts_per_tok": 2}
"""Of two digits: they are merged in the order of their numbers."""
YARN = {"original_max_position_embeddings": 16, "rope_type": "yarn", "factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "qwen2": ("qwen2", SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SMALL | {"tie_word_embeddings": True}),
    "mistral": ("mistral", SMALL | {"sliding_window": 8}),
    "gemma2": ("gemma2", SMALL | {"query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", SMALL | {"query_pre_attn_scalar": 8}),
    "phi3": ("phi3", SMALL),
    "gpt_oss": ("gpt_oss", SMALL | EXPERTS | {"rope_parameters": YARN | {"rope_theta": 1e4}}),
    "mixtral": ("mixtral", SMALL | EXPERTS),
    "olmo2": ("olmo2", SMALL),
    "granite": ("granite", SMALL | {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
}
TOKENS = torch.arange(24).view(2, 12) * 7 % 256
CPU = torch.device("cpu")
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def made(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """A tiny model with random weights, norms and biases included."""
    model_type, config = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**config, **settings}), attn_implementation="eager"
    )
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def loaded(folder: Path) -> nn.Module:
    """By plain transformers, all weights from the files."""
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def engine_with(spec: ModelSpec, dtype: torch.dtype = torch.float32, **options: Any) -> MegaTrain:
    engine = MegaTrain(
        build_skeleton(spec, dtype),
        recipe=Recipe(lr=1e-3),
        micro_batch_size=2,
        seq_len=16,
        dtype=dtype,
        config=EngineConfig(num_threads=1, torch_adamw=True, **options),
    )
    engine.setup(CheckpointWeights(spec))
    return engine


def eager(folder: Path) -> ModelSpec:
    """gpt-oss has no other attention."""
    return replace(spec_of(folder), attn_implementation="eager")


def saved(folder: Path, family: str = "qwen2", **settings: Any) -> dict[str, torch.Tensor]:
    """A checkpoint in one file; its tensors."""
    made(family, **settings).save_pretrained(folder)
    return load_file(folder / WEIGHTS)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def configure(folder: Path, **settings: Any) -> None:
    config = config_in(folder) | settings
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_through_the_engine_and_comes_out_the_same(family: str, tmp_path: Path):
    model, source, out = made(family), tmp_path / "in", tmp_path / "out"
    model.save_pretrained(source, max_shard_size="40KB")
    spec = eager(source)
    engine = engine_with(spec)
    export(engine.parameters(), spec, out, dtype=torch.float32, max_shard_bytes=40_000)
    engine.close()
    assert torch.equal(logits(loaded(out)), logits(model))
    assert sorted(stored_in(out)) == sorted(stored_in(source))
    assert config_in(out) == config_in(source)
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 1
    assert all(len(load_file(file)) == 1 or file.stat().st_size < 45_000 for file in files)


def test_a_fresh_process_writes_the_text_that_the_trained_weights_do(tmp_path: Path):
    source, out = tmp_path / "in", tmp_path / "out"
    before = saved(source)
    vocab = {f"w{number}": number for number in range(256)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.save_pretrained(source)
    spec = eager(source)
    engine = engine_with(spec)
    train(engine, 2)
    export(engine.parameters(), spec, out, dtype=torch.float32)
    model = materialise(spec, torch.float32, CPU, engine.parameters()).eval()
    ids = tokenizer("w7 w9 w11", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    program = (
        "import sys; from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast\n"
        "tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation='eager')\n"
        "ids = tokenizer('w7 w9 w11', return_tensors='pt').input_ids\n"
        "out = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)\n"
        "print(tokenizer.decode(out[0]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == tokenizer.decode(expected[0])
    assert len(expected[0]) > 4
    assert not torch.equal(dict(engine.parameters())[NORM], before[NORM])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_split_master_has_the_checkpoint_s_own_numbers(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the dtype, and where a parameter is loaded in pieces too."""
    monkeypatch.setattr(store, "PIECE", 100)
    model = made("mixtral", dtype)
    model.save_pretrained(tmp_path)
    assert {stored.dtype for stored in stored_in(tmp_path).values()} < {"F32", "F16", "BF16"}
    engine = engine_with(spec_of(tmp_path), torch.bfloat16)
    for name, value in engine.parameters():
        assert torch.equal(value, model.get_parameter(name).float()), name


def test_another_system_starts_from_the_checkpoint_too(tmp_path: Path):
    model = made("gpt2")
    model.save_pretrained(tmp_path)
    shape = Shape(batch_size=2, seq_len=16)
    spec = SystemSpec(
        model=spec_of(tmp_path), shape=shape, recipe=Recipe(lr=1e-3), dtype=torch.float32
    )
    losses = []
    for name in ("in_memory", "fsdp2", "megatrain"):
        options = {"torch_adamw": True} if name == "megatrain" else {}
        system = build(name, replace(spec, options=options))
        try:
            system.setup(CheckpointWeights(spec.model))
            for key, value in system.parameters():
                assert torch.equal(value, model.get_parameter(key)), key
            losses.append(float(system.train_step(make_batch(0))))
        finally:
            system.close()
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_in_bfloat16_every_system_starts_from_the_same_numbers(tmp_path: Path):
    """Those of the checkpoint rounded once: not every system could keep more of them."""
    model = made("qwen2")
    model.save_pretrained(tmp_path)
    shape = Shape(batch_size=2, seq_len=16)
    spec = SystemSpec(model=spec_of(tmp_path), shape=shape, recipe=Recipe(lr=1e-3))
    for name in ("in_memory", "zero3", "megatrain"):
        options = {"torch_adamw": True} if name == "megatrain" else {}
        system = build(name, replace(spec, options=options))
        try:
            system.setup(starting_weights(spec.model, 0, spec.dtype, CPU))
            for key, value in system.parameters():
                rounded = model.get_parameter(key).to(torch.bfloat16)
                assert torch.equal(value, rounded.float()), (name, key)
        finally:
            system.close()


def test_keys_of_older_files_are_renamed_and_their_buffers_left_out(tmp_path: Path):
    """As the files of GPT-2 on the hub: without the model's prefix, with masks."""
    tensors = saved(tmp_path, "gpt2")
    renamed = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    rewrite(tmp_path, renamed | {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()})
    configure(tmp_path, torch_dtype="float32", n_ctx=64, summary_type="cls_index")
    spec = spec_of(tmp_path)
    require_runnable(spec)
    for name, value in CheckpointWeights(spec):
        assert torch.equal(value, tensors[name])


@pytest.mark.parametrize("kept", [{EMBED, HEAD}, {EMBED}, {HEAD}])
def test_a_tied_parameter_is_given_once_whichever_copies_are_stored(kept: set[str], tmp_path: Path):
    tensors = saved(tmp_path)
    copies = {name: tensors[EMBED].clone() for name in kept}
    rewrite(tmp_path, {name: value for name, value in tensors.items() if name != EMBED} | copies)
    weights = CheckpointWeights(spec_of(tmp_path))
    for _ in range(2):  # it can be walked again
        given = list(weights)
        assert sorted(name for name, _ in given) == sorted(tensors)
        assert torch.equal(dict(given)[EMBED], tensors[EMBED])


def test_reading_takes_the_store_and_a_few_parameters(tmp_path: Path):
    """In a process of its own, whose memory can be told: 100 MB of experts that are merged, in
    float32, into a split master."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64}
    config = AutoConfig.for_model("mixtral", **SMALL | sizes | {"num_local_experts": 8})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="30MB")
    assert len(stored_in(tmp_path)) > 200
    done = subprocess.run(
        [sys.executable, "-m", "tests.baselines.reading_memory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    grown, planned, largest = map(int, done.stdout.splitlines()[-1].split())
    assert largest == 8 * 1024 * 256 * 4
    assert planned > 12 * 25e6
    assert grown < planned + 4 * largest + 40e6  # the whole checkpoint would be 100e6


def test_an_export_appears_whole_or_not_at_all(tmp_path: Path):
    tensors = saved(tmp_path / "in")
    spec = spec_of(tmp_path / "in")
    some = [(name, value) for name, value in tensors.items() if name != NORM]
    with pytest.raises(ValueError, match=r"^export: got no model\.norm\.weight, allowed"):
        export(some, spec, tmp_path / "out", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^export: got model\.norm\.weight of shape \(1,\)"):
        export([(NORM, torch.ones(1))], spec, tmp_path / "out", dtype=torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    with pytest.raises(ValueError, match=r"in exists, allowed a new directory"):
        export(tensors.items(), spec, tmp_path / "in", dtype=torch.float32)


def test_what_had_no_checkpoint_can_be_exported(tmp_path: Path):
    """A model with random weights, in bf16."""
    model = made("mistral")
    spec = ModelSpec(name="own", model_type="mistral", config=FAMILIES["mistral"][1])
    export(model.named_parameters(), spec, tmp_path / "out", dtype=torch.bfloat16)
    for name, value in loaded(tmp_path / "out").named_parameters():
        assert torch.equal(value, model.get_parameter(name).bfloat16()), name
    assert not (tmp_path / "out" / INDEX).exists()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def encoder_alone(folder: Path) -> None:
    configure(folder, model_type="bert", architectures=["BertForMaskedLM"])


def no_language_model(folder: Path) -> None:
    configure(folder, model_type="vit", architectures=None)


def quantised(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "mxfp4"})


def a_tensor_less(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[NORM]
    rewrite(folder, tensors)


def a_tensor_more(folder: Path) -> None:
    rewrite(folder, load_file(folder / WEIGHTS) | {"model.nope.weight": torch.ones(3)})


def another_shape(folder: Path) -> None:
    rewrite(folder, load_file(folder / WEIGHTS) | {NORM: torch.ones(3)})


def whole_numbers(folder: Path) -> None:
    rewrite(folder, load_file(folder / WEIGHTS) | {NORM: torch.ones(32, dtype=torch.int8)})


def two_heads(folder: Path) -> None:
    rewrite(folder, load_file(folder / WEIGHTS) | {HEAD: torch.ones(256, 32)})


def torn(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1)


def torn_header(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 5)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def a_file_less(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')


def no_index(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text("[]")


BAD: dict[Callable[[Path], None], str] = {
    shutil.rmtree: "which is no folder, allowed a folder that save_pretrained",
    no_config: "which has no config.json, allowed a folder that save_pretrained",
    no_json: "whose config.json cannot be read (Expecting value",
    encoder_alone: "which is of BertForMaskedLM, allowed a decoder-only causal language model",
    no_language_model: "which is of model_type vit, allowed a decoder-only causal language model",
    quantised: "which is quantised, allowed weights in float32, bfloat16 or float16; have",
    a_tensor_less: "which lacks model.norm.weight, allowed all 26 parameters",
    a_tensor_more: "which has model.nope.weight too, allowed the model's 26 parameters alone",
    another_shape: "whose model.norm.weight is of shape (3,), allowed (32,)",
    whole_numbers: "whose model.norm.weight is I8, allowed F32 or BF16 or F16",
    two_heads: "whose lm_head.weight and model.embed_tokens.weight differ, allowed one tensor",
    torn: "whose model.safetensors cannot be read (",
    torn_header: "whose model.safetensors cannot be read (",
    pickled: "whose weights are pickled, allowed model.safetensors or",
    no_weights: "which has no weights, allowed model.safetensors or",
    a_file_less: "which has no model-00001-of-00002.safetensors, allowed every file that",
    no_index: "whose model.safetensors.index.json has no weight_map",
}


@pytest.mark.parametrize("damage", BAD, ids=lambda damage: damage.__name__)
def test_a_bad_checkpoint_is_one_line(damage: Callable[[Path], None], tmp_path: Path):
    folder = tmp_path / "in"
    saved(folder)
    damage(folder)
    with pytest.raises(ValueError, match=r"^model\.checkpoint: got .*, allowed .*; ") as caught:
        require_runnable(spec_of(folder))
    assert f"got {folder}, {BAD[damage]}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_that_do_not_fit_are_one_line(tmp_path: Path):
    tensors = saved(tmp_path, "mixtral")
    gone = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    rewrite(tmp_path, {name: value for name, value in tensors.items() if name != gone})
    with pytest.raises(ValueError, match=r"and 22 more do not make model\.layers\.1\.mlp\.exp"):
        require_runnable(spec_of(tmp_path))


def test_a_trained_buffer_is_refused(tmp_path: Path):
    """Of DeepSeek's routers: no system has it, so another model would be trained."""
    settings = SMALL | {
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 0,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **settings))
    model.save_pretrained(tmp_path)
    CheckpointWeights(spec_of(tmp_path))
    key = "model.layers.0.mlp.gate.e_score_correction_bias"
    rewrite(tmp_path, load_file(tmp_path / WEIGHTS) | {key: torch.ones(4)})
    with pytest.raises(
        ValueError, match=r"e_score_correction_bias was trained and is no parameter"
    ):
        CheckpointWeights(spec_of(tmp_path))
