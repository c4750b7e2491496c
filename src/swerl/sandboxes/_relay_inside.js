// The relay's half inside a sandbox whose image has no Python: the same lines as
// `_relay_inside.py`, run by the Node that an agent brings. `_relay.py` describes the lines.

const net = require('net');
const readline = require('readline');

const CHUNK = 24 * 1024, MAX_CONNECTIONS = 128, PULSE_MS = 15000;
const clients = new Map();
let last = 0;

function say(kind, number, payload = '') {
  return process.stdout.write(`${kind} ${number} ${payload}\n`);
}

function accept(socket) {
  if (clients.size >= MAX_CONNECTIONS) return socket.destroy();
  const number = ++last;
  clients.set(number, socket);
  say('O', number);
  socket.on('data', (data) => {
    let hasRoom = true;
    for (let start = 0; start < data.length; start += CHUNK) {
      hasRoom = say('D', number, data.subarray(start, start + CHUNK).toString('base64'));
    }
    if (hasRoom) return;
    socket.pause();
    process.stdout.once('drain', () => socket.resume());
  });
  socket.on('end', () => say('E', number));
  socket.on('error', () => { if (clients.delete(number)) say('R', number); });
}

function handle(line) {
  const [kind, number, payload] = line.split(' ');
  const socket = clients.get(Number(number));
  if (!socket) return;
  if (kind === 'D') return socket.write(Buffer.from(payload, 'base64'));
  clients.delete(Number(number));
  if (kind === 'E') socket.end();
  else socket.destroy();
}

process.stdout.setMaxListeners(2 * MAX_CONNECTIONS);
const server = net.createServer({ allowHalfOpen: true }, accept);
server.listen(Number(process.argv[1]), '127.0.0.1', () => say('S', server.address().port));
setInterval(() => say('P', 0), PULSE_MS);
readline.createInterface({ input: process.stdin }).on('line', handle).on('close', process.exit);
