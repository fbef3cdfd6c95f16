"""The library behind the entries: one module per idea, none of them knows Snakemake."""
