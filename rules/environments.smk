"""Environments of inference servers, apart from the client's, made when a run needs them.

Input: a lock, envs/{name}.txt. Output: .venvs/{name}/.
"""


localrules:
    create_environment,


rule create_environment:
    """Install a server's lock, complete and unresolved, into a virtual environment of its own."""
    output:
        done=".venvs/{name}/drafter-corpus.json",
    log:
        "results/logs/create_environment/{name}.log",
    wildcard_constraints:
        name="|".join(PLAN.environments),
    conda:
        "../envs/client.yaml"
    shell:
        "exec python -m scripts.create_environment"
        " --name {wildcards.name}"
        " --output .venvs/{wildcards.name}"
        " > >(exec tee {log}) 2>&1"
