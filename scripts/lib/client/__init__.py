"""What asking servers takes, whoever asks: generation and hidden states share it."""
