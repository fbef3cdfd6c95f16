"""The report: one offline page about the run, finished or not.

Input: whatever lies in results/; a stage that hasn't run is shown as not done, and nothing is run to fill it in.
Output: results/report.html, made anew each time that it is asked for (no declared output: it is never up to date).
"""


localrules:
    report_corpus,


rule report_corpus:
    """Funnel, lengths, costs, provenance, samples and everything suspicious: snakemake --cores 1 report_corpus"""
    log:
        "results/logs/report_corpus.log",
    conda:
        "../envs/client.yaml"
    shell:
        "exec python -m scripts.report_corpus"
        " --config results/state/config.json"
        " --results results"
        " --output results/report.html"
        " > >(exec tee {log}) 2>&1"
