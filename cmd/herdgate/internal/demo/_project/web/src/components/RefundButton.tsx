import { legacyClient } from "../api/legacyClient";

export function RefundButton({ id }: { id: string }) {
  async function refund() {
    const order = await legacyClient.fetchOrder(id);
    if (order === null) return;
    await fetch("/api/refunds", {
      method: "POST",
      body: JSON.stringify({ order_id: order.id, amount: order.total }),
    });
  }

  return <button onClick={refund}>Pay back</button>;
}
