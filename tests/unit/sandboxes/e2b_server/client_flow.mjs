// What a user's program does with the JavaScript SDK: node client_flow.mjs URL KEY
import assert from 'node:assert/strict'
import { CommandExitError, Sandbox, TimeoutError } from 'e2b'

const [url, apiKey] = process.argv.slice(2)
const options = { apiUrl: url, sandboxUrl: url, apiKey }
const sandbox = await Sandbox.create({ ...options, timeoutMs: 100_000, metadata: { flow: 'js' } })

const seen = []
const done = await sandbox.commands.run('echo out; echo err >&2', {
  onStdout: (text) => { seen.push(text) },
})
assert.deepEqual([done.stdout, done.stderr, seen.join('')], ['out\n', 'err\n', 'out\n'])
await assert.rejects(sandbox.commands.run('exit 3'), CommandExitError)
await assert.rejects(sandbox.commands.run('sleep 20', { timeoutMs: 500 }), TimeoutError)

const handle = await sandbox.commands.run('cat', { background: true, stdin: true })
await sandbox.commands.sendStdin(handle.pid, 'in\n')
await sandbox.commands.closeStdin(handle.pid)
assert.equal((await handle.wait()).stdout, 'in\n')

const bytes = new Uint8Array(5 << 20).fill(7)
await sandbox.files.write('deep/f.bin', bytes.buffer)
const read = await sandbox.files.read('deep/f.bin', { format: 'bytes' })
assert.equal(Buffer.compare(Buffer.from(read), Buffer.from(bytes)), 0)
await sandbox.files.write([{ path: '/tmp/a', data: '1' }, { path: 'ü b', data: '2' }])
assert.equal((await sandbox.files.read('/tmp/a')) + (await sandbox.files.read('ü b')), '12')
assert.deepEqual((await sandbox.files.list('.')).map((entry) => entry.name), ['deep', 'ü b'])
assert.equal(await sandbox.files.exists('nothing'), false)

assert.deepEqual((await sandbox.getInfo()).metadata, { flow: 'js' })
const listed = await Sandbox.list({ ...options, query: { metadata: { flow: 'js' } } }).nextItems()
assert.deepEqual(listed.map((info) => info.sandboxId), [sandbox.sandboxId])
await sandbox.kill()
assert.equal(await sandbox.isRunning(), false)
