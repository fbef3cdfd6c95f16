"""How many files and connections this process may have open at once."""

import resource


def allow(needed: int) -> int:
    """Raise the limit to `needed`, or as near to it as the hard limit lets. Returns how many are allowed then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return needed
    if soft >= needed:
        return soft
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
