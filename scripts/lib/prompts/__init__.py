"""Stage 1: rows of sources become prompts, or are counted with the reason why not."""
