"""Stage 5: validated samples become the corpus, with a backup before every merge."""
