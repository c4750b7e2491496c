"""The relay's half inside a sandbox: it accepts connections and carries them over its own streams.

The image's own Python runs this text, from version 3.6 on, so it uses nothing newer and no package.
`_relay_inside.js` does the same with Node. `_relay.py` describes the lines.
"""

import asyncio
import base64
import os
import sys

CHUNK = 24 * 1024
MAX_CONNECTIONS = 128
MAX_LINE = 1 << 17
PULSE_S = 15


class Relay:
    """Exchanges lines with the controller about the connections of one port."""

    def __init__(self, output: asyncio.StreamWriter) -> None:
        self.output = output
        self.lock = asyncio.Lock()  # older versions do not let two tasks wait in drain()
        self.clients = {}  # type: dict[int, asyncio.StreamWriter]
        self.last = 0

    async def say(self, kind: bytes, number: int, payload: bytes = b"") -> None:
        """Print a line; wait if the controller does not read."""
        self.output.write(b"%s %d %s\n" % (kind, number, payload))
        async with self.lock:
            await self.output.drain()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.clients) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self.last += 1
        number, end = self.last, b"E"
        self.clients[number] = writer
        await self.say(b"O", number)
        try:
            data = await reader.read(CHUNK)
            while data:
                await self.say(b"D", number, base64.b64encode(data))
                data = await reader.read(CHUNK)
        except OSError:
            end = b"R"
            self.clients.pop(number, None)
            writer.close()
        await self.say(end, number)

    def handle(self, kind: bytes, number: int, payload: bytes) -> None:
        """Handle a line of the controller."""
        client = self.clients.get(number)
        if client is None:
            return
        if kind == b"D":
            client.write(base64.b64decode(payload))
            return
        del self.clients[number]
        if kind == b"E":
            client.close()
        else:
            client.transport.abort()

    async def pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            await self.say(b"P", 0)


async def main(port: int) -> None:
    loop = asyncio.get_event_loop()
    lines = asyncio.StreamReader(limit=MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(os.dup(1), "wb")
    )
    relay = Relay(asyncio.StreamWriter(transport, protocol, None, loop))
    server = await asyncio.start_server(relay.accept, "127.0.0.1", port)
    await relay.say(b"S", server.sockets[0].getsockname()[1])
    pulse = asyncio.ensure_future(relay.pulse())
    line = await lines.readline()
    while line:
        kind, number, payload = line[:-1].split(b" ")
        relay.handle(kind, int(number), payload)
        line = await lines.readline()
    pulse.cancel()


if __name__ == "__main__":
    asyncio.new_event_loop().run_until_complete(main(int(sys.argv[1])))
    os._exit(0)
