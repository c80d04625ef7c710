import { euros, toCents } from "../lib/format";
import type { LegacyOrder } from "../lib/types";

export function OrderCard({ order, history }: { order: LegacyOrder; history: string[] }) {
  return (
    <article>
      <h2>Order {order.id}</h2>
      <p>{euros(toCents(order.total))}</p>
      <ol>{history.map((step) => <li key={step}>{step}</li>)}</ol>
    </article>
  );
}
