"""The one vLLM kernel that SGLang falls back to, in plain torch."""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate query and key in place, by vLLM's conventions.

    positions (tokens,); query and key (tokens, heads * head_size); cos_sin_cache (positions, rotary),
    first half cosines, second half sines. Neox style pairs the halves of a head, else neighbours.
    """
    cosines, sines = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
    rotary = cos_sin_cache.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        part = tensor.view(positions.numel(), -1, head_size)[..., :rotary]
        values = part.float()
        if is_neox:
            first, second = values.chunk(2, dim=-1)
        else:
            first, second = values[..., 0::2], values[..., 1::2]
        rotated = first * cosines - second * sines, second * cosines + first * sines
        joined = torch.cat(rotated, dim=-1) if is_neox else torch.stack(rotated, dim=-1).flatten(-2)
        part.copy_(joined)
