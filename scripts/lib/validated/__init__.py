"""Stage 4: every sample is checked before it may enter the corpus, and everything is accounted for."""
