"""Files at addresses such as ``s3://bucket/prefix``, by fsspec.

Credentials come from the environment alone, as the library of each protocol reads them (``AWS_ACCESS_KEY_ID``,
``AWS_PROFILE``, a role of the machine, ``GOOGLE_APPLICATION_CREDENTIALS``). kit neither takes nor writes them.
"""

from __future__ import annotations

from typing import Any

from kit.errors import SpecError

INSTALL = "pip install 'kit[storage]' (s3), or fsspec and the package of that protocol"


def check_address(name: str, address: str) -> None:
    """Raises SpecError where ``address`` has no protocol, or holds credentials. ``name``: its key in messages."""
    from urllib.parse import urlsplit  # a plan without an address does not need it

    try:
        parts = urlsplit(address)
        secret = parts.password is not None or "=" in parts.query
    except ValueError:
        raise SpecError(f"{name} is no address; use s3://bucket/prefix or file:///directory") from None
    if secret:  # the message must not repeat it
        raise SpecError(
            f"{name} holds credentials, which kit would write into files; leave them out and set them in the "
            f"environment, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not (parts.scheme and "://" in address and (parts.netloc or parts.path.strip("/"))):
        raise SpecError(f"{name}={address} has no protocol; use s3://bucket/prefix or file:///directory")


def open_filesystem(name: str, address: str) -> tuple[Any, str]:
    """(fsspec's file system, path in it) of an address. Opens no connection.

    Raises SpecError if the protocol is unknown, or if its package is not installed."""
    check_address(name, address)
    # fsspec makes no directories of a local file system by itself; object stores have none.
    options = {"auto_mkdir": True} if address.startswith(("file:", "local:")) else {}
    try:
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(address, **options)
    except (ImportError, ValueError) as error:
        words = " ".join(str(error).split())
        raise SpecError(f"{name}={address} cannot be opened ({words}); use: {INSTALL}") from None
    return filesystem, str(path).rstrip("/")
