"""The report of a run: one offline page that shows in a minute whether the corpus is true.

`run` gathers what the files of all stages tell, `ledger` adds it up, `suspicions` and `comparisons` say what is
suspicious, `origins` where everything came from, `plots` draws, `page` puts the page together.
"""

from scripts.lib.report.page import write_report

__all__ = ["write_report"]
