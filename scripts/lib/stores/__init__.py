"""Places that files are copied to: S3, the Hugging Face hub, any folder or fsspec URL. One interface for all.

A file counts as stored when the other side's own answer proves its bytes: S3 returns the SHA-256 that it
computed (of the whole file, or of all parts), the hub names the SHA-256 of what it holds, and from any
other place the bytes are read back.
"""

from scripts.lib.config.model import Upload
from scripts.lib.core.errors import UserError
from scripts.lib.stores.base import File, FileStore, TransferError
from scripts.lib.stores.filesystem import FilesystemStore
from scripts.lib.stores.hub import HubStore
from scripts.lib.stores.s3 import S3Store

__all__ = ["File", "FileStore", "TransferError", "open_store"]


def open_store(target: str, settings: Upload | None = None) -> FileStore:
    """The store of `s3://bucket/prefix`, `hf:owner/name`, an fsspec URL or a folder.

    `settings` tell endpoint and region of S3. Raises UserError for a URL that can't be used here.
    """
    if target.startswith("s3://"):
        return S3Store(target, settings or Upload())
    if target.startswith("hf:"):
        return HubStore(target)
    try:
        return FilesystemStore(target)
    except (ValueError, ImportError) as error:
        raise UserError(f"{target}: no place to copy files to: {error}") from None
    except OSError as error:  # some drivers connect at once
        raise UserError(f"{target}: can't be reached: {error}: check it, and that its server runs") from None
