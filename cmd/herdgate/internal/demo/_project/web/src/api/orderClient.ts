import type { Order } from "../lib/types";

export class OrderNotFound extends Error {}

/** Client of the order service. Amounts are in cents. */
export const orderClient = {
  async get(id: string): Promise<Order> {
    const answer = await fetch(`/api/orders/${encodeURIComponent(id)}`);
    if (answer.status === 404) throw new OrderNotFound(id);
    if (!answer.ok) throw new Error(`order ${id}: ${answer.status}`);
    return (await answer.json()) as Order;
  },
};
