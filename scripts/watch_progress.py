"""Show a run's progress from another terminal, or another machine that sees its folder.

Reads:  {progress}, which every generation job writes. Ends when the run is done, or with Ctrl-C.
"""

import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from scripts.lib.completions.progress import Figures, RunProgress
from scripts.lib.core import durable
from scripts.lib.core.command import command_line
from scripts.lib.core.errors import UserError, entry
from scripts.lib.core.screen import visible_line
from scripts.lib.core.units import duration, short


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__)
    parser.add_argument(
        "progress",
        type=Path,
        nargs="?",
        default=Path("results/progress.json"),
        metavar="FILE",
        help="progress.json of the run (default: results/progress.json)",
    )
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="SECONDS", help="pause between looks (default: 2)"
    )
    arguments = parser.parse_args(argv)
    console = Console()
    if arguments.once:
        console.print(table(read(arguments.progress)))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            progress = read(arguments.progress)
            live.update(table(progress), refresh=True)
            if progress.status == "done":
                return
            time.sleep(arguments.seconds)


def read(path: Path) -> RunProgress:
    """progress.json; raises UserError when there is none yet or it is of another version."""
    if not path.exists():
        raise UserError(f"{path}: nothing has run yet: `snakemake --cores 8 merge_training` starts a run")
    try:
        return RunProgress(**durable.read_json(path))
    except ValueError:
        raise UserError(f"{path}: not a progress file of this version") from None


def table(progress: RunProgress) -> Table:
    """One row per dataset, and the sum."""
    age = max(0.0, time.time() - progress.updated)
    made = Table(
        title=f"{progress.status}, as of {duration(age / 3600)} ago",
        box=box.SIMPLE,
        show_footer=True,
        title_justify="left",
        caption=uploads(progress),
        caption_justify="left",
    )
    cells = {name: row(figures) for name, figures in progress.datasets.items()}
    total = row(progress)
    headers = ("done", "err", "/s", "tok/s", "avg", "tokens", "cost", "flight", "eta")
    made.add_column("dataset", footer="all")
    for header, footer in zip(headers, total):
        made.add_column(header, justify="right", footer=footer, no_wrap=True)
    for name, texts in cells.items():
        made.add_row(Text(visible_line(name)), *texts)
    return made


def uploads(progress: RunProgress) -> str | None:
    """How far uploads are; None where nothing is uploaded."""
    if not progress.s3_uploaded and not progress.s3_failed:
        return None
    failed = f", {progress.s3_failed:,} failed: see results/state/upload.log" if progress.s3_failed else ""
    return f"uploaded: {progress.s3_uploaded:,} files, {short(progress.s3_bytes)}B{failed}"


def row(figures: Figures) -> tuple[str, ...]:
    return (
        f"{figures.completed + figures.failed}/{figures.total}",
        str(figures.failed),
        f"{figures.rate_per_sec:.1f}",
        short(figures.tokens_per_sec),
        f"{figures.avg_output_tokens:.0f}",
        short(figures.total_output_tokens),
        f"${figures.cost_usd:.2f}" if figures.cost_usd else "",
        f"{figures.in_flight:,}",
        duration(figures.eta_hours) if figures.status != "pending" else "",
    )


if __name__ == "__main__":
    sys.exit(main())
