import { useState } from "react";

import { legacyClient } from "../api/legacyClient";
import { orderClient } from "../api/orderClient";
import { toCents } from "../lib/format";

/** Lets support staff compare what both stores say about an order. */
export function SupportPage() {
  const [verdict, setVerdict] = useState("");

  async function compare(id: string) {
    const before = await legacyClient.fetchOrder(id);
    const now = await orderClient.get(id);
    setVerdict(before !== null && toCents(before.total) === now.totalCents ? "same" : "different");
  }

  return (
    <form action={(data) => compare(String(data.get("id")))}>
      <input name="id" placeholder="order id" />
      <output>{verdict}</output>
    </form>
  );
}
