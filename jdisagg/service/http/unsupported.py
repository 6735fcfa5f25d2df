"""Tables of request fields that other servers support and jdisagg does not.

Some fields would change the tokens of an answer, or request content that the reply cannot have. A
request with such a field is refused with an error that names the field. A value without effect,
such as 1 for a factor, is accepted. Known fields that have no meaning in jdisagg are ignored.
Unknown fields are ignored too, and a header of the reply lists them."""

from collections.abc import Mapping

# For each field, the values without effect, and the advice in the error for other values.
Refused = Mapping[str, tuple[tuple[object, ...], str]]

_SAMPLING = "sample with temperature, top_p, top_k and min_p"
_KV = "the server moves KV between its own workers"
_MEANS = "send {}".format
REFUSED: Refused = {
    "suffix": (("",), "put all of the preceding text into the prompt"),
    "use_beam_search": ((False,), "use n for several sampled answers"),
    "length_penalty": ((1,), "omit it, since there is no beam search"),
    "spaces_between_special_tokens": ((True, False), "omit it"),
    "truncate_prompt_tokens": ((-1,), "truncate the prompt yourself; /tokenize counts its tokens"),
    "logits_processors": (([],), "use logit_bias"),
    # vLLM's and SGLang's
    **dict.fromkeys(
        ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens", "reasoning_budget"),
        ((-1,), "limit the whole answer with max_tokens"),
    ),
    "repetition_detection": (({},), "use frequency_penalty or repetition_penalty"),
    "logprob_token_ids": (([],), "ask for the most likely tokens with logprobs"),
    "prompt_embeds": (([],), "send text or token ids"),
    "input_ids": (([],), "send token ids as prompt of /v1/completions"),
    "vllm_xargs": (({},), "omit it, since there are no plug-ins for sampling"),
    "custom_params": (({},), "omit it, since there are no plug-ins for sampling"),
    "custom_logit_processor": (("",), "use logit_bias"),
    "watermark": ((False, {}), "omit it"),
    "watermarking": ((False, {}), "omit it"),
    "stop_regex": (("", []), "send texts as stop"),
    "lora_path": (("",), "load the adapter (/v1/load_lora_adapter) and give its name as model"),
    "session_params": (({},), "send the whole conversation; the prefix cache finds its KV"),
    "task": ((), "describe the task in a message"),
    "separate_reasoning": ((True,), "join reasoning_content and content yourself"),
    "stream_reasoning": ((True,), "omit it; reasoning is streamed as it is generated"),
    "include_reasoning": ((True,), "leave reasoning_content out of the reply yourself"),
    "sampling_logprobs_mode": ((), "omit it; log-probabilities precede temperature and filters"),
    "return_hidden_states": ((False,), "omit it"),
    "return_sampling_mask": ((False,), "omit it"),
    "return_routed_experts": ((False,), "omit it"),
    "kv_transfer_params": (({},), _KV),
    "ec_transfer_params": (({},), _KV),
    "bootstrap_host": (("", []), _KV),
    "bootstrap_port": (([],), _KV),
    "bootstrap_room": (([],), _KV),
    # other servers' ways to sample
    "do_sample": ((True,), "send temperature 0 for greedy decoding"),
    "num_beams": ((1,), "use n for several sampled answers"),
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), ((), _MEANS("max_tokens"))),
    "min_new_tokens": ((0,), _MEANS("min_tokens")),
    "repeat_penalty": ((1,), _MEANS("repetition_penalty")),
    "repeat_last_n": ((0,), "omit it; repetition_penalty covers prompt and answer"),
    "no_repeat_ngram_size": ((0,), "use repetition_penalty"),
    **dict.fromkeys(("typical_p", "typical", "tfs_z", "tfs"), ((1,), _SAMPLING)),
    **dict.fromkeys(
        (
            *("top_a", "top_n_sigma", "epsilon_cutoff", "eta_cutoff", "mirostat", "mirostat_mode"),
            *("dynatemp_range", "xtc_probability", "dry_multiplier", "smoothing_factor"),
        ),
        ((0, -1), _SAMPLING),
    ),
    "guidance_scale": ((1,), "omit it, since there is no classifier-free guidance"),
    "negative_prompt": (("",), "omit it, since there is no classifier-free guidance"),
}
REFUSED_OF_CHATS: Refused = {
    "functions": (([],), "send them as tools"),
    "function_call": (("none", "auto"), "send tool_choice"),
    "audio": ((), "only text is generated"),
    "modalities": ((["text"],), "only text is generated"),
    "web_search_options": ((), "the server has no web search"),
    "chat_template": ((), "the model's own template is used"),
    "add_special_tokens": ((False,), "omit it; the chat template writes special tokens"),
    "echo": ((False,), "join the last message and the answer yourself"),
}
REFUSED_OF_RESPONSES: Refused = {
    "enable_response_messages": ((False,), "read the reply's output"),
    "previous_input_messages": (([],), "send the conversation as input"),
}
WITHOUT_MEANING = (
    *("user", "safety_identifier", "metadata", "store", "service_tier", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
    # hints for placement, batching and metrics
    *("session_id", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
    *("stream_interval", "custom_labels", "truncation_side"),
    # settings of images, whose processor is the checkpoint's, and of video and audio
    *("mm_processor_kwargs", "media_io_kwargs", "mm_payload", "return_mm_kwargs"),
    *("images_config", "video_config", "use_audio_in_video"),
    *("max_dynamic_patch", "min_dynamic_patch"),
)
