import h2.connection
import h2.events

from tests.support.harness import Stack


def over_http2(
    made: Stack, path: str, headers: dict[str, str], *, trailers: bool = False
) -> tuple[str, bytes]:
    """Status and body of one GET over HTTP/2 with prior knowledge."""
    http = h2.connection.H2Connection()
    http.initiate_connection()
    lines = {":method": "GET", ":path": path, ":authority": "h", ":scheme": "http", **headers}
    http.send_headers(1, list(lines.items()), end_stream=not trailers)
    if trailers:
        http.send_headers(1, [("x-trailer", "1")], end_stream=True)
    status, body = "", b""
    with made.connect() as connection:
        while True:
            connection.sendall(http.data_to_send())
            for event in http.receive_data(connection.recv(65_536)):
                match event:
                    case h2.events.ResponseReceived():
                        status = dict(event.headers)[b":status"].decode()
                    case h2.events.DataReceived():
                        body += event.data
                    case h2.events.StreamEnded():
                        return status, body
                    case h2.events.StreamReset() | h2.events.ConnectionTerminated():
                        raise AssertionError(event)
