"""Copy finished files to `upload.target`: S3, another fsspec URL, or the Hugging Face hub.

Reads:  the stages of {results} that `upload.stages` names, and the ledger {results}/state/uploads/.
Writes: the target; the ledger; {results}/state/uploads.json (counts). Local files are never touched.
"""

import signal
import sys

from scripts.lib.config.file import load_config
from scripts.lib.core.command import command_line, say
from scripts.lib.core.errors import UserError, entry
from scripts.lib.exports.upload import Uploader
from scripts.lib.stores import open_store


@entry
def main(argv: list[str] | None = None) -> None:
    parser = command_line(__file__, __doc__, "config", "results")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--watch", type=int, metavar="PID", help="go on for as long as this process lives, in the background of a run"
    )
    how.add_argument("--tell", action="store_true", help="send nothing, say what is not uploaded")
    how.add_argument("--brief", action="store_true", help="no line per file: only what is to be done and how it ended")
    arguments = parser.parse_args(argv)
    settings = load_config(*arguments.config).upload
    target = settings.target
    if target is None:
        raise UserError("upload.target is not set: nothing to upload to")

    def quiet(line: str) -> None:
        """Says nothing: the last line says it all."""

    uploader = Uploader(
        arguments.results, settings, lambda: open_store(target, settings), quiet if arguments.brief else say
    )
    if arguments.tell:
        counts = uploader.counts()
        if counts.missing:
            say(f"upload: {counts.line(target)}: `snakemake --cores 1 upload_results` sends them")
        return
    if arguments.watch is not None:
        # Ctrl-C reaches the whole group; the last pass comes when the run has ended.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        counts = uploader.watch(arguments.watch)
    else:
        if arguments.brief and (left := uploader.counts().missing):
            say(f"upload: {left} files are still to be sent to {target}")
        counts = uploader.finish()
    if counts.missing:
        raise UserError(f"upload: {counts.line(target)}: mend it and run `upload_results`, nothing is lost here")
    say(f"upload: {counts.line(target)}")


if __name__ == "__main__":
    sys.exit(main())
