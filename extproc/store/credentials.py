"""Credentials for a server: user and password from the URL, the environment or a file, or from a user's own provider."""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from redis.credentials import CredentialProvider

from extproc.errors import StoreError, UsageError

_FORM = "it takes MODULE:FACTORY, a function without arguments that returns a redis.CredentialProvider"


class PasswordCredentials(CredentialProvider):
    """User and password. A file is read at every connect, so that the password can be changed."""

    def __init__(self, user: str, password: str, file: str) -> None:
        """Take user, password or file, any of which may be empty; raises UsageError if the file cannot be read."""
        self._user = user
        self._password = password
        self._file = file
        try:
            self.get_credentials()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not text"
            raise UsageError(f"--store-password-file {file}: {reason}") from None

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """See redis-py; empty without a password."""
        password = self._password or (Path(self._file).read_text().strip() if self._file else "")
        if not password:
            return ()  # type: ignore[return-value]  # redis-py then does not log in
        return (self._user, password) if self._user else (password,)

    def has_password(self) -> bool:
        """Whether there is a user or a password."""
        return bool(self.get_credentials())

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """See redis-py; raises StoreError if the file is missing."""
        try:
            return self.get_credentials()
        except OSError as error:
            raise StoreError(f"password file: {error.strerror}", kind="auth") from None
        except UnicodeDecodeError:
            raise StoreError("password file: is not text", kind="auth") from None


class ProvidedCredentials(CredentialProvider):
    """Credentials of a user's own provider, which may fail, block or return anything.

    Its errors may contain a secret, so only their names are repeated.
    """

    def __init__(self, name: str) -> None:
        """Make the provider; raises UsageError unless `name` is the MODULE:FACTORY of a provider."""
        self._name = name
        self._provider = _make_provider(name)
        self._asked: asyncio.Task[object] | None = None

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """See redis-py; raises StoreError if the provider fails."""
        found = await self._ask()
        if isinstance(found, tuple) and len(found) in (1, 2) and all(isinstance(part, str) and part for part in found):
            return found
        raise self._make_error("must return (PASSWORD,) or (USER, PASSWORD)")

    async def _ask(self) -> object:
        """Ask asynchronously or, if the provider cannot, in a thread, but never in two threads at once."""
        if type(self._provider).get_credentials_async is not CredentialProvider.get_credentials_async:
            try:
                return await self._provider.get_credentials_async()
            except Exception as error:  # noqa: BLE001  # a user's code may raise anything
                raise self._make_error(f"raised {type(error).__name__}") from None
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().create_task(asyncio.to_thread(self._ask_here))
        return await asyncio.shield(self._asked)

    def _ask_here(self) -> object:
        try:
            return self._provider.get_credentials()
        except Exception as error:  # noqa: BLE001  # a user's code may raise anything
            raise self._make_error(f"raised {type(error).__name__}") from None

    def _make_error(self, what: str) -> StoreError:
        return StoreError(f"credential provider {self._name} {what}", kind="auth")


def _make_provider(name: str) -> CredentialProvider:
    factory = _find_factory(name)
    try:
        provider = factory()
    except Exception as error:  # noqa: BLE001  # a user's code may raise anything
        raise _make_error(name, f"calling it raised {type(error).__name__}") from None
    if not isinstance(provider, CredentialProvider):
        raise _make_error(name, f"it returned {type(provider).__name__}")
    return provider


def _find_factory(name: str) -> Callable[[], object]:
    module, _, factory = name.partition(":")
    if not module or not factory:
        raise _make_error(name, "there is no colon between two names")
    try:
        found = getattr(import_module(module), factory)
    except ImportError as error:
        raise _make_error(name, f"cannot import {module} ({error})") from None
    except AttributeError:
        raise _make_error(name, f"{module} has no {factory}") from None
    except Exception as error:  # noqa: BLE001  # a user's code may raise anything
        raise _make_error(name, f"importing {module} raised {type(error).__name__}") from None
    if not callable(found):
        raise _make_error(name, f"{factory} is not a function")
    return found  # type: ignore[no-any-return]  # the factory may return anything


def _make_error(name: str, why: str) -> UsageError:
    return UsageError(f"credential_provider {name}: {why}; {_FORM}")
