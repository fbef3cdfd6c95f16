"""Stage 2: the target answers every prompt, each answer is kept the moment it arrives, and each prompt has one outcome."""
