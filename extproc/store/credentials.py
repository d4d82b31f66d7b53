"""Credentials, read at every connect: a password file, or a user-defined provider."""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path

from redis.credentials import CredentialProvider

from extproc.errors import StoreError, UsageError

_FORM = (
    "it takes MODULE:NAME, a redis.CredentialProvider, or a function without arguments that "
    "returns one"
)


class FileCredentials(CredentialProvider):
    """An optional user, and a password file, which can change at any time."""

    def __init__(self, user: str, file: str) -> None:
        """Raise UsageError if the file cannot be read, or is empty."""
        self._user = user
        self._file = file
        try:
            self.has_password = bool(self._read())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--store-password-file {file}: {_describe(error)}") from None

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """See redis-py; raises StoreError if the file is missing."""
        try:
            password = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"password file: {_describe(error)}", kind="auth") from None
        if not password:
            return ()  # type: ignore[return-value]  # redis-py then does not log in
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """See redis-py, whose version would warn about blocking."""
        return self.get_credentials()

    def _read(self) -> str:
        return Path(self._file).read_text().strip()


def _describe(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "cannot be read" if isinstance(error, OSError) else "is not text"


class ProvidedCredentials(CredentialProvider):
    """Credentials of a redis-py or user-defined provider, which may fail, block or return anything.

    Its errors may contain a secret, so only their types are reported.
    """

    def __init__(self, name: str) -> None:
        """Import the provider; raises UsageError unless `name` is the MODULE:NAME of one."""
        self._name = name
        self._provider = _make_provider(name)
        self._asked: asyncio.Task[object] | None = None

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """See redis-py; raises StoreError if the provider fails."""
        try:
            found = await self._ask()
        except Exception as error:  # noqa: BLE001  # a user's code may raise anything
            raise self._make_error(f"raised {type(error).__name__}") from None
        if (
            isinstance(found, tuple)
            and len(found) in (1, 2)
            and all(isinstance(part, str) and part for part in found)
        ):
            return found
        raise self._make_error("must return (PASSWORD,) or (USER, PASSWORD)")

    async def _ask(self) -> object:
        """Ask in a thread if the provider is synchronous, but never in two threads at once."""
        if (
            type(self._provider).get_credentials_async
            is not CredentialProvider.get_credentials_async
        ):
            return await self._provider.get_credentials_async()
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_task(
                asyncio.to_thread(self._provider.get_credentials)
            )
        return await asyncio.shield(self._asked)

    def _make_error(self, what: str) -> StoreError:
        return StoreError(f"credential provider {self._name} {what}", kind="auth")


def _make_provider(name: str) -> CredentialProvider:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise _make_error(name, "there is no colon between two names")
    try:
        found = getattr(import_module(module), attribute)
    except ImportError as error:
        raise _make_error(name, f"cannot import {module} ({error})") from None
    except AttributeError:
        raise _make_error(name, f"{module} has no {attribute}") from None
    except Exception as error:  # noqa: BLE001  # a user's code may raise anything
        raise _make_error(name, f"importing {module} raised {type(error).__name__}") from None
    if isinstance(found, CredentialProvider):
        return found
    if not callable(found):
        raise _make_error(name, f"{attribute} is not a function")
    try:
        found = found()
    except Exception as error:  # noqa: BLE001  # a user's code may raise anything
        raise _make_error(name, f"calling it raised {type(error).__name__}") from None
    if not isinstance(found, CredentialProvider):
        raise _make_error(name, f"it returned {type(found).__name__}")
    return found


def _make_error(name: str, why: str) -> UsageError:
    return UsageError(f"credential_provider {name}: {why}; {_FORM}")
