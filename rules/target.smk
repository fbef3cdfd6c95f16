"""Stage 0: the target model's tokenizer, chat template and facts, pinned for all later stages.

Input: the model named in `model` of the config. Output: results/target/.
"""


localrules:
    prepare_target,


rule prepare_target:
    """Tokenizer, template, vocabulary size, stop ids: everything that makes ids."""
    output:
        facts="results/target/target.json",
    log:
        "results/logs/prepare_target.log",
    conda:
        "../envs/client.yaml"
    params:
        settings=PLAN.settings("target"),
    shell:
        "exec python -m scripts.prepare_target"
        " --config results/state/config.json"
        " --output results/target"
        " > {log} 2>&1"
