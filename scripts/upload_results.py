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
    parser.add_argument(
        "--watch", type=int, metavar="PID", help="go on for as long as this process lives, in the background of a run"
    )
    arguments = parser.parse_args(argv)
    settings = load_config(*arguments.config).upload
    if settings.target is None:
        raise UserError("upload.target is not set: nothing to upload to")
    uploader = Uploader(arguments.results, settings, open_store(settings.target, settings), say)
    if arguments.watch is not None:
        # Ctrl-C reaches the whole group; the last pass comes when the run has ended.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        uploader.watch(arguments.watch)
        return
    counts = uploader.once(hurry=True)
    if counts.s3_failed:
        key, error = next(iter(counts.errors.items()))
        raise UserError(
            f"{counts.s3_failed} files are not uploaded, such as {key}: {error}: run again, nothing is lost"
        )
    say(f"{settings.target}: {counts.s3_uploaded} files, {counts.s3_bytes} bytes, verified")


if __name__ == "__main__":
    sys.exit(main())
