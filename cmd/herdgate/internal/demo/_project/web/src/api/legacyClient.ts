import type { LegacyOrder } from "../lib/types";

/**
 * Client of the old order store.
 *
 * @deprecated since 4.2. Replace `legacyClient.fetchOrder(id)` by
 * `orderClient.get(id)`, see docs/migration.md.
 */
export const legacyClient = {
  async fetchOrder(id: string): Promise<LegacyOrder | null> {
    const answer = await fetch(`/legacy/orders/${encodeURIComponent(id)}`);
    if (answer.status === 404) return null;
    if (!answer.ok) throw new Error(`order ${id}: ${answer.status}`);
    return (await answer.json()) as LegacyOrder;
  },

  async fetchOrderHistory(id: string): Promise<string[]> {
    const answer = await fetch(`/legacy/orders/${encodeURIComponent(id)}/history`);
    return (await answer.json()) as string[];
  },
};
