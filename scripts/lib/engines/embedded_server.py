"""The embedded llama.cpp server in a process of its own. It imports nothing of this project.

python scripts/lib/fleet/embedded_server.py --model FILE --port N --slots N --context N --threads N
"""

import argparse
import signal
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    parser.add_argument("--slots", type=int, required=True, help="sequences decoded at once")
    parser.add_argument("--context", type=int, required=True, help="tokens of context, of all slots together")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads")
    arguments = parser.parse_args(argv)

    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(arguments.model)
    parameters.port = arguments.port
    parameters.hostnames = ["127.0.0.1"]
    parameters.n_parallel = arguments.slots
    parameters.n_ctx = arguments.context
    parameters.cont_batching = True
    parameters.use_jinja = True
    parameters.endpoint_metrics = True
    parameters.cpuparams.n_threads = arguments.threads
    parameters.cpuparams_batch.n_threads = arguments.threads
    server = xllamacpp.Server(parameters)
    print(f"serving {arguments.model} at {server.listening_address}", flush=True)
    # SIGTERM keeps its default action: there is nothing to save, and the port and memory are free at once.
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
