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

_CREDENTIALS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_EXPIRED = "the credentials have expired: renew them, they are read again"
_CLOCK = "this machine's clock differs from the server's: set it"
_REGION = "the bucket is in another region: set upload.region, and upload.endpoint_url if it isn't AWS"
# What people must mend, by S3's own error codes
# (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#ErrorCodeList).
ADVICE = {
    "AccessDenied": "these credentials may not do that here: they need s3:PutObject for this prefix",
    "AccountProblem": "mend it with the provider",
    "AllAccessDisabled": "mend it with the provider",
    "AuthorizationHeaderMalformed": _REGION,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "IllegalLocationConstraintException": _REGION,
    "InvalidAccessKeyId": _CREDENTIALS,
    "InvalidBucketName": "check upload.target",
    "InvalidClientTokenId": _CREDENTIALS,
    "InvalidToken": "check AWS_SESSION_TOKEN",
    "KMS.DisabledException": "enable the bucket's key, or take another one",
    "MethodNotAllowed": "check upload.endpoint_url: no S3 is spoken there",
    "NoSuchBucket": "make the bucket, or check upload.target",
    "NotImplemented": "check upload.endpoint_url: this server can't do that",
    "NotSignedUp": "mend it with the provider",
    "PermanentRedirect": _REGION,
    "QuotaExceeded": "make room there",
    "RequestExpired": _CLOCK,
    "RequestTimeTooSkewed": _CLOCK,
    "SignatureDoesNotMatch": "the secret key is that of another access key: check AWS_SECRET_ACCESS_KEY",
    "StorageFull": "make room there",
    "TokenRefreshRequired": _EXPIRED,
    "UnrecognizedClientException": _CREDENTIALS,
    "XMinioStorageFull": "make room there",
}
# A HEAD has no body, so its errors have no code but the status; a GET of one byte tells the cause.
_MUTE = ("301", "307", "400", "401", "403")
# What botocore says when it finds no usable credentials, by the names of its exceptions.
_NO_CREDENTIALS = (
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError",
    "ConfigParseError", "ConfigNotFound", "TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError",
)  # fmt: skip


class _Mute(Exception):
    """A HEAD was refused, nobody knows why yet."""


class Unreadable(Exception):
    """These credentials may write but not read."""


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
            from botocore.exceptions import BotoCoreError
        except ImportError:
            raise UserError(f"{url}: S3 needs boto3: run `make setup`") from None
        self.url = url.rstrip("/")
        self.bucket, _, self.prefix = url.removeprefix("s3://").strip("/").partition("/")
        if not self.bucket:
            raise UserError(f"{url}: names no bucket: s3://bucket/prefix")
        try:
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
        except (BotoCoreError, ValueError) as error:  # a broken ~/.aws/config, an endpoint that is no URL
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> UserError:
        text = " ".join(str(error).split())
        where = "upload.endpoint_url and upload.region" if "ndpoint" in text or "egion" in text else "~/.aws"
        advice = _CREDENTIALS if type(error).__name__ in _NO_CREDENTIALS else f"check {where}"
        return UserError(f"{self.url}: {text}: {advice}")

    def _where(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": f"{self.prefix}/{key}" if self.prefix else key}

    def _call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(**arguments)
        except ClientError as error:
            raise self._cause(operation, error.response) from None
        except RecursionError:  # botocore asks for the bucket's region, and asks again when that is redirected as well
            raise UserError(
                f"{self.url}: the server redirects every request: check upload.endpoint_url (https, another host?)"
            ) from None
        except BotoCoreError as error:
            if type(error).__name__ in _NO_CREDENTIALS:
                raise self._unusable(error) from None
            if type(error).__name__ == "ParamValidationError" and "bucket" in str(error):
                raise UserError(f"{self.url}: S3 allows no such name of a bucket: check upload.target") from None
            raise TransferError(f"{self.url}: {operation}: {' '.join(str(error).split())}") from None

    def _cause(self, operation: str, response: dict[str, Any]) -> Exception:
        """What an error of the server means: nothing there, something to mend, or worth another attempt."""
        code, message = (str(response["Error"].get(name, "")) for name in ("Code", "Message"))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if code in ("404", "NoSuchKey", "NotFound", "NoSuchUpload"):
            return FileNotFoundError(operation)
        if code in _MUTE and operation == "head_object":
            return _Mute(f"{self.url}: {operation}: {code} {message}")
        told = " ".join(f"{self.url}: {code}: {message}".split())
        if code in ADVICE:
            return UserError(f"{told}: {ADVICE[code]}")
        if status in (301, 401, 403):
            return UserError(f"{told}: {_REGION if status == 301 else 'check bucket and credentials'}")
        return TransferError(f"{self.url}: {operation}: {code} {message}")

    def _head(self, key: str) -> dict[str, Any] | None:
        """What the server tells of a file; None when it isn't there.

        Raises Unreadable when these credentials may not ask.
        """
        try:
            return self._call("head_object", **self._where(key), ChecksumMode="ENABLED")
        except FileNotFoundError:
            return None
        except _Mute as mute:
            try:
                self._call("get_object", **self._where(key), Range="bytes=0-0")["Body"].close()
            except FileNotFoundError:
                return None
            except UserError as error:
                if ": AccessDenied: " in str(error):
                    raise Unreadable(str(error)) from None
                raise
            raise TransferError(str(mute)) from None

    def holds(self, file: File) -> bool:
        try:
            head = self._head(file.key)
        except Unreadable:
            return False  # sending tells whether these credentials are any good
        return head is not None and self._same(head, file)

    def _same(self, head: dict[str, Any], file: File) -> bool:
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
        if told is None:
            if self._remote_sha256(file.key) != file.sha256:
                raise TransferError(f"{self.url}/{file.key}: the bytes read back are not those that were sent")
            return
        if told != expected:
            raise TransferError(f"{self.url}/{file.key}: the server's checksum {told} is not ours, {expected}")
        try:
            head = self._head(file.key)
        except Unreadable:
            return  # its checksum must do
        if head is None or not self._same(head, file):
            raise TransferError(f"{self.url}/{file.key}: the server stored another file than was sent")

    def _chunks(self, key: str) -> Iterator[bytes]:
        """The bytes of a file. Raises FileNotFoundError, and TransferError also when the connection breaks."""
        from botocore.exceptions import BotoCoreError

        body = self._call("get_object", **self._where(key))["Body"]
        try:
            yield from body.iter_chunks(CHUNK)
        except BotoCoreError as error:
            raise TransferError(f"{self.url}/{key}: {' '.join(str(error).split())}") from None

    def _remote_sha256(self, key: str) -> str:
        value = hashlib.sha256()
        for chunk in self._chunks(key):
            value.update(chunk)
        return value.hexdigest()

    def get(self, key: str, path: Path) -> None:
        try:
            with durable.replacing(path) as temporary, open(temporary, "wb") as file:
                for chunk in self._chunks(key):
                    file.write(chunk)
        except FileNotFoundError:
            raise TransferError(f"{self.url}/{key}: is not there") from None

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
