"""S3 and compatible servers, through boto3: pyarrow.fs and fsspec neither show the server's checksums nor
resume a multipart upload.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.lib.config.model import Upload
from scripts.lib.core import durable
from scripts.lib.core.errors import UserError
from scripts.lib.stores.base import CHUNK, File, TransferError

PART_BYTES = 64 << 20  # of a multipart upload; S3 allows 10,000 parts of at most 5 GB


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(PART_BYTES):
            yield block


class S3Store:
    """A bucket of S3 or of a compatible server. Credentials come from where boto3 looks for them, never the config."""

    batch = 1

    def __init__(self, url: str, settings: Upload) -> None:
        """Raises UserError when boto3 is missing or the URL names no bucket."""
        try:
            import boto3
            from botocore.config import Config as ClientConfig
        except ImportError:
            raise UserError(f"{url}: S3 needs boto3: run `make setup`") from None
        self.url = url.rstrip("/")
        self.bucket, _, self.prefix = url.removeprefix("s3://").strip("/").partition("/")
        if not self.bucket:
            raise UserError(f"{url}: names no bucket: s3://bucket/prefix")
        self._client = boto3.session.Session().client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region,
            # Our own SHA-256 is sent with each request; boto3's CRCs on top confuse older servers.
            config=ClientConfig(
                retries={"mode": "standard", "max_attempts": 5},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{key}" if self.prefix else key}

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(**arguments)
        except ClientError as error:
            code = error.response["Error"].get("Code", "")
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if code in ("404", "NoSuchKey", "NotFound", "NoSuchUpload"):
                raise FileNotFoundError(arguments.get("Key")) from None
            if code == "NoSuchBucket" or status == 403:
                raise UserError(f"{self.url}: {code} from the server: check bucket and credentials") from None
            raise TransferError(
                f"{self.url}: {operation}: {code} {error.response['Error'].get('Message', '')}"
            ) from None
        except BotoCoreError as error:
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
                raise UserError(f"{self.url}: {error}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from None
            raise TransferError(f"{self.url}: {operation}: {' '.join(str(error).split())}") from None

    def holds(self, file: File) -> bool:
        try:
            head = self._call("head_object", **self._where(file.key), ChecksumMode="ENABLED")
        except FileNotFoundError:
            return False
        return head["ContentLength"] == file.size and head.get("Metadata", {}).get("sha256") == file.sha256

    def put(self, files: Sequence[File]) -> None:
        for file in files:
            try:
                self._put_whole(file) if file.size <= PART_BYTES else self._put_parts(file)
            except FileNotFoundError:
                if not file.path.exists():
                    raise
                file.memory.clear()
                raise TransferError(
                    f"{self.url}/{file.key}: the server forgot the upload: it will begin anew"
                ) from None

    def _put_whole(self, file: File) -> None:
        digest = _base64(bytes.fromhex(file.sha256))
        with open(file.path, "rb") as body:
            answer = self._call(
                "put_object",
                **self._where(file.key),
                Body=body,
                ChecksumSHA256=digest,
                Metadata={"sha256": file.sha256},
            )
        self._prove(file, answer.get("ChecksumSHA256"), digest)

    def _put_parts(self, file: File) -> None:
        where = self._where(file.key)
        memory = file.memory
        there: dict[int, dict[str, Any]] = {}
        if memory.get("sha256") == file.sha256 and "upload_id" in memory:
            there = self._parts_there(where, memory["upload_id"])
        else:
            if "upload_id" in memory:  # of an older content
                self._abort(where, memory["upload_id"])
            answer = self._call(
                "create_multipart_upload", **where, ChecksumAlgorithm="SHA256", Metadata={"sha256": file.sha256}
            )
            memory.update(upload_id=answer["UploadId"], sha256=file.sha256)
            file.save()
        upload = {**where, "UploadId": memory["upload_id"]}
        parts, digests = [], b""
        for number, body in enumerate(_blocks(file.path), 1):
            digest = hashlib.sha256(body).digest()
            tag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
            if there.get(number, {}).get("ETag") != tag:
                answer = self._call(
                    "upload_part", **upload, PartNumber=number, Body=body, ChecksumSHA256=_base64(digest)
                )
                tag = answer["ETag"]
            parts.append({"PartNumber": number, "ETag": tag, "ChecksumSHA256": _base64(digest)})
            digests += digest
        answer = self._call("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
        memory.clear()
        composite = f"{_base64(hashlib.sha256(digests).digest())}-{len(parts)}"
        self._prove(file, answer.get("ChecksumSHA256"), composite)

    def _parts_there(self, where: dict, upload_id: str) -> dict[int, dict[str, Any]]:
        there, marker = {}, 0
        while True:
            answer = self._call("list_parts", **where, UploadId=upload_id, PartNumberMarker=marker)
            there.update({part["PartNumber"]: part for part in answer.get("Parts", [])})
            if not answer.get("IsTruncated"):
                return there
            marker = answer["NextPartNumberMarker"]

    def _abort(self, where: dict, upload_id: str) -> None:
        try:
            self._call("abort_multipart_upload", **where, UploadId=upload_id)
        except FileNotFoundError:
            pass

    def _prove(self, file: File, told: str | None, expected: str) -> None:
        """The server's checksum must be ours; a server that tells none is asked for the bytes."""
        if told is not None:
            if told != expected:
                raise TransferError(f"{self.url}/{file.key}: the server's checksum {told} is not ours, {expected}")
            if self.holds(file):
                return
            raise TransferError(f"{self.url}/{file.key}: the server stored another file than was sent")
        if self._remote_sha256(file.key) != file.sha256:
            raise TransferError(f"{self.url}/{file.key}: the bytes read back are not those that were sent")

    def _remote_sha256(self, key: str) -> str:
        value = hashlib.sha256()
        for chunk in self._call("get_object", **self._where(key))["Body"].iter_chunks(CHUNK):
            value.update(chunk)
        return value.hexdigest()

    def get(self, key: str, path: Path) -> None:
        try:
            answer = self._call("get_object", **self._where(key))
        except FileNotFoundError:
            raise TransferError(f"{self.url}/{key}: is not there") from None
        with durable.replacing(path) as temporary, open(temporary, "wb") as file:
            for chunk in answer["Body"].iter_chunks(CHUNK):
                file.write(chunk)

    def keys(self, prefix: str) -> list[str]:
        found: list[str] = []
        arguments = {"Bucket": self.bucket, "Prefix": self._where(prefix)["Key"]}
        while True:
            answer = self._call("list_objects_v2", **arguments)
            found += [one["Key"] for one in answer.get("Contents", [])]
            if not answer.get("IsTruncated"):
                return sorted(key.removeprefix(f"{self.prefix}/") if self.prefix else key for key in found)
            arguments["ContinuationToken"] = answer["NextContinuationToken"]

    def delete(self, key: str) -> None:
        self._call("delete_object", **self._where(key))
