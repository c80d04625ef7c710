import { useEffect, useState } from "react";

import { legacyClient } from "../api/legacyClient";
import { OrderCard } from "../components/OrderCard";
import type { LegacyOrder } from "../lib/types";

export function OrderPage({ id }: { id: string }) {
  const [order, setOrder] = useState<LegacyOrder | null>(null);
  const [history, setHistory] = useState<string[]>([]);

  useEffect(() => {
    legacyClient.fetchOrder(id).then(setOrder);
    legacyClient.fetchOrderHistory(id).then(setHistory);
  }, [id]);

  if (order === null) return <p>No such order.</p>;
  return <OrderCard order={order} history={history} />;
}
