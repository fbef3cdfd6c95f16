"""A job of the fleet tests: holds a lease in a process of its own, so that it can be killed.

    python -m tests.stages.lease_holder CONFIG TARGET STATE LANE

Prints one JSON line per request on standard input: `endpoints`, `share N`. Ends with its input.
"""

import json
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.errors import UserError
from scripts.lib.fleet.lease import lease


def main(config: str, target: str, state: str, lane: str) -> None:
    with lease(load_config(config), Path(target), Path(state), lane) as held:
        for line in sys.stdin:
            if line.startswith("share"):
                answer = held.share(int(line.split()[1]))
            else:
                try:
                    answer = [[endpoint.url, endpoint.incarnation] for endpoint in held.endpoints()]
                except UserError as error:
                    answer = str(error)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
