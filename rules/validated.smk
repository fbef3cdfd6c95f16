"""Stage 4: samples that passed every gate, one job per shard, and one summary for all.

Input: tokens, and what they were made from (for the accounting).
Output: results/validated/{dataset}/{shard}.parquet, .rejects.parquet, .json; results/validated/summary.json.
"""


localrules:
    summarize_validation,


rule validate_tokens:
    """Check every sample against named gates; keep the rejects with their reasons."""
    input:
        target="results/target/target.json",
        prompts="results/prompts/{dataset}/{shard}.parquet",
        completions=branch(
            lambda wildcards: wildcards.dataset in PLAN.answered,
            then="results/completions/{dataset}/{shard}.parquet",
        ),
        tokens="results/tokens/{dataset}/{shard}.parquet",
    output:
        validated="results/validated/{dataset}/{shard}.parquet",
        rejects="results/validated/{dataset}/{shard}.rejects.parquet",
        summary="results/validated/{dataset}/{shard}.json",
    log:
        "results/logs/validate_tokens/{dataset}/{shard}.log",
    conda:
        "../envs/client.yaml"
    params:
        settings=PLAN.settings("validated"),
    shell:
        "exec python -m scripts.validate_tokens"
        " --config results/state/config.json"
        " --dataset {wildcards.dataset}"
        " --target results/target"
        " --prompts {input.prompts}"
        " --completions {input.completions}"
        " --tokens {input.tokens}"
        " --output {output.validated}"
        " --rejects {output.rejects}"
        " --summary {output.summary}"
        " > {log} 2>&1"


rule summarize_validation:
    """Add up all shards; stop the run here when too many samples were rejected."""
    input:
        target="results/target/target.json",
        summaries=expand("results/validated/{dataset}/{shard}.json", dataset=PLAN.datasets, shard=PLAN.shards),
    output:
        summary="results/validated/summary.json",
        frequencies="results/validated/token_frequencies.parquet",
    log:
        "results/logs/summarize_validation.log",
    conda:
        "../envs/client.yaml"
    params:
        settings=PLAN.settings("validated"),
    shell:
        "exec python -m scripts.summarize_validation"
        " --config results/state/config.json"
        " --target results/target"
        " --summaries {input.summaries}"
        " --output {output.summary}"
        " --token-frequencies {output.frequencies}"
        " > >(exec tee {log}) 2>&1"
