"""Stage 3: training samples, `input_ids` and `loss_mask`, one job per shard.

Input: prompts, and for class B their completions. Output: results/tokens/{dataset}/{shard}.parquet.
"""


rule tokenize_completions:
    """Class B: prompt ids and sampled ids become samples; only sampled ids are supervised."""
    input:
        target="results/target/target.json",
        prompts="results/prompts/{dataset}/{shard}.parquet",
        completions="results/completions/{dataset}/{shard}.parquet",
    output:
        tokens="results/tokens/{dataset}/{shard}.parquet",
    log:
        "results/logs/tokenize_completions/{dataset}/{shard}.log",
    wildcard_constraints:
        dataset="|".join(PLAN.answered) or "none",
    conda:
        "../envs/client.yaml"
    params:
        settings=lambda wildcards: PLAN.settings("tokens", wildcards.dataset),
    shell:
        "exec python -m scripts.tokenize_completions"
        " --config results/state/config.json"
        " --dataset {wildcards.dataset}"
        " --target results/target"
        " --prompts {input.prompts}"
        " --completions {input.completions}"
        " --output {output.tokens}"
        " > {log} 2>&1"


rule tokenize_conversations:
    """Class A: ready conversations are rendered, ready tokens are checked; nothing is generated."""
    input:
        target="results/target/target.json",
        prompts="results/prompts/{dataset}/{shard}.parquet",
    output:
        tokens="results/tokens/{dataset}/{shard}.parquet",
    log:
        "results/logs/tokenize_conversations/{dataset}/{shard}.log",
    wildcard_constraints:
        dataset="|".join(PLAN.ready) or "none",
    conda:
        "../envs/client.yaml"
    params:
        settings=lambda wildcards: PLAN.settings("tokens", wildcards.dataset),
    shell:
        "exec python -m scripts.tokenize_conversations"
        " --config results/state/config.json"
        " --dataset {wildcards.dataset}"
        " --target results/target"
        " --prompts {input.prompts}"
        " --output {output.tokens}"
        " > {log} 2>&1"
