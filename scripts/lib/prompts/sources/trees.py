"""Nested reply trees (Open Assistant): one conversation of each, along the best-ranked replies."""

from typing import Any

from scripts.lib.prompts.defects import Defect

_REPLIES = ("replies", "children")


def best_path(root: Any) -> list[dict]:
    """The turns from the root to a leaf: at each node the reply of the lowest rank, or the first one.

    Deleted replies are passed over. One path only: the others share its first prompts.
    """
    if not isinstance(root, dict):
        raise Defect("bad_messages", "the tree has no root")
    path = []
    node: dict | None = root
    while node is not None:
        path.append({key: value for key, value in node.items() if key not in _REPLIES})
        node = _best(next((node[key] for key in _REPLIES if isinstance(node.get(key), list)), []))
    return path


def _best(replies: list) -> dict | None:
    alive = [reply for reply in replies if isinstance(reply, dict) and not reply.get("deleted")]
    return min(alive, key=_rank, default=None)


def _rank(reply: dict) -> float:
    rank = reply.get("rank")
    return rank if isinstance(rank, int | float) else float("inf")
