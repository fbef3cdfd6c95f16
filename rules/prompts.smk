"""Stage 1: prompts, one job per dataset.

Input: the dataset's source files; the keys of the datasets before it, whose duplicates it drops.
Output: results/prompts/{dataset}/: one Parquet file per shard, keys.parquet, report.json.
"""


wildcard_constraints:
    dataset="[A-Za-z0-9][A-Za-z0-9_-]*",
    shard=r"\d{3}",


rule prompts:
    """Stage 1 only."""
    input:
        expand("results/prompts/{dataset}/report.json", dataset=PLAN.datasets),


rule prepare_prompts:
    """Read a source, clean it, choose prompts, give them stable ids, cut them into shards."""
    input:
        target="results/target/target.json",
        sources=lambda wildcards: PLAN.sources[wildcards.dataset],
        evaluation_sets=PLAN.evaluation_sets,
        # Datasets that are named before this one keep a duplicate prompt.
        earlier=lambda wildcards: expand(
            "results/prompts/{earlier}/keys.parquet",
            earlier=PLAN.before(wildcards.dataset),
        ),
    output:
        shards=expand("results/prompts/{{dataset}}/{shard}.parquet", shard=PLAN.shards),
        prompt_keys="results/prompts/{dataset}/keys.parquet",
        report="results/prompts/{dataset}/report.json",
    log:
        "results/logs/prepare_prompts/{dataset}.log",
    benchmark:
        "results/benchmarks/prepare_prompts/{dataset}.jsonl"
    conda:
        "../envs/client.yaml"
    params:
        settings=lambda wildcards: PLAN.settings("prompts", wildcards.dataset),
    shell:
        "exec python -m scripts.prepare_prompts"
        " --config results/state/config.json"
        " --dataset {wildcards.dataset}"
        " --target results/target"
        " --earlier {input.earlier}"
        " --output results/prompts/{wildcards.dataset}"
        # tee: rows that can't be used are to be seen.
        " 2> >(exec tee -i -a {log} >&2)"
