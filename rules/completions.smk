"""Stage 2: the target answers, one job per shard of a class-B dataset.

Input: a prompt shard. Output: results/completions/{dataset}/{shard}.parquet, one terminal outcome
per prompt. What a job has received lies in results/state/ from the moment that it arrives, so a
rerun asks for nothing twice.
"""

STOP_SERVERS = "python -m scripts.stop_servers --state results/state"


rule completions:
    """Stages 1 and 2 only: everything that needs the servers."""
    input:
        expand("results/completions/{dataset}/{shard}.parquet", dataset=PLAN.answered, shard=PLAN.shards),


rule generate_completions:
    """Ask the servers for an answer to every prompt of a shard; keep the exact ids."""
    input:
        target="results/target/target.json",
        prompts="results/prompts/{dataset}/{shard}.parquet",
        # ancient: an environment that was made anew doesn't make answers stale.
        environment=ancient(PLAN.environment),
    output:
        completions="results/completions/{dataset}/{shard}.parquet",
    log:
        "results/logs/generate_completions/{dataset}/{shard}.log",
    benchmark:
        "results/benchmarks/generate_completions/{dataset}.{shard}.jsonl"
    wildcard_constraints:
        dataset="|".join(PLAN.answered) or "none",
    conda:
        "../envs/client.yaml"
    params:
        settings=lambda wildcards: PLAN.settings("completions", wildcards.dataset),
    shell:
        # tee: a run of hours must be seen to be alive, on screen and in the log.
        "exec python -m scripts.generate_completions"
        " --config results/state/config.json"
        " --dataset {wildcards.dataset}"
        " --shard {wildcards.shard}"
        " --target results/target"
        " --prompts {input.prompts}"
        " --output {output.completions}"
        " --state results/state"
        " 2> >(exec tee -i -a {log} >&2)"


rule serve:
    """Start the servers and keep them up in the foreground, until Ctrl-C."""
    input:
        target="results/target/target.json",
        environment=ancient(PLAN.environment),
    log:
        "results/logs/serve.log",
    conda:
        "../envs/client.yaml"
    shell:
        "exec python -m scripts.serve"
        " --config results/state/config.json"
        " --target results/target"
        " --state results/state"
        " 2> >(exec tee -i -a {log} >&2)"
