import { expect, test, vi } from "vitest";

import { legacyClient } from "../src/api/legacyClient";

test("a missing order is null", async () => {
  vi.stubGlobal("fetch", async () => new Response(null, { status: 404 }));
  expect(await legacyClient.fetchOrder("o-1")).toBeNull();
});
