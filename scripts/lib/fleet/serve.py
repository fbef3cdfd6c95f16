"""Keeping the servers up for people, in the foreground."""

import time
from collections.abc import Callable
from pathlib import Path

from scripts.lib.config.model import Config
from scripts.lib.fleet.lease import Endpoint, lease

LANE = "serve"
_LOOK = 2.0


def serve(config: Config, target_dir: Path, state: Path, say: Callable[[str], None]) -> None:
    """Hold a lease and tell what happens to the endpoints, until interrupted.

    Raises UserError when no server can be kept up.
    """
    with lease(config, target_dir, state, LANE) as held:
        known: list[Endpoint] = []
        say("starting the servers")
        while True:
            ready = held.endpoints(timeout=_LOOK)
            for endpoint in ready:
                if endpoint not in known:
                    say(f"ready: {endpoint.url}")
            for endpoint in known:
                if endpoint not in ready:
                    say(f"gone: {endpoint.url}")
            known = ready
            time.sleep(_LOOK if ready else 0)
