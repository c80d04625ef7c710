// Follows Herdgate's events through a durable consumer and checks each against its
// published schema: stopped or killed, it goes on where it was.
//
//   node subscriber.mjs --nats 127.0.0.1:4222
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { AckPolicy, DeliverPolicy, JetStreamApiCodes, JetStreamApiError, jetstream, jetstreamManager } from "@nats-io/jetstream";
import { connect, credsAuthenticator, nanos } from "@nats-io/transport-node";
import Ajv2020 from "ajv/dist/2020.js";
import addFormats from "ajv-formats";

const { values: options } = parseArgs({
  options: {
    nats: { type: "string", default: "127.0.0.1:4222" },
    creds: { type: "string" },
    stream: { type: "string", default: "HG_EVENTS" },
    subject: { type: "string", default: "hg.v1.event.>" },
    // Who has the same name shares the events.
    name: { type: "string", default: "subscriber-node" },
    // An event that is not acknowledged for so long comes again.
    "ack-wait": { type: "string", default: "10" },
    // What "herdgate contract schemas --output-dir DIR" wrote.
    schemas: { type: "string", default: new URL("../../pkg/contract/schema/v1", import.meta.url).pathname },
  },
});

// readSchemas compiles the schema of every event type that this contract has.
function readSchemas(dir) {
  const ajv = new Ajv2020({ allErrors: true });
  addFormats(ajv);
  const byType = new Map();
  for (const file of readdirSync(dir)) {
    const type = /^event\.([a-z_]+)\.json$/.exec(file)?.[1];
    if (type) byType.set(type, ajv.compile(JSON.parse(readFileSync(join(dir, file), "utf8"))));
  }
  if (byType.size === 0) throw new Error(`no event.*.json in ${dir}`);
  return { ajv, byType };
}

// Recent remembers the last ids. A repeat follows the first within ten thousands of
// events; a database has a unique key instead.
class Recent {
  #ids = new Set();
  has(id) { return this.#ids.has(id); }
  add(id) {
    this.#ids.add(id);
    if (this.#ids.size > 100_000) this.#ids.delete(this.#ids.values().next().value);
  }
}

// durable finds the consumer or makes it. With max_ack_pending 1 the events come in
// their order also after a crash: the next one is sent when the last is acknowledged.
async function durable(nc) {
  const { stream, name } = options;
  try {
    return await jetstream(nc).consumers.get(stream, name);
  } catch (err) {
    if (!(err instanceof JetStreamApiError && err.code === JetStreamApiCodes.ConsumerNotFound)) throw err;
  }
  await (await jetstreamManager(nc)).consumers.add(stream, {
    durable_name: name,
    filter_subject: options.subject,
    deliver_policy: DeliverPolicy.All,
    ack_policy: AckPolicy.Explicit,
    ack_wait: nanos(Number(options["ack-wait"]) * 1000),
    max_ack_pending: 1,
  });
  return await jetstream(nc).consumers.get(stream, name);
}

// problem says what is wrong with an event. A type or a field that this contract does
// not know is not wrong: it is of a newer one.
function problem({ ajv, byType }, event) {
  const valid = byType.get(event.type);
  return !valid || valid(event) ? "" : ajv.errorsText(valid.errors);
}

process.on("uncaughtException", (err) => {
  console.error(`subscriber: ${err.message}`);
  process.exit(1);
});
const schemas = readSchemas(options.schemas);
const told = new Recent();
const nc = await connect({
  servers: options.nats.split(",").map((s) => s.replace(/^nats:\/\//, "")),
  name: options.name,
  maxReconnectAttempts: -1,
  ...(options.creds && { authenticator: credsAuthenticator(readFileSync(options.creds)) }),
});
// The client asks for more than one at a time; the server sends them one by one.
const messages = await (await durable(nc)).consume({ max_messages: 50 });
for (const signal of ["SIGINT", "SIGTERM"]) process.once(signal, () => messages.close());

for await (const msg of messages) {
  let event;
  try {
    event = msg.json();
    if (!event?.id || !event.type) throw new Error("no CloudEvent");
  } catch (err) {
    // Nobody will ever understand it: say so, and do not have it sent again.
    console.error(`subscriber: message on ${msg.subject}: ${err.message}`);
    msg.term("not a CloudEvent");
    continue;
  }
  const wrong = problem(schemas, event);
  if (wrong) console.error(`subscriber: invalid ${event.type} ${event.id}: ${wrong}`);
  if (!told.has(event.id)) {
    told.add(event.id);
    const { type, runid, taskid = "_", attempt = 0, id } = event;
    console.log(msg.seq, event.time.slice(11, 23), type, runid, taskid, attempt, id);
  }
  // Told first, acknowledged then: killed in between, it comes again.
  msg.ack();
}
await nc.drain();
