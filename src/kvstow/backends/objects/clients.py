"""Opens obstore's clients, and tells what their errors mean."""

from __future__ import annotations

import re
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from obstore import exceptions
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvstow.backends.objects.settings import ObjectsSettings
from kvstow.errors import StoreError, StoreRefused, StoreUnavailable

FIRST_BACKOFF: Final = timedelta(milliseconds=50)
LONGEST_BACKOFF: Final = timedelta(seconds=1)
PERMANENT_ERRORS: Final = (
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.NotSupportedError,
    exceptions.InvalidPathError,
    exceptions.UnknownConfigurationKeyError,
)
MISSING_BUCKET_CODES: Final = ("NoSuchBucket", "ContainerNotFound")  # S3 and GCS; Azure
TRANSIENT_STATUSES: Final = (408, 409, 425, 429)  # of those from 400 to 499
HTTP_NOT_ALLOWED: Final = "BadScheme"  # in the text of obstore's error
_NO_KEYS: Final = "no credentials in the environment, nor from this host's metadata service: set"
_KEYS_OF_S3: Final = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, objects.profile, or objects.anonymous"
)
# What an error's text contains, and what the message then tells the user to do.
_FIXES: Final = (
    (
        HTTP_NOT_ALLOWED,
        "plain http: set objects.allow_http, or an endpoint that begins with https://",
    ),
    ("/latest/api/token", f"{_NO_KEYS} {_KEYS_OF_S3}"),
    ("/latest/meta-data/", f"{_NO_KEYS} {_KEYS_OF_S3}"),
    ("Missing SecretAccessKey", f"set {_KEYS_OF_S3}"),
    ("Missing AccessKeyId", f"set {_KEYS_OF_S3}"),
    ("/computeMetadata/", f"{_NO_KEYS} GOOGLE_APPLICATION_CREDENTIALS, or objects.anonymous"),
    (
        "/metadata/identity/",
        f"{_NO_KEYS} AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, or objects.anonymous",
    ),
    ("Account must be specified", "set objects.account, or AZURE_STORAGE_ACCOUNT_NAME"),
)
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_HOST: Final = re.compile(r"https?://([^/\s?]*)")


def open_client(options: ObjectsSettings) -> Any:
    """Returns obstore's client for ``options``, which has no connection yet.

    Raises ``StoreRefused`` when obstore can't use ``options``.
    """
    bucket = options.bucket
    if bucket.kind == "file":
        Path(bucket.name).mkdir(mode=0o700, parents=True, exist_ok=True)
        return LocalStore(bucket.name)
    common: dict[str, Any] = {
        "client_options": _client_options(options),
        "retry_config": _retries(options),
    }
    if options.anonymous:
        common["skip_signature"] = True
    try:
        if bucket.kind == "gcs":
            if options.endpoint:
                common["base_url"] = options.endpoint
            return GCSStore(bucket.name, **common)
        if bucket.kind == "azure":
            if options.account:
                common["account_name"] = options.account
            if options.endpoint:
                common["endpoint"] = options.endpoint
            return AzureStore(bucket.name, **common)
        return S3Store(bucket.name, **_s3(options), **common)
    except (exceptions.BaseError, OSError, ValueError) as error:
        raise StoreRefused(_description(error)) from None


def _client_options(options: ObjectsSettings) -> dict[str, Any]:
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=options.timeout_s),
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "allow_http": options.allows_http,
    }
    if options.ca_file is not None:
        client["root_certificate"] = Path(options.ca_file).read_bytes()
    return client


def _retries(options: ObjectsSettings) -> dict[str, Any]:
    return {
        "max_retries": options.retries,
        "retry_timeout": timedelta(seconds=options.timeout_s),
        "backoff": {"init_backoff": FIRST_BACKOFF, "max_backoff": LONGEST_BACKOFF, "base": 2},
    }


def _s3(options: ObjectsSettings) -> dict[str, Any]:
    """Returns the arguments of an S3 client.

    A payload is signed only without TLS: signing takes 1.2 s of a core for each GB, TLS protects
    the bytes as well, and a frame has a checksum of its own.
    """
    s3: dict[str, Any] = {
        "virtual_hosted_style_request": options.addressing == "virtual",
        "disable_bulk_delete": True,  # deletes are rare and few; some compatible servers lack it
    }
    if options.endpoint is None or options.endpoint.startswith("https:"):
        s3["unsigned_payload"] = True
    if options.endpoint:
        s3["endpoint"] = options.endpoint
    if options.region:
        s3["region"] = options.region
    if options.profile:
        s3["credential_provider"] = _profile(options.profile)
    return s3


def _profile(name: str) -> Any:
    """Returns a provider of the credentials of a profile in the AWS tools' files.

    boto3 reads these files, obstore does not.
    """
    try:
        boto3 = import_module("boto3")
        auth = import_module("obstore.auth.boto3")
        boto_error = import_module("botocore.exceptions").BotoCoreError
    except ModuleNotFoundError as error:
        raise StoreRefused("objects.profile needs boto3: pip install boto3") from error
    try:
        return auth.Boto3CredentialProvider(boto3.Session(profile_name=name))
    except (boto_error, ValueError) as error:
        raise StoreRefused(f"objects.profile {name}: {type(error).__name__}") from None


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that the store answered with, or None if it did not answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def is_missing_bucket(error: FileNotFoundError) -> bool:
    """Tells a missing bucket from a missing object."""
    return _error_code(error) in MISSING_BUCKET_CODES


def as_store_error(error: BaseException) -> StoreError:
    """Returns ``StoreRefused`` if the store will always refuse, else ``StoreUnavailable``."""
    status = status_of(error)
    permanent = (
        isinstance(error, PERMANENT_ERRORS)
        or (isinstance(error, FileNotFoundError) and is_missing_bucket(error))
        or (status is not None and 400 <= status < 500 and status not in TRANSIENT_STATUSES)
        or HTTP_NOT_ALLOWED in str(error)
    )
    message = _description(error)
    return StoreRefused(message) if permanent else StoreUnavailable(message)


def _error_code(error: BaseException) -> str:
    """Returns the code in the store's XML answer, such as ``NoSuchBucket``; empty without one."""
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _description(error: BaseException) -> str:
    """Returns kind, host, status and code of an error, for the log.

    The store's own text is left out: it may repeat a key's name or a signature.
    """
    text = str(error)
    host = _HOST.search(text)
    status = status_of(error)
    code = _error_code(error)
    words = [type(error).__name__]
    if host:
        words.append(f"from {host[1].rpartition('@')[2]}")
    if status is not None:
        words.append(f"status {status}")
    if code:
        words.append(code)
    if "TimedOut" in text or "kind: Timeout" in text:
        words.append("timed out")
    elif "kind: Connect" in text:
        words.append("cannot connect")
    elif host is None and status is None:
        words.append(text.partition("\n")[0][:200])
    fix = next((fix for found, fix in _FIXES if found in text), None)
    description = " ".join(words)
    return description if fix is None else f"{description}: {fix}"
