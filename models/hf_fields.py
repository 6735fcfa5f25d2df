"""Lists of config.json fields: fields that never change the output, and fields that may change it.

`HfConfig` checks the fields that a family's reader did not request against these lists. A field in
neither list raises an error, unless its value has the same meaning as an absent field."""


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Fields of training, generation loops and bookkeeping.
HARMLESS = names("""
    architectures model_type transformers_version torch_dtype dtype auto_map name_or_path
    _name_or_path _attn_implementation attn_implementation _attn_implementation_autoset
    attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout hidden_dropout_prob
    residual_dropout dropout classifier_dropout initializer_range initializer_factor
    initializer_cutoff_factor init_std init_method use_cache pretraining_tp
    gradient_checkpointing use_flash_attn use_flash_attention flash_attn use_kernel
    output_attentions output_hidden_states output_router_logits return_dict torchscript
    router_aux_loss_coef router_z_loss_coef aux_loss_alpha seq_aux router_jitter_noise
    input_jitter_noise moe_router_dtype scale_for_loss
    bos_token_id eos_token_id pad_token_id sep_token_id eod_token_id decoder_start_token_id
    unk_token_id
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    prefix bad_words_ids max_length min_length max_new_tokens do_sample temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size num_beams
    num_beam_groups diversity_penalty encoder_no_repeat_ngram_size early_stopping
    num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty tokenizer_class chunk_size_feed_forward pruned_heads
    tf_legacy_loss use_bfloat16 cross_attention_hidden_size ep_size trust_remote_code
    model_max_length max_model_len tokenizer_model_max_length max_sequence_length
    original_architectures is_llama_config transformers.js_config full_attn_mod interpolate_factor
    bos_token eos_token pad_token unk_token keys_to_ignore_at_inference
    mtp_transformer_layers num_mtp_modules use_mtp num_nextn_predict_layers num_mtp_layers
    cache_implementation
""")

# Fields of a multimodal model outside of its text part (`text_config`). Only the text part is
# served.
VISION = names("""
    text_config vision_config audio_config image_token_id image_token_index video_token_id
    vision_start_token_id vision_end_token_id vision_feature_layer vision_feature_select_strategy
    spatial_merge_size multimodal_projector_bias projector_hidden_act image_seq_length
    architectures boi_token_index eoi_token_index boi_token_id eoi_token_id mm_tokens_per_image
    boa_token_id eoa_token_id eoa_token_index audio_token_id vision_soft_tokens_per_image
    media_placeholder_token_id use_unified_vision_chunk video_placeholder ignore_index
    projection_hidden_size projection_layer_norm_eps vision_token_id image_start_token_id
    image_end_token_id downsample_ratio video_start_token_id video_end_token_id
    audio_start_token_id audio_end_token_id position_id_per_seconds user_token_id
    video_token_index projector_hidden_size img_token_compression_config merged_hidden_size
""")

# Options of some families that change the output, with their meaning. Families without support
# refuse them.
CHANGING: dict[str, str] = {
    "quantization_config": "quantized weights",
    "quantization": "quantized weights",
    "compression_config": "quantized weights",
    "attn_logit_softcapping": "capped attention scores",
    "final_logit_softcapping": "capped logits",
    "query_pre_attn_scalar": "another attention scale",
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
    "embedding_multiplier": "scaled embeddings",
    "scale_embedding": "scaled embeddings",
    "residual_multiplier": "scaled residuals",
    "scale_depth": "scaled residuals",
    "attention_multiplier": "another attention scale",
    "clip_qkv": "clipped queries, keys and values",
    "use_parallel_residual": "attention and feed-forward side by side",
    "parallel_attn": "attention and feed-forward side by side",
    "alibi": "positions by ALiBi",
    "cross_attention_layers": "cross-attention",
    "add_cross_attention": "cross-attention",
    "is_encoder_decoder": "an encoder",
    "tie_encoder_decoder": "an encoder",
    "audio_config": "audio",
    "no_rope_layers": "layers without rotary positions",
    "attention_chunk_size": "attention in chunks",
    "dual_chunk_attention_config": "dual chunk attention",
    "num_shared_experts": "shared experts",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "a shared expert",
    "attention_sinks": "attention sinks",
    "use_mrope": "positions in three dimensions",
    "llama_4_scaling": "queries scaled by position",
    "use_bidirectional_attention": "attention to later tokens",
    "is_causal": "attention to later tokens",
    "lm_head_bias": "a bias on the logits",
    "layer_types": "layers of several kinds",
    "sliding_window": "attention to a window",
    "use_sliding_window": "attention to a window",
    "partial_rotary_factor": "partly rotated heads",
    "rotary_dim": "partly rotated heads",
    "kv_lora_rank": "latent attention",
    "global_head_dim": "heads of another size in some layers",
    "num_global_key_value_heads": "other kv heads in some layers",
    "attention_k_eq_v": "keys that also serve as values",
    "num_kv_shared_layers": "layers that share keys and values",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "per_layer_config": "layers of several sizes",
    "moe_layer_freq": "dense layers between layers with experts",
    "enable_moe_block": "experts beside a dense block",
    "use_double_wide_mlp": "dense blocks of several widths",
}

# Values that have the same meaning as an absent field, in addition to null, false, 0 and empty.
NEUTRAL: dict[str, object] = {
    "is_causal": True,
    "is_decoder": True,
    "logits_scaling": 1,
    "logit_scale": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "partial_rotary_factor": 1,
    "moe_layer_freq": 1,
}
# Fields whose absence means true.
_TRUE_WHERE_ABSENT = frozenset({"is_causal"})


def says_nothing(name: str, value: object) -> bool:
    """Whether this value of a config.json field has the same meaning as an absent field."""
    if name in _TRUE_WHERE_ABSENT:
        return value is None or value is True
    return not value or (name in NEUTRAL and value == NEUTRAL[name])


def harmless(name: str) -> bool:
    return name in HARMLESS or name.startswith(("_", "unsloth_"))


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
