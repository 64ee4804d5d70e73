"""A tiny configuration of any causal language model of transformers, made from its default one.

Invariant: one rule serves all types: a size that the default configuration has is as `SIZES` says.
What a type needs beside it is in `NEEDS`. Whatever is drawn at random is switched off, for the
engine refuses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

NUM_LAYERS = 4
VOCAB = 96


def _all(value: Any, keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys.split(), value)


SIZES: Mapping[str, Any] = {
    **_all(32, "hidden_size n_embd d_model hidden_dim embedding_size word_embed_proj_dim emb_dim"),
    **_all(32, "hidden_size_per_layer_input ple_embed_dim embedding_dim"),
    **_all(64, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff d_inner"),
    **_all(NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers"),
    **_all(NUM_LAYERS, "encoder_layers"),
    **_all(4, "num_attention_heads n_head n_heads num_heads"),
    **_all(4, "decoder_attention_heads encoder_attention_heads"),
    **_all(2, "num_key_value_heads num_kv_heads n_kv_heads"),
    **_all(8, "head_dim"),
    **_all(VOCAB, "vocab_size n_words n_token ngram_vocab_size_base vocab_size_per_layer_input"),
    **_all(64, "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions"),
    **_all(1, "bos_token_id eos_token_id decoder_start_token_id"),
    **_all(0, "pad_token_id"),
    **_all(16, "moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size"),
    **_all(16, "ffn_hidden_size expert_ffn_hidden_size moe_shared_expert_intermediate_size dim_ff"),
    **_all(4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    **_all(2, "num_experts_per_tok num_experts_per_token moe_k top_k_experts moe_topk"),
    **_all(1, "n_group topk_group num_expert_group n_shared_experts"),
    **_all(1, "first_k_dense_replace num_dense_layers"),
    **_all(16, "kv_lora_rank q_lora_rank o_lora_rank qk_head_dim"),
    **_all(8, "qk_rope_head_dim qk_nope_head_dim v_head_dim"),
    **_all(8, "index_head_dim index_topk indexer_head_dim indexer_budget"),
    **_all(4, "linear_num_key_heads linear_num_value_heads linear_num_heads index_n_heads"),
    **_all(8, "linear_key_head_dim linear_value_head_dim linear_head_dim"),
    **_all(16, "mamba_d_head mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank"),
    **_all(8, "mamba_chunk_size chunk_size mamba_num_heads mamba_head_dim"),
    **_all(4, "mamba_n_heads rotary_dim"),
    **_all(64, "mamba_d_ssm"),
}
"""Key of a configuration -> its value in a tiny one."""
RANDOM = ("dropout", "layerdrop", "pdrop", "jitter")
"""Parts of the names of what is drawn at random."""
LATENT: Mapping[str, Any] = {"num_key_value_heads": 4}
"""Attention through a latent (`kv_lora_rank`) has keys for every head."""

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_NARROW = {"num_attention_heads": 2, "num_key_value_heads": 2}
_NARROW_LAYERS = {
    "head_dim": 16,
    "layer_types": [
        "indexed_attention",
        "indexed_attention",
        "sliding_attention",
        "sliding_attention",
    ],
    "per_layer_config": {2: _NARROW, 3: _NARROW},
}
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "dots3_note": {"text_config": _NARROW_LAYERS},
    "dots3_note_text": _NARROW_LAYERS,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "nemotron_h": {"n_groups": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local"] * 4},
    "xlm": {"use_lang_emb": False, "n_langs": 1},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> what its configuration is given beside `SIZES`."""


def causal_types() -> list[str]:
    """Every model type that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Any:
    """A transformers configuration of four layers and a few ten thousand parameters."""
    from transformers import AutoConfig

    config = _shrunk(AutoConfig.for_model(model_type), NEEDS.get(model_type, {}))
    config.use_cache = False
    return config


def _shrunk(default: Any, needs: Mapping[str, Any]) -> Any:
    """A configuration of the class of `default`; those inside it are shrunk too."""
    kind, given = type(default), default.to_dict()
    known = {*given, *inspect.signature(kind.__init__).parameters}
    settings = {key: value for key, value in SIZES.items() if key in known}
    settings |= {key: 0.0 for key, value in given.items() if _is_random(key, value)}
    settings |= {key: 1 for key, value in given.items() if _is_token(key, value)}
    settings |= LATENT if "kv_lora_rank" in given else {}
    inner = {key: value for key, value in vars(default).items() if hasattr(value, "to_dict")}
    settings |= {key: value for key, value in needs.items() if key not in inner}
    for key, value in inner.items():
        settings[key] = _shrunk(value, needs.get(key, {})).to_dict()
    return kind(**settings)


def _is_random(key: str, value: Any) -> bool:
    return isinstance(value, float) and any(part in key for part in RANDOM)


def _is_token(key: str, value: Any) -> bool:
    """A token that stands for an image or the like, outside of the tiny vocabulary."""
    return key.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= VOCAB
