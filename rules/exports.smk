"""What leaves the house: the corpus in trainers' formats, and finished files copied to a store.

Input: results/training/. Output: results/exports/{format}/; objects at `upload.target`.
"""


include: "common.smk"


for export_format in PLAN.export_formats:

    rule:
        name:
            f"export_{export_format}"
        input:
            target="results/target/target.json",
            corpus="results/state/training.json",
        output:
            summary=f"results/exports/{export_format}/export.json",
        log:
            f"results/logs/export_training/{export_format}.log",
        conda:
            "../envs/client.yaml"
        params:
            format=export_format,
        shell:
            "exec python -m scripts.export_training"
            " --format {params.format}"
            " --training results/training"
            " --target results/target"
            " --output results/exports/{params.format}"
            " > >(exec tee {log}) 2>&1"


rule upload_results:
    """Copy what is finished to `upload.target` and verify it there. (A run does it in the background.)"""
    log:
        "results/logs/upload_results.log",
    conda:
        "../envs/client.yaml"
    shell:
        "exec python -m scripts.upload_results"
        " --config results/state/config.json"
        " --results results"
        " > >(exec tee {log}) 2>&1"
