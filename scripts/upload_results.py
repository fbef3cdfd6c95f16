"""Copy finished files to `upload.target`: S3, another fsspec URL, or the Hugging Face hub.

Reads:  the stages of {results} that `upload.stages` names, and the ledger {results}/state/uploads/.
Writes: the target; the ledger; {results}/state/uploads.json (counts). Local files are never touched.
"""

import argparse
import signal
import sys
from pathlib import Path

from scripts.lib.config.file import load_config
from scripts.lib.core.errors import UserError, entry
from scripts.lib.exports.upload import Uploader
from scripts.lib.stores import open_store


@entry
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="upload_results", description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="+", required=True, metavar="FILE", help="YAML or JSON, later over earlier")
    parser.add_argument("--results", required=True, type=Path, help="folder of all results")
    parser.add_argument(
        "--watch", type=int, metavar="PID", help="go on for as long as this process lives, in the background of a run"
    )
    options = parser.parse_args(argv)
    settings = load_config(*options.config).upload
    if settings.target is None:
        raise UserError("upload.target is not set: nothing to upload to")
    uploader = Uploader(
        options.results,
        settings,
        open_store(settings.target, settings),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.watch is not None:
        # Ctrl-C reaches the whole group; the last pass comes when the run has ended.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        uploader.watch(options.watch)
        return
    counts = uploader.once(hurry=True)
    if counts.s3_failed:
        key, error = next(iter(counts.errors.items()))
        raise UserError(
            f"{counts.s3_failed} files are not uploaded, such as {key}: {error}: run again, nothing is lost"
        )
    print(f"{settings.target}: {counts.s3_uploaded} files, {counts.s3_bytes} bytes, verified", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
