"""Raw HTTP that has divided servers before, replayed against every server of ours.

Sources: RFC 9112 sections 6, 7 and 11.2; the request smuggling families CL.TE, TE.CL and TE.TE.
`FIRST` stands for a request's line and credentials, `HIDDEN` for a whole request that answers 200
if a server reads it as one.
"""

from __future__ import annotations

import asyncio
import re

CHUNKED = b"Transfer-Encoding: chunked\r\n"
HIDDEN = b"<HIDDEN>"
_FRAMES = {
    "CL.TE": b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
    "TE.CL": CHUNKED + b"Content-Length: 4\r\n\r\n5c\r\n" + HIDDEN + b"\r\n0\r\n\r\n",
    "TE.TE identity": CHUNKED + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "TE.TE unknown": b"Transfer-Encoding: cow\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
    "TE xchunked": b"Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "TE space before colon": b"Transfer-Encoding : chunked\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "TE vertical tab": b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "TE quoted": b'Transfer-Encoding: "chunked"\r\nContent-Length: 0\r\n\r\n' + HIDDEN,
    "TE not last": b"Transfer-Encoding: chunked, gzip\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "TE folded": b"Transfer-Encoding:\r\n chunked\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "TE after a bare LF": b"X: a\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "TE after a bare CR": b"X: a\rTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "two lengths": b"Content-Length: 0\r\nContent-Length: 9\r\n\r\n" + HIDDEN,
    "a list of lengths": b"Content-Length: 0, 9\r\n\r\n" + HIDDEN,
    "length with a sign": b"Content-Length: +0\r\n\r\n" + HIDDEN,
    "negative length": b"Content-Length: -1\r\n\r\n" + HIDDEN,
    "hexadecimal length": b"Content-Length: 0x0\r\n\r\n" + HIDDEN,
    "length with underscore": b"Content-Length: 0_0\r\n\r\n" + HIDDEN,
    "length in other digits": "Content-Length: \u0660\r\n\r\n".encode() + HIDDEN,
    "length of 100 digits": b"Content-Length: " + b"9" * 100 + b"\r\n\r\n" + HIDDEN,
    "chunk with a sign": CHUNKED + b"\r\n+0\r\n\r\n" + HIDDEN,
    "negative chunk": CHUNKED + b"\r\n-1\r\n\r\n" + HIDDEN,
    "chunk of 0x": CHUNKED + b"\r\n0x0\r\n\r\n" + HIDDEN,
    "chunk that overflows": CHUNKED + b"\r\n" + b"F" * 40 + b"\r\n" + HIDDEN,
    "chunk without its end": CHUNKED + b"\r\n1\r\nab0\r\n\r\n" + HIDDEN,
    "extension with a bare LF": CHUNKED + b"\r\n2;a\nxx\r\n4f\r\n0\r\n\r\n" + HIDDEN,
    "extension with a bare CR": CHUNKED + b"\r\n2;a\rb\r\n{}\r\n0\r\n\r\n" + HIDDEN,
    "extension with a line in quotes": CHUNKED + b'\r\n2;a="\r\n"{}\r\n0\r\n\r\n' + HIDDEN,
    "length in a trailer": CHUNKED + b"\r\n2\r\n{}\r\n0\r\nContent-Length: 50\r\n\r\n" + HIDDEN,
    "3,000 trailers": CHUNKED + b"\r\n0\r\n" + b"X: a\r\n" * 3000 + b"\r\n" + HIDDEN,
    "more after the end": b"Connection: close\r\nContent-Length: 2\r\n\r\n{}" + HIDDEN,
    "two hosts": b"Host: y\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
    "2,000 headers": b"".join(b"X-%d: a\r\n" % n for n in range(2000)) + b"\r\n" + HIDDEN,
    "a header of 100 KiB": b"X: " + b"a" * 100_000 + b"\r\n\r\n" + HIDDEN,
    "a header without a colon": b"X\r\n\r\n" + HIDDEN,
    "a header without a name": b": x\r\n\r\n" + HIDDEN,
    "a null byte in a header": b"X: \x00\r\n\r\n" + HIDDEN,
    "a space in a header's name": b"X Y: a\r\n\r\n" + HIDDEN,
}
REFUSED = {name: b"<FIRST>" + frame for name, frame in _FRAMES.items()} | {
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
    "HTTP/0.9": b"GET /\r\n" + HIDDEN,
    "HTTP/1.0 with chunks": b"POST / HTTP/1.0\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
    "no host": b"GET / HTTP/1.1\r\n\r\n" + HIDDEN,
    "HTTP/9.9": b"GET / HTTP/9.9\r\n\r\n" + HIDDEN,
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + HIDDEN,
    "a line of 100 KiB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n" + HIDDEN,
    "invalid UTF-8 in the line": b"GET /\xff\xfe HTTP/1.1\r\nX: \xff" + b"\0\r\n\r\n" + HIDDEN,
}
"""Nothing after the first error may be read as a request."""
SERVED = {
    "two in one go": b"<HIDDEN><HIDDEN>",
    "empty lines before": b"\r\n\r\n<HIDDEN>\r\n<HIDDEN>",
    "invalid UTF-8 in a header": b"<HIDDEN:X: \xff\xfe\xed\xa0\x80\r\n><HIDDEN>",
    "an offer of a WebSocket": b"<HIDDEN:Connection: Upgrade\r\nUpgrade: websocket\r\n><HIDDEN>",
}
"""Two requests, each of which is answered, as is the one that ends the connection."""


def answers(text: bytes) -> list[int]:
    """Return the statuses of the answers in a server's bytes."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", text)]


async def replay(host: str, port: int, data: bytes, *, first: bytes, hidden: bytes) -> bytes:
    """Send one entry as one client would, and return everything that the server answers."""
    parts = data.replace(b"<FIRST>", first).split(b"<HIDDEN:")
    line, _, rest = hidden.partition(b"\r\n")
    sent = parts[0] + b"".join(
        line + b"\r\n" + extra + rest + after
        for extra, after in (part.split(b">", 1) for part in parts[1:])
    )
    reader, writer = await asyncio.open_connection(host, port)
    answer = b""
    try:
        # The last request ends the connection, if an error has not.
        last = hidden.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        writer.write(sent.replace(HIDDEN, hidden) + last)
        await writer.drain()
        async with asyncio.timeout(30):
            while more := await reader.read(65536):
                answer += more
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer
