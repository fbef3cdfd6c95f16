"""The limit of open files: raised as far as it goes, never lowered."""

import resource

import pytest

from scripts.lib.core import open_files

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "needed", "allowed", "then"),
    [
        ((1024, 8192), 500, 1024, (1024, 8192)),
        ((1024, 8192), 4000, 4000, (4000, 8192)),
        ((1024, 8192), 9000, 8192, (8192, 8192)),
        ((1024, UNLIMITED), 9000, 9000, (9000, UNLIMITED)),
        ((UNLIMITED, UNLIMITED), 9000, 9000, (UNLIMITED, UNLIMITED)),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(limits, needed, allowed, then, monkeypatch):
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.append(pair))
    assert open_files.allow(needed) == allowed
    assert now[-1] == then
