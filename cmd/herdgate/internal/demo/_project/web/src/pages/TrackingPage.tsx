import { useEffect, useState } from "react";

import { orderClient } from "../api/orderClient";

// Already moved: this page used legacyClient.fetchOrder(id) until 4.3.
export function TrackingPage({ id }: { id: string }) {
  const [state, setState] = useState("open");

  useEffect(() => {
    orderClient.get(id).then((order) => setState(order.state));
  }, [id]);

  return <p>Your order is {state}.</p>;
}
