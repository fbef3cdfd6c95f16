"""Stage 3: completions and conversations become samples, `input_ids` and `loss_mask`."""
