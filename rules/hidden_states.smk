"""Optional: hidden states of corpus samples, for offline training. Only made when asked for: snakemake hidden_states

Input: results/training/. Output: results/hidden_states/ (safetensors and manifest.json). The files cost GPU time and
Snakemake deletes declared outputs before it reruns a job, so the declared output is a receipt.
"""


rule hidden_states:
    """Hidden states of the samples that `hidden_states` in the configuration names."""
    input:
        # Says that an engine has none before the corpus is made.
        lambda wildcards: PLAN.hidden_states_receipt(),


rule extract_hidden_states:
    """Send the samples through SGLang servers that return the states of chosen layers."""
    input:
        target="results/target/target.json",
        corpus="results/state/training.json",
        environment=ancient(PLAN.environment),
    output:
        receipt="results/state/hidden_states.json",
    log:
        "results/logs/extract_hidden_states.log",
    benchmark:
        "results/benchmarks/extract_hidden_states.jsonl"
    conda:
        "../envs/client.yaml"
    params:
        settings=PLAN.settings("hidden_states"),
        # Not among the outputs, so files that were removed by hand are noticed here.
        files="missing" if PLAN.hidden_states_lost() else None,
    message:
        PLAN.hidden_states_size()
    shell:
        "exec python -m scripts.extract_hidden_states"
        " --config results/state/config.json"
        " --training results/training"
        " --target results/target"
        " --output results/hidden_states"
        " --state results/state"
        " --receipt {output.receipt}"
        " 2> >(exec tee -i -a {log} >&2)"
