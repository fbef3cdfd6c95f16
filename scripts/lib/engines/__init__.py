"""Engine adapters: pure functions between our prompts and each server's wire shapes."""
