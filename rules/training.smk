"""Stage 5: the corpus. results/training is swapped in whole, after a backup of what was there.

Input: all validated shards and their summary. Output: results/training/ (Parquet parts and
manifest.json) and results/backups/. Snakemake deletes declared outputs before it reruns a job, so
the declared outputs are receipts and the corpus itself is never at risk.
"""


localrules:
    backup_training,
    restore_training,


rule backup_training:
    """Snapshot the current corpus, verified by checksum, before anything replaces it."""
    input:
        summary="results/validated/summary.json",
        validated=expand("results/validated/{dataset}/{shard}.parquet", dataset=PLAN.datasets, shard=PLAN.shards),
    output:
        receipt="results/state/backup.json",
    log:
        "results/logs/backup_training.log",
    conda:
        "../envs/client.yaml"
    params:
        settings=PLAN.settings("training"),
    shell:
        "exec python -m scripts.backup_training"
        " --config results/state/config.json"
        " --training results/training"
        " --backups results/backups"
        " --receipt {output.receipt}"
        " > >(exec tee {log}) 2>&1"


rule merge_training:
    """Mix all validated shards (and a base corpus) into the training corpus."""
    input:
        backup="results/state/backup.json",
        summary="results/validated/summary.json",
        validated=expand("results/validated/{dataset}/{shard}.parquet", dataset=PLAN.datasets, shard=PLAN.shards),
    output:
        receipt="results/state/training.json",
    log:
        "results/logs/merge_training.log",
    benchmark:
        "results/benchmarks/merge_training.jsonl"
    conda:
        "../envs/client.yaml"
    params:
        settings=PLAN.settings("training"),
        # Not among the outputs, so a corpus that was removed by hand is noticed here.
        corpus=(
            "missing"
            if os.path.exists("results/state/training.json") and not os.path.exists("results/training/manifest.json")
            else None
        ),
    shell:
        "exec python -m scripts.merge_training"
        " --config results/state/config.json"
        " --validated {input.validated}"
        " --summary {input.summary}"
        " --training results/training"
        " --receipt {output.receipt}"
        " > >(exec tee {log}) 2>&1"


rule restore_training:
    """Bring a backup back: snakemake --cores 1 restore_training --config restore=NAME"""
    log:
        "results/logs/restore_training.log",
    conda:
        "../envs/client.yaml"
    params:
        name=PLAN.config.restore or "",
    shell:
        "exec python -m scripts.restore_training"
        " --training results/training"
        " --backups results/backups"
        " --name {params.name:q}"
        " > >(exec tee {log}) 2>&1"
