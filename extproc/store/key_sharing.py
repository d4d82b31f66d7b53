"""One hash key for all replicas: the first puts its own key into the store, the others use it.

Nothing waits while the store is unavailable. A replica uses a key of its own until it has read the
shared one. Once a minute it checks that the shared key still exists, and restores it if the store
has lost it.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import logging
from typing import Final

from extproc.logs import make_extra
from extproc.request.hash_key import HashKey
from extproc.store import Store

_LOG = logging.getLogger("loopguard")

_NAME: Final = "hash:1"
_RETRY_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 60.0


class KeySharing:
    """One replica's part; `is_shared` says that its key is the one in the store."""

    def __init__(self, key: HashKey, store: Store) -> None:
        self._key = key
        self._store = store
        self.is_shared = False
        self._is_away = False

    async def run(self) -> None:
        """Synchronize the key with the store until cancelled."""
        while True:
            await asyncio.sleep(
                _LOOK_SECONDS if self.is_shared and not self._is_away else _RETRY_SECONDS
            )
            await self.refresh()

    async def refresh(self) -> None:
        """Use the key in the store, or store this process's own if there is none."""
        try:
            secret = await self._store.share_secret(_NAME, self._key.secret)
        except Exception as error:  # noqa: BLE001  # no error may affect requests
            if not self._is_away:
                state = (
                    "the last known one"
                    if self.is_shared
                    else "its own: others do not recognise its notes and callers"
                )
                told = make_extra(error=str(error) or type(error).__name__)
                _LOG.warning(
                    f"cannot read the hash key from the store, so this process uses {state}",
                    extra=told,
                )
            self._is_away = True
            return
        if secret != self._key.secret and (self.is_shared or self._is_away):  # else it is the start
            _LOG.warning(
                "the hash key now comes from the store: notes and callers of another key are no "
                "longer recognised"
            )
        self._key.secret, self.is_shared, self._is_away = secret, True, False
