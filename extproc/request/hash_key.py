"""The key of hashes that only Loopguard can make: of marks in notes and of clients' API keys.

All replicas need the same key to recognize each other's hashes. It comes from a file, or else from
the store; see `key_sharing`. Without either, each process has its own. The key is never logged or
shown.
"""

from __future__ import annotations

import os
import re
from hashlib import blake2b
from pathlib import Path
from typing import Final

from extproc.errors import UsageError

KEY_BYTES: Final = 32
_MOST_BYTES: Final = 4_096
_HIDDEN_BYTES: Final = 8
_HIDDEN: Final = re.compile(f"[0-9a-f]{{{2 * _HIDDEN_BYTES}}}")


class HashKey:
    """The current key.

    Attributes:
        secret: 32 random bytes. Assign it to replace the key between two requests.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        """Use this key, or generate one for this process."""
        self.secret = secret if secret is not None else os.urandom(KEY_BYTES)

    def start(self, purpose: bytes, size: int) -> blake2b:
        """Start a keyed hash (BLAKE2b, RFC 7693 section 2.9).

        Args:
            purpose: a constant of up to 16 bytes; hashes for one purpose are useless for another.
            size: length of the hash, in bytes.
        """
        return blake2b(key=self.secret, digest_size=size, person=purpose)

    def hide(self, secret: str) -> str:
        """The hash that is shown instead of a client's secret, 16 hex digits."""
        digest = self.start(b"credential", _HIDDEN_BYTES)
        digest.update(secret.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def is_hidden(value: str) -> bool:
    """Whether a value may be the hash of a secret."""
    return _HIDDEN.fullmatch(value) is not None


class RecordedKey(HashKey):
    """The key for recorded requests, whose secrets are already hashed."""

    def hide(self, secret: str) -> str:
        """See `HashKey`."""
        return secret if is_hidden(secret) else super().hide(secret)


PROCESS_KEY: Final = HashKey()
"""The default key, generated for this process."""


def read_hash_key(path: str) -> HashKey:
    """Read the key from a file, or generate one for this process if no file is named.

    The file may contain raw bytes or text, such as hex digits. Line ends after them are ignored.

    Raises:
        UsageError: the file is unreadable, or does not contain a key.
    """
    if not path:
        return HashKey()
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--hash-key-file {path}: {error.strerror}") from None
    if not KEY_BYTES <= len(content) <= _MOST_BYTES:
        size = (
            f"{len(content)} bytes"
            if len(content) <= _MOST_BYTES
            else f"more than {_MOST_BYTES} bytes"
        )
        wanted = (
            f"it must hold {KEY_BYTES} to {_MOST_BYTES} random bytes, such as those of: "
            "openssl rand -hex 32"
        )
        raise UsageError(f"--hash-key-file {path}: it holds {size}; {wanted}")
    return HashKey(blake2b(content.rstrip(b"\r\n"), digest_size=KEY_BYTES).digest())
