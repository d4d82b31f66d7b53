from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support.listening import CA, Handler, Listener

__all__ = ["CA", "Receiver", "receiving"]


class Receiver:
    """A webhook over TLS. It answers with these statuses in turn, and repeats the last one."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self.batches: list[tuple[dict[str, str], bytes]] = []
        self.statuses = list(statuses)
        receiver = self

        class Serving(Handler):
            def serve(self) -> None:
                body = self.read_body()
                receiver.batches.append(
                    ({name.lower(): value for name, value in self.headers.items()}, body)
                )
                statuses = receiver.statuses
                self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
                self.end_headers()

        self._server = Listener(Serving, tls=True)
        self.url = f"https://{self._server.address}/hook"
        self.close = self._server.stop


@contextmanager
def receiving(*statuses: int) -> Iterator[Receiver]:
    receiver = Receiver(statuses)
    try:
        yield receiver
    finally:
        receiver.close()
