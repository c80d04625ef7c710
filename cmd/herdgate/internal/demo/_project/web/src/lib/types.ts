export interface LegacyOrder {
  id: string;
  state: string;
  total: number;
}

export interface Order {
  id: string;
  state: "open" | "paid" | "shipped" | "returned";
  totalCents: number;
}
