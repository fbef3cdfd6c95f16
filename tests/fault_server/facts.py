"""What a server says about itself: models, versions, load."""

import orjson


def metrics(model: str, running: int, queued: int, usage: float, generated: int) -> str:
    """The load in the names of llama.cpp, SGLang and vLLM at once."""
    label = f'{{model_name="{model}"}}'
    lines = [
        f"llamacpp:requests_processing {running}",
        f"llamacpp:requests_deferred {queued}",
        f"llamacpp:tokens_predicted_total {generated}",
        f"llamacpp:n_decode_total {generated}",
        f"sglang:num_running_reqs{label} {running}",
        f"sglang:num_queue_reqs{label} {queued}",
        f"sglang:token_usage{label} {usage}",
        f"sglang:generation_tokens_total{label} {generated}",
        f"vllm:num_requests_running{label} {running}",
        f"vllm:num_requests_waiting{label} {queued}",
        f"vllm:kv_cache_usage_perc{label} {usage}",
        f"vllm:generation_tokens_total{label} {generated}",
    ]
    return "\n".join(lines) + "\n"


def documents(
    dialect: str, model: str, context_length: int, slots: int, layers: list[int] | None, last: bool, pool: int
) -> dict[str, bytes]:
    """JSON bodies by path."""
    card: dict = {"id": model, "object": "model", "owned_by": dialect, "root": model, "max_model_len": context_length}
    found: dict[str, dict] = {"/v1/models": {"object": "list", "data": [card]}}
    if dialect == "llamacpp":
        card["meta"] = {"n_ctx": context_length, "n_vocab": 49_152}
        found["/props"] = {
            "build_info": "b1-fault",
            "model_path": model,
            "total_slots": slots,
            "default_generation_settings": {"n_ctx": context_length},
        }
    elif dialect == "sglang":
        weights = {"model_path": model, "tokenizer_path": model, "is_generation": True}
        found["/model_info"] = weights
        found["/server_info"] = {
            **weights,
            "version": "0.5.23",
            "context_length": context_length,
            "max_total_num_tokens": pool,
            "max_req_input_len": min(context_length, pool) - 6,
            "disable_radix_cache": layers is not None or last,
            "chunked_prefill_size": -1 if layers is not None or last else 8192,
            "enable_return_hidden_states": last,
            "enable_return_aux_hidden_states": layers is not None,
            "aux_hidden_state_capture": None if layers is None else "eagle3",
            "return_aux_hidden_state_layer_ids": layers,
        }
    elif dialect == "vllm":
        found["/version"] = {"version": "0.32.0"}
    return {path: orjson.dumps(value) for path, value in found.items()}
