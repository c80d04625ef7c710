// Checks AsyncAPI documents with the official parser: node check.mjs FILE...
//
// Schemas that a document refers to are read from where they lie and are checked with
// it. An error is told with its line and ends in exit code 1; what is only advice is
// told and tolerated.
import { readFile } from 'node:fs/promises';
import { resolve } from 'node:path';
import { Parser } from '@asyncapi/parser';

const files = process.argv.slice(2);
if (files.length === 0) {
  console.error('usage: node check.mjs FILE...');
  process.exit(2);
}

let faults = 0;
for (const file of files) {
  const parser = new Parser();
  const { document, diagnostics } = await parser.parse(await readFile(file, 'utf8'), { source: resolve(file) });
  for (const d of diagnostics) {
    const isError = d.severity === 0;
    if (isError) faults++;
    console.log(`${file}:${d.range.start.line + 1}: ${isError ? 'error' : 'note'}: ${d.message} (${d.code})`);
  }
  const payloads = document?.allMessages().all().filter((m) => m.payload()).length ?? 0;
  if (!document || payloads === 0) {
    faults++;
    console.log(`${file}: error: no document with messages could be made of it`);
    continue;
  }
  console.log(`${file}: ${document.allChannels().all().length} channels, ${document.allOperations().all().length} operations, ${payloads} messages with a schema`);
}
process.exit(faults > 0 ? 1 : 0);
