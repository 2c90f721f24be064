// A peer of another libp2p, for the tests of this folder to drive: js-libp2p over TCP, Noise and yamux.
//
//   node peer.mjs LISTEN...      multiaddrs to listen on; one that ends in /p2p-circuit keeps a place at that relay
//
// Says {"addresses": [...]} when it listens. Then each line of its input is an order, answered by one line:
//
//   {"order": "ask", "address": "/ip4/.../p2p/...", "nbytes": 1000}    send random bytes, wait for the answer
//     -> {"sent": SHA-256, "received": SHA-256}                        of the question and of the answer
//   {"order": "served"} -> {"bodies": [SHA-256, ...]}                  what others have asked so far
//   {"order": "guests"} -> {"peers": ["12D3...", ...]}                 who keeps a place at this relay
//   {"order": "protocols", "peer": "12D3..."} -> {"protocols": [...]}  what that peer said by identify
//
// or by {"error": "..."}. Whoever asks gets back what it sent. Every peer is a relay for others, without limits.
// It ends with its input.

import { createHash, randomBytes } from 'node:crypto'
import { createInterface } from 'node:readline'
import { circuitRelayServer, circuitRelayTransport } from '@libp2p/circuit-relay-v2'
import { identify } from '@libp2p/identify'
import { noise } from '@libp2p/noise'
import { peerIdFromString } from '@libp2p/peer-id'
import { tcp } from '@libp2p/tcp'
import { byteStream } from '@libp2p/utils'
import { yamux } from '@libp2p/yamux'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const PROTOCOL = '/interop/echo' // a little-endian u32 length before each body, one body each way
const PREFIX_NBYTES = 4
const LARGEST = 1 << 25 // bytes of a body; js-libp2p holds 4 MiB of what is not read yet unless told otherwise
const TIMEOUT = 30_000 // ms for one order

// js-libp2p 3 calls it everywhere, and node has it since version 22.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new Promise((yes, no) => { [resolve, reject] = [yes, no] })
  return { promise, resolve, reject }
}

const served = []
const sha256 = (body) => createHash('sha256').update(body).digest('hex')
const soon = () => ({ signal: AbortSignal.timeout(TIMEOUT) })
const bytesOf = (stream) => byteStream(stream, { maxBufferSize: LARGEST + PREFIX_NBYTES })

async function send (bytes, body) {
  const prefix = Buffer.alloc(PREFIX_NBYTES)
  prefix.writeUInt32LE(body.length)
  await bytes.write(Buffer.concat([prefix, body]), soon())
}

async function receive (bytes) {
  const prefix = (await bytes.read({ bytes: PREFIX_NBYTES, ...soon() })).subarray()
  const nbytes = new DataView(prefix.buffer, prefix.byteOffset).getUint32(0, true)
  if (nbytes > LARGEST) throw new Error(`${nbytes} bytes announced, at most ${LARGEST} taken`)
  return nbytes === 0 ? Buffer.alloc(0) : (await bytes.read({ bytes: nbytes, ...soon() })).subarray()
}

async function answer (stream) {
  const bytes = bytesOf(stream)
  try {
    const body = await receive(bytes)
    served.push(sha256(body))
    await send(bytes, body)
    await bytes.read(soon()) // who asked closes first: a daemon would lose the last bytes of the answer
    await stream.close(soon())
  } catch (error) {
    stream.abort(error)
  }
}

const orders = {
  async ask ({ address, nbytes }) {
    const question = randomBytes(nbytes)
    const stream = await node.dialProtocol(multiaddr(address), PROTOCOL, { runOnLimitedConnection: true, ...soon() })
    const bytes = bytesOf(stream)
    await send(bytes, question)
    const received = await receive(bytes)
    await stream.close(soon())
    return { sent: sha256(question), received: sha256(received) }
  },
  async served () {
    return { bodies: served }
  },
  async guests () {
    return { peers: [...node.services.relay.reservations.keys()].map(String) }
  },
  async protocols ({ peer }) {
    return { protocols: (await node.peerStore.get(peerIdFromString(peer))).protocols }
  }
}

const say = (line) => process.stdout.write(JSON.stringify(line) + '\n')
const node = await createLibp2p({
  addresses: { listen: process.argv.slice(2) },
  transports: [tcp(), circuitRelayTransport()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: { identify: identify(), relay: circuitRelayServer({ reservations: { applyDefaultLimit: false } }) }
})
await node.handle(PROTOCOL, answer, { runOnLimitedConnection: true })
say({ addresses: node.getMultiaddrs().map(String) })

for await (const line of createInterface({ input: process.stdin })) {
  const { order, ...details } = JSON.parse(line)
  try {
    say(await orders[order](details))
  } catch (error) {
    say({ error: `${error.name}: ${error.message}` })
  }
}
await node.stop()
