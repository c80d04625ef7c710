"""Monthly statements."""

from billing.ledger import Ledger
from orders.clients import legacy_client
from orders.money import to_cents


def statement(customer: str, month: str, ledger: Ledger) -> dict:
    total = 0
    for entry in ledger.entries(customer, month):
        order = legacy_client.fetch_order(entry.order_id)
        if order is not None:
            total += to_cents(order["total"])
    return {"customer": customer, "month": month, "total_cents": total}


def days_without_orders(days: list[str]) -> list[str]:
    return [day for day in days if not legacy_client.fetch_order_ids(day)]
